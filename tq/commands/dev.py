"""`tq dev`: the workshop, for whoever brings up an executor or works on haarkv itself."""

from __future__ import annotations

from typing import ClassVar

import click

from tq.groups import Group


class _Workshop(Group):
    sections: ClassVar = {
        "A new machine": {"bringup": "tq.commands.bringup", "compile": "tq.commands.compile"},
        "The validator": {
            "replay": "tq.commands.replay",
            "self-test": "tq.commands.self_test:self_test",
            "sensitivity": "tq.commands.self_test:sensitivity",
        },
    }


@click.command("dev", cls=_Workshop)
def command() -> None:
    """Bring up an executor, compile its programs, and test the validator."""
