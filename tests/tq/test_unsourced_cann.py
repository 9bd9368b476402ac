"""torch-npu is installed and CANN is not sourced: `import torch` raises, and whatever needs no NPU works all the same."""

import json

import fake_npu
import pytest
from refusals import assert_refused

COMMANDS = """
import contextlib, io, json
from tq.cli import main

def run(*args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(args))
    return code, out.getvalue(), err.getvalue()

generate = ("generate", "--kv", "tq4", "--prompt", "x", "--max-new-tokens", "2", "--json")
on_npu = ("--executor", "npu")
ran = [run("info"), run(*generate), run(*generate, "--executor", "cpu"), run(*generate, *on_npu)]
print(json.dumps([*ran, run(*generate, *on_npu, "--device", "npu:0")]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs Python on such a machine, where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("unsourced")
    fake_npu.install(folder / "site", fake_npu.UNSOURCED)

    def run(*arguments):
        return fake_npu.run(folder / "site", folder, *arguments)

    refusal = run("-c", "import torch")
    assert refusal.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in refusal.stderr
    return run


def test_what_needs_no_npu_works_and_the_npu_is_refused_in_one_line(python):
    """In one process: what the first command has loaded, the others do not load again."""
    done = python("-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    info, auto, cpu, *runs = json.loads(done.stdout)
    assert info[0] == 0, info
    for ran in (auto, cpu):
        assert ran[0] == 0, ran
        assert json.loads(ran[1])["executor"] == "cpu"
    for ran in runs:
        assert_refused(ran, "torch-npu cannot be loaded (libhccl.so: cannot open shared object file", "source its set_env.sh")


@pytest.mark.parametrize("program", ["from haarkv.engine.loading import load; load('tiny')", "import haarkv, torch"])
def test_programs_that_import_us_first_work(python, program):
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_a_program_whose_npu_works_keeps_it(tmp_path):
    fake_npu.install(tmp_path / "site", fake_npu.PRESENT)
    message = "torch-npu was loaded by torch\n"
    env = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann"}
    for program, prefix in (
        ("import torch", message),
        ("import haarkv, torch", message),
        ("import tq.cli; tq.cli.main(['info'])", ""),
    ):
        done = fake_npu.run(tmp_path / "site", tmp_path, "-c", program, **env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(prefix)
        assert (message in done.stdout) == bool(prefix)
