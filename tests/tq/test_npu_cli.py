"""`tq generate --executor npu` and `tq dev compile`: what they print, and one line for whatever cannot be."""

import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from calibration_files import write_calibration
from npu_layers import KV, learned_spec
from npu_programs import with_pypto

from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu.compile import plan_programs
from haarkv.tq_ops.errors import InputError
from tq.commands import bringup

GENERATE = ("generate", "--prompt", "x", "--max-new-tokens", "2")


@pytest.mark.npu_long
@with_pypto
def test_generate_says_where_it_ran(run):
    ran = run(*GENERATE, "--executor", "npu", "--device", "sim")
    assert ran.notes("no NPU")
    assert ran.out.strip()


@with_pypto
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "x", "--executor", "npu"),
        ("eval", "--text", "t.txt", "--executor", "npu"), ("diff", "--a", "npu", "--b", "npu:bf16"),
        ("calibrate", "--out", "c.safetensors", "--executor", "npu"), ("bench", "decode", "--executor", "npu"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_an_interpreter_that_nobody_asked_for_is_announced(run, command, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise InputError("computed")

    (tmp_path / "t.txt").write_text("some text")
    model = ("--model", "tiny" if command[0] == "generate" else "nowhere")  # the others say it before they read a model
    monkeypatch.setattr("haarkv.engine.session.generate", stop)
    for device, is_announced in (((), True), (("--device", "sim"), False)):
        ran = run(*command, *model, *device)
        assert ran.code == 2
        assert ("executor npu runs in an interpreter here, minutes for a few tokens" in ran.err) == is_announced


@with_pypto
def test_compile_writes_the_sources_and_lists_them(run, tmp_path):
    target = tmp_path / "cpp"
    (row,) = run("dev", "compile", "--program", "head", "--cpp", target, "--json").json["programs"]
    assert row["program"] == "head"
    assert row["seconds"] > 0
    functions = sorted((target / "head" / "kernel_aicore").iterdir())
    assert len(functions) == row["functions"] > 0
    assert "__TILE_FWK_AICORE__" in functions[0].read_text()
    assert sum(path.read_text().count("\n") for path in functions) == row["lines"] > 100
    assert [path.name for path in target.iterdir()] == ["head"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpp"]
    # What is written compiles as it is: here the control flow, which needs no toolkit.
    headers = Path(find_spec("pypto").origin).parent / "lib/include"
    files = [str(path) for path in (target / "head" / "kernel_aicpu").glob("*.cpp")]
    command = ["g++", "-std=gnu++17", "-fsyntax-only", f"-I{headers}", *files]
    assert (bool(files), subprocess.run(command, capture_output=True, text=True).stderr) == (True, "")


def test_layers_that_store_alike_share_a_program():
    config = load_model("tiny", "bfloat16").config
    spec = replace(learned_spec(config), layers={1: "tq4", 3: "tq4"})
    assert plan_programs(config, ("decode", "head"), spec.plan(6)) == [
        ("decode-layer0", "decode", (0, 2, 4, 5)), ("decode-layer1", "decode", (1, 3)), ("head", "head", ()),
    ]  # fmt: skip
    assert plan_programs(config, ("prefill",), learned_spec(config).plan(6)) == [("prefill", "prefill", (0, 1, 2, 3, 4, 5))]


@with_pypto
@pytest.mark.npu_long
def test_compile_writes_a_program_for_each_pair_of_formats_of_a_plan(run, tmp_path):
    file = write_calibration(tmp_path / "made.safetensors")
    args = ("--kv", KV, "--calibration", str(file), "--kv-skip-layers", "5")
    rows = run("dev", "compile", "--program", "decode", *args, "--cpp", "cpp", "--json").json["programs"]
    assert [(row["program"], row["layers"]) for row in rows] == [("decode-layer0", [0, 1, 2, 3, 4]), ("decode-layer5", [5])]
    assert sorted(path.name for path in (tmp_path / "cpp").iterdir()) == ["decode-layer0", "decode-layer5"]


@pytest.mark.chooses
@pytest.mark.parametrize("kv_args", [{}, {"kv_tail": 64}])
def test_compile_takes_a_cache_that_the_programs_read_and_chooses_none(monkeypatch, tmp_path, kv_args):
    """Of a model whose cache `tq generate --executor npu` would choose: no weights are read to compile."""
    monkeypatch.setenv("HOME", str(tmp_path))
    nothing = dict.fromkeys(("kv", "calibration", "kv_plan", "kv_loss", "kv_tail", "kv_sink")) | {"kv_skip_layers": ()}
    with click.Context(bringup.compile_command):
        spec = bringup._cache_to_compile("tiny", nothing | kv_args)
    assert (spec.kv, spec.tail, spec.sink) == ("tq4", *((64, 0) if kv_args else (124, 4)))
