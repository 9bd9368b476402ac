"""The runner of a device, on a machine that only claims to have one: what it says, and where files go."""

import os
from pathlib import Path

import fake_npu
import pytest
from npu_programs import with_pypto

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu import folders
from haarkv.tq_ops.npu.folders import DeviceError, in_one_line

RUNNER = """
import os
import time
from dataclasses import dataclass
from pathlib import Path
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.device import open_runner

@dataclass(frozen=True)
class Program:
    name: str
    def build(self, **options):
        assert options == {"runtime_options": {"run_mode": 0}}
        calls = []
        def kernel(*tensors):
            Path(os.environ["TILE_FWK_OUTPUT_DIR"], "kernel.o").touch()
            time.sleep(0 if calls else 0.3)
            calls.append(tensors)
            if self.name == "refused" or (self.name == "breaks" and len(calls) == 2):
                raise RuntimeError("\\n".join(["", "errCode: FB1002", *(f"frame {i}" for i in range(80))]))
        return kernel

import haarkv.tq_ops.npu.device as device
device.find_spec = lambda name: object()  # torch-npu and PyPTO
runner = open_runner("npu:0")
said = []
runner.on_program = said.append
"""


@pytest.fixture
def device(tmp_path):
    """Runs a program that has an opened runner, in an empty folder."""
    fake_npu.install(tmp_path / "site", fake_npu.PRESENT)
    (tmp_path / "here").mkdir()

    def run(program):
        done = fake_npu.run(tmp_path / "site", tmp_path, "-c", RUNNER + program, cwd=tmp_path / "here")
        assert done.returncode == 0, done.stderr
        assert list((tmp_path / "here").iterdir()) == []
        return done.stdout

    return run


def test_a_program_is_announced_and_compiled_once_and_its_output_goes_to_the_cache_folder(device, tmp_path):
    """The first call compiles, and takes as long as is kept; the others add nothing."""
    code = """
runner.call(Program("good"), [])
first = dict(runner.compiled)
for _ in range(2): runner.call(Program("good"), [])
print(said, 0.3 <= first["good"] < 30, runner.compiled == first)
"""
    assert device(code) == "['good'] True True\n"
    (folder,) = (tmp_path / ".cache/haarkv/pypto_output").iterdir()
    assert [path.name for path in folder.iterdir()] == ["kernel.o"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("runner.call(Program('refused'), [])", "compiling refused for npu:0: errCode: FB1002"),
        ("for _ in range(2): runner.call(Program('breaks'), [])", "running breaks on npu:0: errCode: FB1002"),
        (
            "with runner.refusals(): raise RuntimeError('EZ9999: the stream broke\\nframe 79')",
            "running on npu:0: EZ9999: the stream broke",
        ),
    ],
)
def test_many_lines_become_one_and_a_file(device, tmp_path, call, message):
    stderr = device(f"try:\n    {call}\nexcept InputError as error:\n    print(error)\n")
    assert stderr.count("\n") == 1
    assert message in stderr
    (log,) = (tmp_path / ".cache/haarkv/logs").iterdir()
    assert str(log) in stderr
    text = log.read_text(encoding="utf-8")
    assert "frame 79" in text
    assert "Traceback" in text
    assert "torch_npu=" in text, "versions"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TILE_FWK_OUTPUT_DIR", raising=False)
    return tmp_path


def test_old_folders_go_and_those_in_use_stay(home, monkeypatch):
    monkeypatch.setattr(folders, "_unique", iter([f"20200101-000000-{i}-99999999" for i in range(8)]).__next__)
    paths = [folders.send_pypto_output_away() for _ in range(8)]
    monkeypatch.undo()
    assert [path.exists() for path in paths] == [False] * 3 + [True] * 5
    mine = home / ".cache/haarkv/pypto_output" / f"19990101-000000-0-{os.getpid()}"
    mine.mkdir()
    monkeypatch.setenv("HOME", str(home))
    folders.send_pypto_output_away()
    assert mine.exists()
    assert not paths[3].exists()


def test_our_own_errors_pass_and_a_full_home_hides_no_line(home, monkeypatch):
    with pytest.raises(InputError, match=r"^ours$"), in_one_line("x", "x"):
        raise InputError("ours")
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(DeviceError, match=r"^launching: refused$"), in_one_line("launching", "x"):
        raise RuntimeError("refused\nand more")


@with_pypto
def test_pypto_itself_writes_where_it_is_told(tmp_path):
    """Its variable, read by its C++ at a compilation: the same with which the runner of a device sends it away."""
    code = """
from haarkv.tq_ops.npu.folders import send_pypto_output_away
print(send_pypto_output_away())
import pypto
from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.npu.compile import smallest_call
program, arguments = smallest_call("head", read_config("tiny"))
options = {"runtime_options": {"run_mode": 1}, "host_options": {"compile_stage": pypto.CompStage.TENSOR_GRAPH}}
program.build(**options)(*arguments)
"""
    (tmp_path / "here").mkdir()
    done = fake_npu.run(tmp_path, tmp_path, "-c", code, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "here").iterdir()) == []
    folder = Path(done.stdout.splitlines()[0])
    assert folder.is_relative_to(tmp_path)
    assert any(path.name.startswith("output_") for path in folder.iterdir())
