"""How a command ends that did not do what it was asked: one line on stderr, and the exit code."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

import click

from haarkv.tq_ops.errors import InputError, RankLostError
from tq.output import drop_output, one_line
from tq.ranks import LOST

if TYPE_CHECKING:
    from tq.ranks import Started

# Said by torch's allocators, the C++ library, the loader of shared libraries, and threads.
_NO_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory",
    "failed to map segment", "can't start new thread",
)  # fmt: skip


class InterruptedCommandError(Exception):
    """Ctrl-C."""


class SystemRefusedError(Exception):
    """The system refused to read or write."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def ended(error: BaseException, started: Started, debug: bool) -> int:
    """Say why a command ended, and with which exit code.

    Args:
        error: what ended it.
        debug: print the traceback as well.
    Returns:
        as `tq.cli.run`; of a rank that has lost another, `LOST`.
    """
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return 2
    if isinstance(error, KeyboardInterrupt | click.Abort | InterruptedCommandError):
        if not started.place:  # whoever started the ranks says so
            # A terminal has shown ^C, and perhaps half a line of text.
            print("\n" * sys.stderr.isatty() + "tq: interrupted", file=sys.stderr)
        return 130
    if isinstance(error, SystemExit):  # of a library that ends the process itself
        return error.code if isinstance(error.code, int) else 2
    if isinstance(error, SystemRefusedError):
        error = error.error
    if debug:
        traceback.print_exception(error)
    if isinstance(error, RankLostError) and started.place:
        return LOST  # whoever started the ranks knows which one
    try:
        sys.stdout.flush()
    except OSError:
        # What could not be written stays in the buffer, and the interpreter would try it again at exit.
        drop_output(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0  # a reader that leaves early is no failure: commands with a verdict go on to it
    print(f"tq: {one_line(_reason(error))}", file=sys.stderr)
    return 2


def _reason(error: BaseException) -> str:
    """What is wrong, and what to do."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, InputError):
        return str(error)
    said = str(error)
    if isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY):
        return "there is not enough memory; take a smaller model, text or context, or allow this process more"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror or error)
    return (
        f"this is a fault of tq itself: {type(error).__name__}: {said}; please report it with what `tq --debug …` prints "
        "for the same command"
    )
