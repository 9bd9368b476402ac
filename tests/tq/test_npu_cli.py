"""`tq generate --executor npu` and `tq compile`: what they print, and one line for whatever cannot be."""

import json

import pytest
from npu_programs import needs_pypto

from tq.cli import main


def run(capfd, *args):
    code = main(list(args))
    out, err = capfd.readouterr()
    return code, out, err


def refused(capfd, *args):
    code, out, err = run(capfd, *args)
    assert (code, out) == (2, "")
    assert err.startswith("tq: ")
    assert err.count("\n") == 1
    return err


GENERATE = ("generate", "--prompt", "x", "--max-new-tokens", "2")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--executor", "npu", "--device", "cuda:0"), "sim or npu:N, not on 'cuda:0'"),
        (("--executor", "npu", "--device", "npu:0"), "torch-npu is not installed"),
        (("--executor", "npu", "--device", "sim", "--dtype", "float32"), "bfloat16 only"),
        (("--device", "npu:0"), "torch-npu is not installed"),
        (("--device", "moon"), "no executor runs on 'moon'; --device takes cpu, cuda"),
        (("--executor", "reference", "--device", "npu:0"), "reference runs on the cpu, not on 'npu:0'"),
        (("--executor", "tpu"), "unknown executor 'tpu'; choose from auto, reference, cpu, cuda, npu"),
    ],
)
def test_generate_refuses_in_one_line(capfd, args, said):
    assert said in refused(capfd, *GENERATE, *args)


@needs_pypto[0]
@needs_pypto[1]
def test_generate_refuses_a_format_that_no_program_reads(capfd):
    said = "its programs read tq4, tq4_seed and bf16, not q8_0"
    assert said in refused(capfd, *GENERATE, "--executor", "npu", "--kv", "k=tq4,v=q8_0")


def test_compile_refuses_before_it_compiles(capfd, tmp_path):
    assert f"{tmp_path} exists" in refused(capfd, "compile", "--cpp", str(tmp_path))
    assert "its parent is not a folder" in refused(capfd, "compile", "--cpp", str(tmp_path / "a" / "b"))
    assert "no such size: random:3b" in refused(capfd, "compile", "--model", "random:3b")
    assert "'tail' is not one of" in refused(capfd, "compile", "--program", "tail")
    said = "nothing to compile: its programs read tq4, tq4_seed and bf16, not q8_0"
    assert said in refused(capfd, "compile", "--kv", "q8_0")


@needs_pypto[0]
@needs_pypto[1]
def test_generate_says_where_it_ran(capfd):
    code, out, err = run(capfd, *GENERATE, "--executor", "npu", "--device", "sim")
    assert code == 0
    assert out.strip()
    assert "no NPU" in err


@needs_pypto[0]
@needs_pypto[1]
def test_compile_writes_the_sources_and_lists_them(capfd, tmp_path):
    target = tmp_path / "cpp"
    code, out, _ = run(capfd, "compile", "--program", "head", "--cpp", str(target), "--json")
    assert code == 0
    (row,) = json.loads(out)["programs"]
    assert row["program"] == "head"
    assert row["seconds"] > 0
    written = sorted(path.name for path in (target / "head").iterdir())
    assert written == row["files"] != []
    assert "__TILE_FWK_AICORE__" in (target / "head" / written[0]).read_text()
    assert sum(path.read_text().count("\n") for path in (target / "head").iterdir()) == row["lines"] > 100
    assert [path.name for path in tmp_path.iterdir()] == ["cpp"]
