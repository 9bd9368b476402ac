"""torch-npu is installed and CANN is not sourced: `import torch` raises, and whatever needs no NPU works all the same."""

import json

import fake_npu
import pytest

GENERATE = ("-m", "tq", "generate", "--prompt", "x", "--max-new-tokens", "2", "--json")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs Python on such a machine."""
    folder = tmp_path_factory.mktemp("unsourced")
    fake_npu.install(folder / "site", fake_npu.UNSOURCED)

    def run(*arguments, **variables):
        return fake_npu.run(folder / "site", folder, *arguments, **variables)

    return run


def one_line(done):
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tq: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_such_a_machine_refuses_to_import_torch(python):
    """Or the tests below prove nothing."""
    done = python("-c", "import torch")
    assert done.returncode == 1
    assert "Failed to load the backend extension: torch_npu" in done.stderr


def test_generate_works_on_the_cpu(python):
    done = python(*GENERATE, "--executor", "cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["executor"] == "cpu"


def test_auto_takes_what_is_left(python):
    done = python(*GENERATE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["executor"] == "cpu"


@pytest.mark.parametrize("device", [(), ("--device", "npu:0")], ids=["any", "npu:0"])
def test_generate_on_the_npu_says_one_line(python, device):
    said = one_line(python(*GENERATE, "--executor", "npu", *device))
    assert "torch-npu cannot be loaded (libhccl.so: cannot open shared object file" in said
    assert "source its set_env.sh" in said


def test_other_commands_work(python):
    done = python("-m", "tq", "info")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["from haarkv.engine.loading import load; load('tiny')", "import haarkv, torch"])
def test_programs_that_import_us_first_work(python, program):
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_a_program_whose_npu_works_keeps_it(tmp_path):
    fake_npu.install(tmp_path / "site", fake_npu.PRESENT)
    told = "torch-npu was loaded by torch\n"
    sourced = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann"}
    for program, loaded in (
        ("import torch", told),
        ("import haarkv, torch", told),
        ("import tq.cli; tq.cli.main(['info'])", ""),
    ):
        done = fake_npu.run(tmp_path / "site", tmp_path, "-c", program, **sourced)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(loaded)
        assert (told in done.stdout) == bool(loaded)
