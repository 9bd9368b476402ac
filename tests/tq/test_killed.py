"""Commands that are killed at any moment: nothing is lost, and the next run removes what is left."""

import pytest
from kills import every_moment

from haarkv.tq_ops import output_files as files
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import check_folder, check_writable, whole_folder, write_whole

MANIFEST = "about.json"


def write_export(folder, text):
    with whole_folder(folder, replaces=MANIFEST) as half:
        for name in ("a", "b"):
            (half / name).write_text(text)
        (half / MANIFEST).write_text('{"files": ["a", "b"]}')


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != MANIFEST}


def test_a_folder_that_replaces_another_is_never_lost(tmp_path):
    target = tmp_path / "out"
    write_export(target, "old")
    for _ in every_moment(lambda: write_export(target, "new")):
        if target.exists():
            assert texts(target) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        with pytest.raises(InputError):  # the next run, of whatever it is, begins by putting things in order
            write_failing(target)
        assert names_in(tmp_path) == ["out"]
        assert texts(target) in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
        write_export(target, "old")
    assert texts(target) == {"a": "new", "b": "new"}


def write_failing(target):
    """Fails once it has begun, as on a full disk."""
    with files._temporary_folder(target), whole_folder(target):
        pass


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"
    for _ in every_moment(lambda: write_export(target, "new")):
        if target.exists():
            assert texts(target) == {"a": "new", "b": "new"}
            write_export(target, "new")
        check_writable(target.with_name("other"))
        write_whole(target.with_name("other"), "x")
        (tmp_path / "other").unlink()
        write_export(target, "again")
        assert names_in(tmp_path) == ["out"]
        for name in ("a", "b", MANIFEST):
            (target / name).unlink()
        target.rmdir()


def test_a_file_that_cannot_take_its_name_stays_the_old_and_a_link_stays_a_link(tmp_path, monkeypatch):
    target, link = tmp_path / "plan.json", tmp_path / "link"
    write_whole(target, "old")
    link.symlink_to(target)

    def refuse(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(target), "replace", refuse)
        with pytest.raises(InputError, match="No space left"):
            write_whole(target, "new")
    assert target.read_text() == "old"
    write_whole(link, "through")
    assert (link.is_symlink(), target.read_text(), names_in(tmp_path)) == (True, "through", ["link", "plan.json"])


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    """And so is what only looks like it."""
    target = tmp_path / "plan.json"
    (tmp_path / ".plan.json.notes.tmp").touch()
    (tmp_path / ".other.json.7.tmp").touch()
    with files._temporary_folder(target) as half:
        other_file = half.rename(tmp_path / ".plan.json.99999999.tmp")  # as of another process
        write_whole(target, "x")
        assert other_file.exists()
    write_whole(target, "y")
    assert names_in(tmp_path) == [".other.json.7.tmp", ".plan.json.notes.tmp", "plan.json"]


# -- What may be replaced -------------------------------------------------------------------------------------------------


def test_only_what_its_manifest_lists_is_replaced(tmp_path):
    target = tmp_path / "out"
    write_export(target, "old")
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"does not list thesis\.txt"):
        write_export(target, "new")
    assert (target / "thesis.txt").read_text() == "years of work"
    (target / "thesis.txt").unlink()
    (target / "a").unlink()
    (target / "a").mkdir()
    with pytest.raises(InputError, match="does not list a;"):
        check_folder(target, replaces=MANIFEST)
    (target / "a").rmdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(InputError, match="only a folder that this command wrote"):
        write_export(link, "new")
    (target / MANIFEST).write_text("{}")
    with pytest.raises(InputError, match="does not list its files"):
        write_export(target, "new")
    assert texts(target) == {"b": "old"}


def test_what_comes_into_a_folder_meanwhile_is_kept(tmp_path):
    target = tmp_path / "out"
    write_export(target, "old")

    def interfere():
        with whole_folder(target, replaces=MANIFEST) as half:
            (half / MANIFEST).write_text('{"files": []}')
            (target / "late").touch()

    with pytest.raises(InputError, match="does not list late"):
        interfere()
    assert names_in(tmp_path) == ["out"]
    assert texts(target) == {"a": "old", "b": "old", "late": ""}
