"""What a user may call a model: `tiny`, `random:SIZE`, a folder as text, as `Path` or below `~`, or a downloaded Hub id."""

import os
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

from haarkv.models.catalog import TINY, find_model, load_model, model_files, read_config
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the Hub, in which `put` leaves a checkpoint as a download does."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(hub_id, main=COMMIT, commit=COMMIT, write=write_checkpoint):
        hub_folder = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
        if main is not None:
            (hub_folder / "refs").mkdir(parents=True, exist_ok=True)
            (hub_folder / "refs" / "main").write_text(main)
        folder = hub_folder / "snapshots" / commit
        folder.mkdir(parents=True)
        write(folder)
        return folder

    return put


def test_a_folder_may_be_text_a_path_or_below_home(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: cls(tmp_path)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), folder, "~/model", Path("~/model")):
        assert find_model(name) == folder
        assert load_model(name).config == read_config(folder)
        assert load_tokenizer(name, read_config(name)).encode("a") == [97]
    assert find_model("tiny") == TINY
    assert find_model("random:14b") is None


def test_a_hub_id_that_was_downloaded_is_found_and_nothing_is_fetched(hub):
    folder = hub("Org/Some-Model_1.5b")
    assert find_model("Org/Some-Model_1.5b") == folder
    assert read_config("Org/Some-Model_1.5b") == read_config(folder)
    with pytest.raises(InputError, match="hf download"):
        find_model("Org/never-downloaded")


def link_blobs(folder):
    """A checkpoint of which the library knows more files than were fetched; each is a link, as it leaves them."""
    write_checkpoint(folder.parents[1] / "blobs")
    for file in (folder.parents[1] / "blobs").iterdir():
        (folder / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    entries = {
        name: TreeCacheEntry(1, "0", None, None, None) for name in ("README.md", "model.safetensors", "onnx/model.onnx")
    }
    write_tree_cache(str(folder.parents[1]), folder.name, entries)


@pytest.mark.parametrize(
    "main", [COMMIT, f"{COMMIT}\n", f"{COMMIT}\r\n", None, "", "fedcba98" * 5, "x" * 2**12, "../../elsewhere"]
)
def test_a_downloaded_model_is_found_whatever_its_cache_says_of_it(hub, main):
    """A part of its files, a branch with the end of a line, or none: then the newest snapshot."""
    folder, other = hub("Org/model", main, write=link_blobs), hub("Org/model", main, commit="0" * 40)
    os.utime(other, (1, 2**31) if main and COMMIT in main else (1, 1))
    assert find_model("Org/model") == folder
    assert load_model("Org/model").config.num_layers == 2
    assert {file.parent for file in model_files("Org/model")} == {folder}


def test_a_reference_to_a_snapshot_that_is_absent_is_told(hub):
    folder = hub("a/b", "new")
    with pytest.warns(UserWarning, match=f"no snapshot 'new', which refs/main names; the newest is taken, {COMMIT}"):
        assert find_model("a/b") == folder


def gguf_files(*names):
    def write(folder):
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"GGUF")

    return write


@pytest.mark.parametrize("where", ["hub", "folder"])
@pytest.mark.parametrize(
    ("names", "only"),
    [
        (["m.gguf"], "m.gguf"),
        (["m.gguf", "mmproj-m-f16.gguf", "config.json"], "m.gguf"),
        (["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"], "Q8_0/m-00001-of-00002.gguf"),
        (["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf"], None),
    ],
)
def test_where_only_gguf_files_lie_one_is_the_model_and_of_several_one_is_to_be_named(hub, tmp_path, where, names, only):
    folder = hub("Org/model-GGUF", write=gguf_files(*names)) if where == "hub" else tmp_path / "folder"
    if where == "folder":
        folder.mkdir()
        gguf_files(*names)(folder)
    name = "Org/model-GGUF" if where == "hub" else str(folder)
    if only is not None:
        assert find_model(name) == folder / only
        write_checkpoint(folder)
        assert find_model(name) == folder
        return
    with pytest.raises(InputError) as refusal:
        find_model(name)
    assert str(refusal.value) == f"{name} has several GGUF files: name one as {folder}/FILE, of {', '.join(names)}"
    if where == "hub":
        assert find_model(f"{name}:Q4_K_M") == find_model(f"{name}:q4_k_m") == folder / names[0]
        for tag in ("Q4_K", "Q4_K_X", "4_K_M", "Q9", "m"):
            with pytest.raises(InputError, match="name one as"):
                find_model(f"{name}:{tag}")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_file_of_a_model_says_that_its_folder_is_to_be_named(tmp_path, name):
    folder = write_checkpoint(tmp_path / "below" / "model")
    with pytest.raises(InputError, match=f"^{folder / name} is one file of a model; name its folder, {folder}$"):
        find_model(folder / name)
    with pytest.raises(InputError, match=f"^{tmp_path / 'below'} has no config.json; .* such as {folder}$"):
        find_model(tmp_path / "below")


def test_a_folder_of_that_name_comes_before_the_hub(hub, tmp_path, monkeypatch):
    hub("Org/model")
    monkeypatch.chdir(tmp_path)
    local_folder = write_checkpoint(tmp_path / "Org" / "model")
    assert find_model("Org/model").resolve() == local_folder


@pytest.mark.parametrize("name", ["", "no-such", "a/b/c", "-/-", "a\0b", "~nobody-of-that-name/x", "x" * 5000, "org/..", "/"])
def test_what_is_no_model_is_refused_in_one_line(hub, name):
    with pytest.raises(InputError) as refusal:
        read_config(name)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_tokenizer_is_refused_with_what_writes_one(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json; .* AutoTokenizer.from_pretrained"):
        load_tokenizer(folder, read_config(folder))
