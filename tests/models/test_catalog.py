"""What a user may call a model: `tiny`, `random:SIZE`, a folder as text, as `Path` or below `~`, or a downloaded Hub id."""

from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from huggingface_hub import constants

from haarkv.models.catalog import TINY, load_model, path_of, read_config
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the Hub, in which `put` leaves a checkpoint as a download does."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(hub_id):
        kept = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs" / "main").write_text(COMMIT)
        return write_checkpoint(kept / "snapshots" / COMMIT)

    return put


def test_a_folder_may_be_text_a_path_or_below_home(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: cls(tmp_path)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), folder, "~/model", Path("~/model")):
        assert path_of(name) == folder
        assert load_model(name).config == read_config(folder)
        assert load_tokenizer(name, read_config(name)).encode("a") == [97]
    assert path_of("tiny") == TINY
    assert path_of("random:14b") is None


def test_a_hub_id_that_was_downloaded_is_found_and_nothing_is_fetched(hub):
    folder = hub("Org/Some-Model_1.5b")
    assert path_of("Org/Some-Model_1.5b") == folder
    assert read_config("Org/Some-Model_1.5b") == read_config(folder)
    with pytest.raises(InputError, match="hf download"):
        path_of("Org/never-downloaded")


def test_a_folder_of_that_name_comes_before_the_hub(hub, tmp_path, monkeypatch):
    hub("Org/model")
    monkeypatch.chdir(tmp_path)
    here = write_checkpoint(tmp_path / "Org" / "model")
    assert path_of("Org/model").resolve() == here


@pytest.mark.parametrize("name", ["", "no-such", "a/b/c", "-/-", "a\0b", "~nobody-of-that-name/x", "x" * 5000, "org/..", "/"])
def test_what_is_no_model_is_refused_in_one_line(hub, name):
    with pytest.raises(InputError) as refused:
        read_config(name)
    assert "\n" not in str(refused.value)
