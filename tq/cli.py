"""The command `tq`: runs the subcommand, and turns every error that a user can cause into one line and exit code 2."""

from __future__ import annotations

import io
import resource
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from typing import Any

import click

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.versions import leave_npu_alone
from tq import __version__
from tq.failures import InterruptedCommandError, SystemRefusedError, ended
from tq.output import unsaid_is_fine
from tq.ranks import Started

_COMMANDS = (
    "generate", "chat", "cache", "validate", "replay", "diff", "eval", "calibrate", "plan", "bringup", "compile", "export",
    "bench", "serve", "formats", "info",
)  # fmt: skip

_LEAST_ADDRESSES = 2**30
"""Bytes; with half of it, torch is not loaded."""


class _Commands(click.Group):
    """The subcommands. Each is a module of `tq.commands`, imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"tq.commands.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand, and hide from click the errors that it would report in its own way."""
        _require_address_space()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptedCommandError from None
        except OSError as error:
            raise SystemRefusedError(error) from None


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="haarkv")
@click.option("--debug", is_flag=True, expose_value=False, help="Show where in the program an error arose.")
def cli() -> None:
    """Run decoder models such as Qwen3 with a rotated low-bit KV cache.

    Start with `tq generate --prompt 'def main('`. Every command explains itself with --help.
    """


def _require_address_space() -> None:
    """Refuse a limit under which libraries that torch loads end the process without a word of ours.

    Raises:
        InputError: `ulimit -v` leaves too little.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if resource.RLIM_INFINITY != allowed < _LEAST_ADDRESSES:
        least = f"{_LEAST_ADDRESSES / 2**30:g} GiB"
        raise InputError(f"this process may take {allowed / 2**30:.2f} GiB of memory, and needs {least}; raise ulimit -v")


def _prepare_streams() -> None:
    """Let printing never fail because of the stream: a closed one drops the text, a narrow encoding shows `?`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit codes as of `run`."""
    return run(Started(list(sys.argv[1:] if argv is None else argv)))


def run(started: Started) -> int:
    """Run the command, as a user started it or as one rank of it.

    Returns:
        0; 1 if a comparison found a fault; 2 for an error that the user can correct (one line on stderr); 130 if interrupted.
    """
    leave_npu_alone()
    _prepare_streams()
    with unsaid_is_fine():
        try:
            result = cli.main(args=list(started.argv), prog_name="tq", standalone_mode=False, obj=started)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except BaseException as error:  # a panic in a library of Rust is no Exception
            # Before the name of the subcommand it is ours; behind it, it may be the value of an option.
            return ended(error, started, debug="--debug" in takewhile(lambda word: word.startswith("-"), started.argv))


if __name__ == "__main__":
    sys.exit(main())
