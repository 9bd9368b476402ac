"""What most tests of the command stand on: a small checkpoint, and the command in this process."""

import json
from typing import NamedTuple

import pytest
from checkpoints import write_checkpoint

from tq.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A whole checkpoint that no test changes."""
    return write_checkpoint(tmp_path_factory.mktemp("whole") / "checkpoint")


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def command(*args):
        return Ran(main([str(arg) for arg in args]), *capsys.readouterr())

    return command
