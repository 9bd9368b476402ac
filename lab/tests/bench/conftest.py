"""A small checkpoint, and a machine that is measured by a glance."""

import pytest
from checkpoints import write_checkpoint
from glances import glance

from lab.bench.__main__ import main

__all__ = ["glance"]


@pytest.fixture
def run(capsys, tmp_path, glance):
    """Runs a benchmark of it: exit code, stdout, stderr. Unless told otherwise the reference does, once, at 40 tokens."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")

    def run(name, *args):
        quick = ["--repeats", "1", "--contexts", "40", *["--executor", "reference"] * ("--executor" not in args)]
        code = main([name, "--model", str(checkpoint), *quick, *args])
        return code, *capsys.readouterr()

    return run
