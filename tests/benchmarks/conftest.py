"""A small checkpoint, and a machine that is measured by a glance."""

import pytest
from checkpoints import write_checkpoint

from haarkv.benchmarks import attention, timing, whole
from tq.cli import main


@pytest.fixture
def glance(monkeypatch):
    for module, name, value in (
        (timing, "_COPY_BYTES", 2**16), (timing, "_FLUSH_BYTES", 2**16), (timing, "_MATRIX", 16), (timing, "_REST_S", 0.0),
        (attention, "_COLD_BYTES", 2**16), (whole, "_REST_S", 0.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def run(capsys, tmp_path, glance):
    """Runs a benchmark of it: exit code, stdout, stderr. Unless told otherwise the reference does, once, at 40 tokens."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")

    def run(name, *args):
        quick = ["--repeats", "1", "--contexts", "40", *["--executor", "reference"] * ("--executor" not in args)]
        code = main(["bench", name, "--model", str(checkpoint), *quick, *args])
        return code, *capsys.readouterr()

    return run
