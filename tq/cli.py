"""The command `tq`: finds the subcommand and turns every error a user can cause into one line and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from tq import __version__
from tq_ops.errors import InputError

_COMMANDS = ("generate", "formats", "info")


class _Commands(click.Group):
    """Subcommands, one module of `tq.commands` each, imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"tq.commands.{cmd_name}").command
        return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="haarkv")
def cli() -> None:
    """Run Qwen3 with a rotated low-bit KV cache."""


def _one_line(message: str) -> str:
    return " ".join(message.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, 2 for whatever the user can mend (one line on stderr), 130 if interrupted.
    """
    try:
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
    except (KeyboardInterrupt, click.Abort):
        print("\ntq: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
