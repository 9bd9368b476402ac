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
        return json.loads(self.ended())

    def ended(self, code=0):
        """Its output, once it ended with this code; what it said on stderr shows otherwise."""
        assert self.code == code, self.err
        return self.out

    def shows(self, *words, code=0):
        """Its output, which says all this; nothing is on stderr."""
        assert (self.code, self.err) == (code, "")
        assert [word for word in words if word not in self.out] == [], self.out
        return self.out

    def notes(self, *words):
        """Its lines on stderr, which say all this beside an output."""
        assert self.code == 0, self.err
        assert [word for word in words if word not in self.err] == [], self.err
        return self.err


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
