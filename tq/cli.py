"""The command `tq`: runs the subcommand, and turns every error that a user can cause into one line and exit code 2."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from haarkv.tq_ops.errors import InputError, RankLostError
from haarkv.tq_ops.npu.autoload import leave_npu_alone
from tq import __version__
from tq.output import drop_output
from tq.ranks import LOST, Started

_COMMANDS = (
    "generate", "validate", "diff", "eval", "calibrate", "plan", "bringup", "compile", "export", "bench", "serve", "formats",
    "info",
)  # fmt: skip


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
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _InterruptedError from None
        except OSError as error:
            raise _SystemError(error) from None


class _InterruptedError(Exception):
    """Ctrl-C."""


class _SystemError(Exception):
    """The system refused to read or write."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="haarkv")
def cli() -> None:
    """Run decoder models such as Qwen3 with a rotated low-bit KV cache.

    Start with `tq generate --prompt 'def main('`. Every command explains itself with --help.
    """


def _prepare_streams() -> None:
    """Let printing never fail because of the stream: a closed one drops the text, a narrow encoding shows `?`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _one_line(message: str) -> str:
    return " ".join(message.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit codes as of `run`."""
    return run(Started(list(sys.argv[1:] if argv is None else argv)))


def run(started: Started) -> int:
    """Run the command, as a user started it or as one rank of it.

    Returns:
        0; 1 if a comparison found a fault; 2 for an error that the user can correct (one line on stderr); 130 if interrupted.
    """
    leave_npu_alone()
    try:
        _prepare_streams()
        result = cli.main(args=list(started.argv), prog_name="tq", standalone_mode=False, obj=started)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        help_wanted.show()
        return 2
    except click.ClickException as error:
        print(f"tq: {_one_line(error.format_message())}", file=sys.stderr)
        return 2
    except InputError as error:
        if started.place and isinstance(error, RankLostError):
            return LOST  # whoever started the ranks knows which one
        print(f"tq: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort, _InterruptedError):
        if started.place:
            return 130  # whoever started the ranks says so
        # A terminal has shown ^C, and perhaps half a line of text.
        print("\n" * sys.stderr.isatty() + "tq: interrupted", file=sys.stderr)
        return 130
    except _SystemError as kept:
        return _system_error(kept.error)
    except OSError as error:
        return _system_error(error)


def _system_error(error: OSError) -> int:
    """Exit code of a failed read or write. A reader that leaves early is no failure: commands with a verdict go on to it."""
    try:
        sys.stdout.flush()
    except OSError:
        # What could not be written stays in the buffer, and the interpreter would try it again at exit.
        drop_output(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    what = f"{error.filename}: " if error.filename else ""
    print(f"tq: {_one_line(f'{what}{error.strerror or error}')}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
