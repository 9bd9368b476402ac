"""`tq export`: the folder is whole, runs without this project, and what cannot be written leaves nothing behind."""

import hashlib
import json
import re
import resource
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import byte_vocabulary, convert
from places import ROOT
from refusals import assert_refused

from haarkv.codebooks import haar_rotation
from haarkv.engine.loading import load
from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.onnx import export as onnx_export
from haarkv.models.qwen3_14b.onnx.export import ABOUT, WEIGHTS, Export, write_export
from haarkv.models.weights import checkpoint_tensors
from haarkv.tq_ops.onnx.graph import TensorType
from tq import __version__
from tq.cli import main

pytest.importorskip("onnxruntime", reason="needs the onnx extra")

import onnx
import onnxruntime as ort
from onnx import helper

SCRIPT = ROOT / "examples" / "run_onnx.py"
PROMPT = "def main(argv):\n    return"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "tiny"
    assert main(["export", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Three layers with a head_dim that the graphs can hold, its head not tied."""
    config = {"head_dim": 64, "num_hidden_layers": 3}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "small", config=config)


def refusal_message(capsys, *args):
    capsys.readouterr()
    ran = main(["export", *map(str, args)]), *capsys.readouterr()
    assert_refused(ran)
    return ran[2]


# -- It runs without us --------------------------------------------------------------------------------------------------
def test_a_short_script_without_this_project_writes_the_references_text(tiny):
    done = subprocess.run([sys.executable, SCRIPT, tiny, PROMPT, "32"], capture_output=True, text=True, check=False, cwd=tiny)
    assert done.returncode == 0, done.stderr
    result = load("tiny").generate([PROMPT], max_new_tokens=32, chat=False)
    assert json.loads(done.stdout) == {"token_ids": result.completions[0].token_ids, "text": result.texts[0]}
    assert len(result.completions[0].token_ids) == 32
    modules = re.findall(r"^ *(?:import|from) (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(modules) == {"json", "sys", "pathlib", "numpy", "onnxruntime", "tokenizers"}


# -- What is in the folder -----------------------------------------------------------------------------------------------
def test_the_folder_says_what_it_is(tiny):
    about = json.loads((tiny / ABOUT).read_text())
    digest = hashlib.sha256(b"".join(haar_rotation(i, 128).view(torch.int16).numpy().tobytes() for i in range(6)))
    expected = {
        "haarkv.version": __version__, "haarkv.layers": "0:6 of 6", "haarkv.dtype": "float32", "haarkv.kv_format": "tq4",
        "haarkv.bytes_per_vector": "66", "haarkv.rotation_sha256": digest.hexdigest(), "haarkv.model": "tiny",
    }  # fmt: skip
    assert {key: about[key] for key in expected} == expected
    assert about["opset"] == 23
    for phase in ("prefill", "decode"):
        model = onnx.load(tiny / f"{phase}.onnx", load_external_data=False)
        assert {p.key: p.value for p in model.metadata_props} == expected
        assert next(i.version for i in model.opset_import if not i.domain) == 23
    assert (tiny / "config.json").is_file()
    assert (tiny / "tokenizer.json").is_file()


def prefill_outputs(folder, **feed):
    """Outputs by name of two prompts of five tokens, over caches that hold nothing."""
    session = ort.InferenceSession(folder / "prefill.onnx", providers=["CPUExecutionProvider"])
    feed |= {"past_lens": np.zeros(2, np.int32), "block_table": np.zeros((2, 1), np.int32)}
    for value in session.get_inputs():
        if value.name.startswith("layers."):
            codes = value.name.endswith("codes")
            feed[value.name] = np.zeros((1, 2, 8, 32)[: 4 if codes else 3], np.uint8 if codes else np.float16)
    input_names = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {n: v for n, v in feed.items() if n in input_names}), strict=True))


def test_slices_one_after_the_other_are_the_whole(checkpoint, tmp_path):
    def outputs(layers, **feed):
        folder = tmp_path / layers.replace(":", "_")
        assert main(["export", "--model", str(checkpoint), "--layers", layers, "--out", str(folder)]) == 0
        return prefill_outputs(folder, **feed)

    ids, last = np.arange(10).reshape(2, 5), np.array([4, 9], np.int32)
    whole = outputs("0:3", input_ids=ids, last_rows=last)
    first = outputs("0:1", input_ids=ids)
    second = outputs("1:3", hidden=first["hidden_out"], last_rows=last)
    np.testing.assert_allclose(second["logits"], whole["logits"], rtol=0, atol=1e-5)
    assert set(whole) == set(second) | {name for name in first if name != "hidden_out"}


def test_one_weight_at_a_time_is_in_memory(checkpoint, tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), 0
    stream = onnx_export.stream_tensors

    def watch_stream(*args):
        nonlocal most
        for name, tensor in stream(*args):
            alive.add(tensor)
            most = max(most, len(alive))
            yield name, tensor

    monkeypatch.setattr(onnx_export, "stream_tensors", watch_stream)
    config = read_config(str(checkpoint))
    write_export(tmp_path, Export(str(checkpoint), config, range(3), "bfloat16", 23, "0"))
    assert most <= 2


# -- Weights in blocks of a file -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Blocks of 256 do not fit, and gguf writes none of them; the head is not tied."""
    folder = tmp_path_factory.mktemp("files")
    small = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 160, "vocab_size": 263}
    return convert(write_checkpoint(folder / "m", config=small), folder / "m.gguf", "Q4_1", vocabulary=byte_vocabulary())


def test_blocks_of_a_file_stay_four_bits_in_the_folder_and_give_the_restored_logits(file, tmp_path, capsys):
    folders = [tmp_path / "blocks", tmp_path / "restored"]
    for folder, options in zip(folders, ((), ("--restore",)), strict=True):
        assert main(["export", "--model", str(file), "--out", str(folder), *options]) == 0
    assert "restored to float32: Q4_1" in capsys.readouterr().out
    two = {"input_ids": np.arange(10).reshape(2, 5), "last_rows": np.array([4, 9], np.int32)}
    blocks, restored_logits = (prefill_outputs(folder, **two)["logits"] for folder in folders)
    np.testing.assert_allclose(blocks, restored_logits, rtol=0, atol=1e-4 * np.abs(restored_logits).max())
    graph = onnx.load(folders[0] / "decode.onnx", load_external_data=False)
    nodes = [node for part in (graph.graph, *graph.functions) for node in part.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 7 + 1
    assert all({a.name: a.i for a in node.attribute}["accuracy_level"] == 1 for node in nodes)  # x stays FP32
    assert json.loads((folders[0] / ABOUT).read_text())["haarkv.blocks"] == "Q4_1"
    # 4 bits, and FP32 scale and minimum of each 32 numbers; norms, rotary tables and rotations are the rest.
    sizes = [sum(t.nbytes for t in outside(folder)) for folder in folders]
    numbers = sum(np.prod(one.shape) for one in checkpoint_tensors(read_config(file)).values() if len(one.shape) == 2)
    assert sizes[1] - sizes[0] == numbers * 4 - numbers * 24 // 32


def outside(folder):
    """Types of the tensors in the file of weights."""
    graph = onnx.load(folder / "decode.onnx", load_external_data=False).graph
    return [TensorType(t.data_type, tuple(t.dims)) for t in graph.initializer if t.external_data]


# -- What cannot be written ----------------------------------------------------------------------------------------------
def test_a_folder_that_exists_is_replaced_only_if_it_is_an_export_and_wanted(capsys, checkpoint, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("x")
    arguments = ("--model", checkpoint, "--out", out)
    assert main(["export", *map(str, arguments)]) == 0
    before = (out / WEIGHTS).stat().st_ino
    assert f"{out} exists" in refusal_message(capsys, *arguments)
    assert "holds no export.json" in refusal_message(capsys, "--model", checkpoint, "--out", other, "--force")
    assert (other / "mine").read_text() == "x"
    assert (out / WEIGHTS).stat().st_ino == before
    assert main(["export", *map(str, arguments), "--force"]) == 0
    assert (out / WEIGHTS).stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


@pytest.fixture
def small_disk():
    """Files may not become larger than 8 MiB here: the system refuses a write in the middle of the weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_nothing_half_written(capsys, tmp_path, small_disk, force):
    out = tmp_path / "out"
    if force:
        out.mkdir()
        (out / ABOUT).write_text('{"files": []}')
    message = refusal_message(capsys, "--out", out, *["--force"] * force)
    assert message == f"tq: {out} cannot be written: File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * force
    assert not force or (out / ABOUT).read_text() == '{"files": []}'


def test_a_weight_beyond_fp16_is_refused_by_name(capsys, checkpoint, tmp_path):
    def large(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6

    model = write_checkpoint(tmp_path / "model", config={"head_dim": 64}, mutate=large)
    message = refusal_message(capsys, "--model", model, "--dtype", "float16", "--out", tmp_path / "out")
    assert "model.layers.1.mlp.up_proj.weight is not finite in float16" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# -- The page ------------------------------------------------------------------------------------------------------------
def test_the_tables_of_the_page_are_the_graphs_inputs_and_outputs(tiny):
    rows = [line.split("|")[1:3] for line in (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8").splitlines()]
    page_types = {row[0].strip(" `"): row[1].strip() for row in rows if len(row) == 2 and row[0].strip().startswith("`")}
    graph_inputs = []
    for phase in ("prefill", "decode"):
        graph = onnx.load(tiny / f"{phase}.onnx", load_external_data=False).graph
        graph_inputs.append({value.name for value in graph.input})
        for value in (*graph.input, *graph.output):
            name = value.name.replace("layers.5.", "layers.I.")
            if not name.startswith("layers.") or "I" in name:
                assert page_types[name] == helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name, name
    assert graph_inputs[0] - graph_inputs[1] == {"last_rows"}
