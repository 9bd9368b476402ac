"""The command `tq`: finds the subcommand and turns every error a user can cause into one line and exit code 2."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from haarkv.tq_ops.errors import InputError
from tq import __version__

_COMMANDS = ("generate", "validate", "diff", "eval", "plan", "compile", "export", "bench", "serve", "formats", "info")


class _Commands(click.Group):
    """Subcommands, one module of `tq.commands` each, imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"tq.commands.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand, and keep from click what it would answer itself, with other lines and another exit code."""
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
    """Run Qwen3 with a rotated low-bit KV cache."""


def _prepare_streams() -> None:
    """Let nothing that is printed fail for the sake of the stream: a closed one swallows it, a narrow one shows `?`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _one_line(message: str) -> str:
    return " ".join(message.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, 1 if a comparison found what it should not, 2 for whatever the user can mend (one line on stderr), 130 if
        interrupted.
    """
    try:
        _prepare_streams()
        result = cli.main(args=argv, prog_name="tq", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        help_wanted.show()
        return 2
    except click.ClickException as error:
        print(f"tq: {_one_line(error.format_message())}", file=sys.stderr)
        return 2
    except InputError as error:
        print(f"tq: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort, _InterruptedError):
        # A terminal has shown ^C, and perhaps half a line of text.
        print("\n" * sys.stderr.isatty() + "tq: interrupted", file=sys.stderr)
        return 130
    except _SystemError as kept:
        return _system_error(kept.error)
    except OSError as error:
        return _system_error(error)


def _system_error(error: OSError) -> int:
    """Exit code of a failed read or write; that nobody reads our output any more is not a failure."""
    try:
        sys.stdout.flush()
    except OSError:
        # What could not be written stays in the buffer; the interpreter must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    what = f"{error.filename}: " if error.filename else ""
    print(f"tq: {_one_line(f'{what}{error.strerror or error}')}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
