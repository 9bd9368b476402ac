"""Memory is counted before weights are read: what does not fit is refused, and what was counted is what is there."""

import sys

import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import byte_vocabulary, convert
from refusals import assert_refused

import tq
from haarkv.engine.plans import memory_need, plan_for
from haarkv.executors.catalog import info
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model, maps_file, model_weight_bytes, read_config
from haarkv.models.families import SIZES
from haarkv.models.weights import WeightBytes
from haarkv.tq_ops import memory
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.memory import mapped_memory
from haarkv.tq_ops.weight import Blocks

SIZES_64 = {"head_dim": 64, "vocab_size": 263}


def write_file(folder, kind, **sizes):
    """A GGUF file of random weights, with a vocabulary."""
    checkpoint = write_checkpoint(folder / "m", config=SIZES_64 | sizes)
    return convert(checkpoint, folder / f"{kind}.gguf", kind, vocabulary=byte_vocabulary())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {kind: write_file(folder, kind) for kind in ("F32", "BF16", "Q8_0")}


@pytest.fixture(scope="module")
def folder(files):
    return files["F32"].with_name("m")


@pytest.mark.parametrize(
    ("kind", "dtype", "keep"),
    [("folder", "float32", False), ("folder", "bfloat16", False), ("F32", "float32", False), ("BF16", "float32", False),
     ("Q8_0", "float32", True), ("Q8_0", "float32", False), ("Q8_0", "bfloat16", ("Q4_K",))],
)  # fmt: skip
def test_what_is_counted_is_what_is_loaded(folder, files, kind, dtype, keep):
    name = folder if kind == "folder" else files[kind]
    config, model = read_config(name), load_model(name, dtype, keep_blocks=keep)
    counts = model_weight_bytes(name, config, dtype, keep_blocks=keep)
    assert counts.total == model.weights.nbytes
    if (kind, dtype, keep) in (("folder", "bfloat16", False), ("Q8_0", "float32", True)):  # all of it stays in the file
        assert counts.private == 0


def test_codes_that_onnx_makes_of_blocks_are_counted_and_so_is_what_the_runtime_copies(files, run):
    pytest.importorskip("onnxruntime")
    from haarkv.executors.onnx import OnnxExecutor

    config, model = read_config(files["Q8_0"]), load_model(files["Q8_0"], keep_blocks=True)
    codes = {name: value.tensor_size_in_bytes() for name, value in OnnxExecutor(model)._coded.items()}
    if not config.tied:
        embedding = {name: nbytes for name, nbytes in codes.items() if name.startswith("model.embed_tokens")}
        assert not embedding
    counts = model_weight_bytes(files["Q8_0"], config, "float32", keep_blocks=True, in_order=info("onnx").in_order)
    assert counts.private == 2 * sum(codes.values())
    assert run("info", files["Q8_0"], "--executor", "onnx", "--json").json["weight_bytes"] == counts.total


def test_a_model_without_room_is_refused_before_it_is_read(folder, run, monkeypatch):
    def read(*_, **__):
        raise AssertionError("its weights were read")

    monkeypatch.setattr("haarkv.models.checkpoint.stored_tensors", read)
    monkeypatch.setattr("haarkv.tq_ops.memory.available_memory", lambda: 2**20)
    args = ("--model", folder, "--dtype", "float32", "--prompt", "a", "--max-new-tokens", 900, "--no-chat")
    ran = run("generate", *args, "--executor", "reference")
    assert_refused(ran, "weights + ", " KV cache", "would take", "are free; take a smaller model")


def test_pages_of_the_file_do_not_count_as_what_must_fit(files, monkeypatch):
    config = read_config(files["Q8_0"])
    need = memory_need(
        config, plan_for(KVSpec("tq4"), config), 100, model_weight_bytes(files["Q8_0"], config, "float32", keep_blocks=True)
    )
    assert need.private == need.kv + need.work
    assert need.total == need.private + need.weights.mapped
    monkeypatch.setattr("haarkv.tq_ops.memory.available_memory", lambda: need.private)
    need.require("m")
    assert "stay in the file's pages" in need.describe()


def test_what_a_run_had_is_said(folder, run):
    args = ("generate", "--model", folder, "--dtype", "bfloat16", "--prompt", "ab", "--max-new-tokens", 2, "--no-chat")
    report = run(*args, "--json").json["memory"]
    assert report["peak_bytes"] > 2**26
    assert 0 < report["mapped_bytes"] < report["peak_bytes"]
    run(*args).notes("GiB at most")


VECTOR = {"tq4": 130, "bf16": 512}  # bytes of 256 numbers: codes and a scale of two bytes, or BF16
RING = 1152
"""512 tokens that a local layer sees and 512 that come at once, wherever they begin in a block of 128."""


@pytest.mark.parametrize("kv", VECTOR)
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_what_a_gemma_3_allocates_is_what_was_announced_and_local_layers_are_bounded(kv, tokens):
    config = SIZES["gemma-270m"]
    plan = plan_for(KVSpec(kv), config)
    cache, _ = new_cache(config, plan, sequences=1, tokens=tokens)
    assert cache.nbytes == memory_need(config, plan, tokens, WeightBytes()).kv
    assert cache.nbytes == (3 * tokens + 15 * RING) * 2 * VECTOR[kv]


# -- Weights that are copied out of their file's pages ------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


