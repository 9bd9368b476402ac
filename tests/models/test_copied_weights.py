"""Weights that are copied out of their file's pages: the same numbers, counted as memory of the process."""

import sys

import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import byte_vocabulary, convert

import tq
from haarkv.executors.catalog import NAMES, info
from haarkv.models.catalog import load_model, maps_file, read_config, weights_of
from haarkv.models.footprint import WeightBytes
from haarkv.tq_ops.memory import mapped_memory
from haarkv.tq_ops.weight import Blocks
from tq.cli import main

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


@pytest.fixture(scope="module", params=["Q8_0", "bfloat16", "untied"])
def model(request, tmp_path_factory):
    """A file or folder, and the dtype that it needs no conversion for."""
    folder = tmp_path_factory.mktemp("m")
    config = {"head_dim": 64, "vocab_size": 9000, "tie_word_embeddings": request.param != "untied"}
    source = write_checkpoint(folder / "m", config=config)
    return (source, "bfloat16") if request.param == "bfloat16" else (convert(source, folder / "m.gguf", "Q8_0"), "float32")


def bytes_of(weight):
    return weight.data if isinstance(weight, Blocks) else weight


def test_copies_are_the_same_numbers_and_counted(model):
    path, dtype = model
    mapped = load_model(path, dtype, keep_blocks=True)
    copied = load_model(path, dtype, keep_blocks=True, mmap=False)
    for (name, one), (_, other) in zip(mapped.weights.named(), copied.weights.named(), strict=True):
        assert type(one) is type(other), name
        assert torch.equal(bytes_of(one), bytes_of(other)), name
    config = read_config(path)
    counted = weights_of(path, config, dtype, keep_blocks=True).copied()
    own = {bytes_of(weight).data_ptr(): bytes_of(weight).nbytes for _, weight in copied.weights.named()}
    assert sum(own.values()) == counted.total
    # Of an embedding that is no head a forward reads rows alone, from the file: two models share its pages.
    again = load_model(path, dtype, keep_blocks=True, mmap=False).weights.named()
    pairs = zip(copied.weights.named(), again, strict=True)
    shared = {name for (name, one), (_, other) in pairs if bytes_of(one).data_ptr() == bytes_of(other).data_ptr()}
    assert shared == (set() if config.tied else {"model.embed_tokens.weight"})
    assert counted.kept == (0 if config.tied else bytes_of(copied.weights.embedding).nbytes)


@needs_proc
def test_pages_that_were_copied_leave_the_process(model):
    path, dtype = model
    copied = load_model(path, dtype, keep_blocks=True, mmap=False)
    # What is left is the header, and pages that two tensors share.
    left, whole = mapped_memory([path]), weights_of(path, read_config(path), dtype, keep_blocks=True)
    assert left < whole.picked + 0.5 * (whole.kept - whole.picked)
    assert bytes_of(copied.weights.layers[0]["down_proj"]).count_nonzero() > 0


def test_weights_are_copied_where_twice_as_much_is_free(monkeypatch):
    weights = WeightBytes(own=10, kept=100, picked=30)
    assert weights.copied() == WeightBytes(own=80, kept=30, picked=30)
    for free, processes, mapped in ((160, 1, False), (159, 1, True), (319, 2, True), (320, 2, False)):
        monkeypatch.setattr("haarkv.models.catalog.available_memory", lambda free=free: free)
        assert maps_file(weights, None, processes) == mapped
        assert maps_file(weights, None, processes, in_place=False)
        assert maps_file(weights, True)
        assert not maps_file(weights, False)


def test_only_cpu_reads_weights_in_place():
    assert {name for name in NAMES if info(name).reads_in_place(None)} == {"cpu"}


@pytest.mark.parametrize(("option", "asked"), [("--mmap", True), ("--no-mmap", False), (None, None)])
def test_a_session_maps_or_copies_as_asked(tmp_path, option, asked, capsys):
    folder = write_checkpoint(tmp_path / "m", config={"head_dim": 64, "vocab_size": 263})
    path = convert(folder, tmp_path / "m.gguf", "Q8_0", vocabulary=byte_vocabulary())
    session = tq.load(path, kv="tq4", executor="cpu", mmap=asked)
    counted = session.loaded.weights
    assert (counted.kept > counted.picked) == (asked is True)
    given = ["generate", "--model", str(path), "--kv", "tq4", "--prompt", "abc", "--max-new-tokens", "4", "--no-chat"]
    texts = []
    for options in ([], [option] if option else []):
        assert main([*given, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@needs_proc
@pytest.mark.parametrize("asked", [True, False, None])
def test_the_reference_maps_and_copies_as_asked_too(tmp_path, asked):
    path = write_checkpoint(tmp_path / "m", config={"head_dim": 64, "vocab_size": 9000})
    session = tq.load(path, kv="bf16", executor="reference", dtype="bfloat16", mmap=asked)
    counted, file = session.loaded.weights, path / "model.safetensors"
    assert (counted.kept > counted.picked) == (asked is not False)
    session.generate("abc", max_new_tokens=1)  # reads all of them, but for most rows of the embedding
    assert (mapped_memory([file]) > 0.9 * (counted.total - counted.picked)) == (asked is not False)


def test_what_balancing_restores_is_counted(tmp_path, monkeypatch):
    """Of the largest layer at a time, in FP32: projections of Q and K too, where K has no norm."""
    made = write_checkpoint(tmp_path / "m", config={"head_dim": 64, "vocab_size": 263})
    session = tq.load(convert(made, tmp_path / "m.gguf", "Q8_0", vocabulary=byte_vocabulary()), kv="tq4", executor="cpu")
    layer, restored = session.executor.weights.layers[0], 0
    read = {name: 4 * layer[name].numel() for name in ("o_proj", "v_proj", "input_norm", "q_norm", "k_norm") if name in layer}
    restored = sum(read.values()) + read["v_proj"]
    assert "k_norm" in read
    assert session.loaded.restored == restored
    assert tq.load(made, kv="tq4", executor="cpu").loaded.restored == 0