@pytest.fixture(scope="module", params=["Q8_0", "bfloat16", "untied"])
def model(request, tmp_path_factory):
    """A file or folder, and the dtype that it needs no conversion for."""
    folder = tmp_path_factory.mktemp("m")
    path = write_file(folder, "Q8_0", vocab_size=9000, tie_word_embeddings=request.param != "untied")
    return (folder / "m", "bfloat16") if request.param == "bfloat16" else (path, "float32")


def raw_bytes(weight):
    return weight.data if isinstance(weight, Blocks) else weight


def test_copies_are_the_same_numbers_and_counted(model):
    path, dtype = model
    file_bytes = load_model(path, dtype, keep_blocks=True)
    in_memory = load_model(path, dtype, keep_blocks=True, mmap=False)
    for (name, one), (_, other) in zip(file_bytes.weights.named_tensors(), in_memory.weights.named_tensors(), strict=True):
        assert type(one) is type(other), name
        assert torch.equal(raw_bytes(one), raw_bytes(other)), name
    config = read_config(path)
    counts = model_weight_bytes(path, config, dtype, keep_blocks=True).copied()
    sizes = {raw_bytes(weight).data_ptr(): raw_bytes(weight).nbytes for _, weight in in_memory.weights.named_tensors()}
    assert sum(sizes.values()) == counts.total
    # Of an embedding that is no head a forward reads rows alone, from the file: two models share its pages.
    again = load_model(path, dtype, keep_blocks=True, mmap=False).weights.named_tensors()
    pairs = zip(in_memory.weights.named_tensors(), again, strict=True)
    shared = {name for (name, one), (_, other) in pairs if raw_bytes(one).data_ptr() == raw_bytes(other).data_ptr()}
    assert shared == (set() if config.tied else {"model.embed_tokens.weight"})
    assert counts.mapped == (0 if config.tied else raw_bytes(in_memory.weights.embedding).nbytes)


@needs_proc
def test_pages_that_were_copied_leave_the_process(model):
    path, dtype = model
    in_memory = load_model(path, dtype, keep_blocks=True, mmap=False)
    # What is left is the header, and pages that two tensors share.
    left, whole = mapped_memory([path]), model_weight_bytes(path, read_config(path), dtype, keep_blocks=True)
    assert left < whole.gathered + 0.5 * (whole.mapped - whole.gathered)
    assert raw_bytes(in_memory.weights.layers[0]["down_proj"]).count_nonzero() > 0


def test_weights_are_copied_where_twice_as_much_is_free(monkeypatch):
    weights = WeightBytes(private=10, mapped=100, gathered=30)
    assert weights.copied() == WeightBytes(private=80, mapped=30, gathered=30)
    for free, processes, file_bytes in ((160, 1, False), (159, 1, True), (319, 2, True), (320, 2, False)):
        monkeypatch.setattr("haarkv.models.catalog.available_memory", lambda free=free: free)
        assert maps_file(weights, None, processes) == file_bytes
        assert maps_file(weights, None, processes, in_place=False)
        assert maps_file(weights, True)
        assert not maps_file(weights, False)


@pytest.mark.parametrize(("kind", "is_restored"), [("TQ2_0", True), ("Q8_0", False)])
def test_weights_that_an_executor_restores_are_announced(tmp_path, kind, is_restored):
    path, lines = write_file(tmp_path, kind, hidden_size=256, intermediate_size=256), []
    tq.load(path, executor="cpu", balance=False, on_warning=lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        f"cpu restores quantised weights as they load ({kind})"
    ] * is_restored


@pytest.mark.parametrize("mmap", [True, False, None])
def test_a_session_maps_or_copies_as_asked(files, mmap):
    counts = tq.load(files["Q8_0"], kv="tq4", executor="cpu", mmap=mmap).load_record.weights
    assert (counts.mapped > counts.gathered) == (mmap is True)


# -- What there is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_leaves_what_its_limit_says(tmp_path, monkeypatch, version):
    """Of the groups above a process the tightest counts; pages of files can be dropped, and are not in use."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), 2: ("memory.max", "memory.current", "")}[version]
    root = tmp_path / ("memory" if version == 1 else "")
    for path, limit in ((root / "a", 2**30), (root / "a" / "b", 2**31)):
        path.mkdir(parents=True)
        (path / names[0]).write_text(f"{limit}\n")
        (path / names[1]).write_text(f"{2**29}\n")
        (path / "memory.stat").write_text(f"cache 5\n{names[2]}inactive_file {2**28}\n{names[2]}active_file 4096\n")
    cgroup_file = tmp_path / "cgroup"
    cgroup_file.write_text("4:memory:/a/b\n" if version == 1 else "1:name=systemd:/\n0::/a/b\n")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", cgroup_file)
    monkeypatch.setattr(memory, "_kibibytes", lambda _: {})
    assert memory.memory_limit() == 2**30
    assert memory.available_memory() == 2**30 - (2**29 - 2**28 - 4096)


def test_pages_of_a_file_are_counted(tmp_path):
    import mmap

    path = tmp_path / "f"
    path.write_bytes(bytes(2**20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[at] for at in range(0, 2**19, 4096)) == 0
        assert 2**19 <= memory.mapped_memory([path]) <= 2**20
        assert memory.mapped_memory([path, tmp_path / "g"]) == memory.mapped_memory([path])
        assert memory.mapped_memory([tmp_path / "other"]) == 0
    assert memory.mapped_memory([path]) == 0
