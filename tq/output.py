"""Output of the commands: tables on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from haarkv.tq_ops.errors import HaarkvWarning

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

    from haarkv.engine.generation import OnPrefill
    from haarkv.models.checkpoint import Progress
    from haarkv.validation.fidelity.evaluation import OnStep


T = TypeVar("T")

_MOST_SHOWN = 2000
"""Most characters of a message, which may quote a file."""


def one_line(message: str) -> str:
    """A message as one line, control characters escaped."""
    line = visible(" ".join(message.split()))
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} …"


def visible(text: str) -> str:
    """Text with control characters escaped, but for line ends."""

    def escape(sign: str) -> str:
        acts = unicodedata.category(sign)[0] == "C" and sign != "\n"
        return sign.encode("unicode_escape").decode() if acts else sign

    return text if text.isascii() and text.isprintable() else "".join(map(escape, text))


# A pipe or a file has no width; this many columns keep every table in one piece.
_WIDE = 140


@cache
def err() -> Console:
    """The console on stderr."""
    width = None if sys.stderr.isatty() else _WIDE
    return _console()(stderr=True, width=width, soft_wrap=True, markup=False, emoji=False)


@cache
def _console() -> type[Console]:
    """rich's console, which raises BrokenPipeError instead of ending the process."""
    from rich.console import Console

    class Raising(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the error

    return Raising


def warn(message: str) -> None:
    """Print a warning on stderr."""
    print(f"tq: warning: {one_line(message)}", file=sys.stderr)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print this package's warnings as `warn` does; others as Python does."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, HaarkvWarning):
            warn(str(message))
        else:
            plain(message, category, *where, **more)

    warnings.showwarning = cast("Any", show)
    try:
        yield
    finally:
        warnings.showwarning = plain


def say(message: str) -> None:
    """Print a line on stderr."""
    print(f"tq: {one_line(message)}", file=sys.stderr)


_COLOURS = {"passed": "green", "FAILED": "bold red", "failed": "bold red", "OUTSIDE": "red", "WRONG NOW": "red"}


def print_sentence(text: str) -> None:
    """Print a sentence, wrapped on a terminal."""
    print(fill(text, get_terminal_size().columns) if sys.stdout.isatty() else text)


def print_judged(line: str, verdict: bool | None = None) -> None:
    """Print a line on stdout, coloured by its verdict on a terminal."""
    if verdict is None:
        print(line, flush=True)
        return
    style = _COLOURS["passed" if verdict else "failed"]
    _console()(markup=False, emoji=False).print(line, style=style, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """Print a title and a table, on stdout unless a console is given; without columns there is no header.

    Numeric columns are right-aligned, and no number or first cell is broken.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # The name of a folder may look like markup, but is none.
    target = console or _console()(width=None if sys.stdout.isatty() else _WIDE, markup=False, emoji=False)
    target.print(visible(title), highlight=False, soft_wrap=not target.is_terminal)
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns), pad_edge=False)
    for index in range(len(rows[0])):
        cells = [row[index] for row in rows]
        numeric = bool(columns) and all(cell.lstrip("+-")[:1].isdigit() or cell == "–" for cell in cells)
        whole = bool(columns) and (numeric or not index)
        heading = columns[index] if columns else ""
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(Text(visible(cell), style=_COLOURS.get(cell.split(":")[0], "")) for cell in row))
    target.print(table)


# -- A reader that leaves early --------------------------------------------------------------------------------------------


class _Tolerant:
    """A text stream that drops what is written after one kind of failure."""

    def __init__(self, stream: TextIO, failure: type[OSError]) -> None:
        self._stream, self._failure = stream, failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._attempt(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._attempt(self._stream.flush, None)

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except self._failure:
            drop_output(self._stream)
            return otherwise


@contextmanager
def _tolerant(name: str, failure: type[OSError]) -> Iterator[None]:
    stream = getattr(sys, name)
    setattr(sys, name, _Tolerant(stream, failure))
    try:
        yield
    finally:
        try:
            getattr(sys, name).flush()
        finally:
            setattr(sys, name, stream)


def unread_is_fine() -> AbstractContextManager[None]:
    """Let a command go on to its verdict though stdout's reader has left (`tq validate … | head`)."""
    return _tolerant("stdout", BrokenPipeError)


def unsaid_is_fine() -> AbstractContextManager[None]:
    """Let a command go on though stderr cannot be written."""
    return _tolerant("stderr", OSError)


def drop_output(stream: TextIO) -> None:
    """Discard a stream's buffer, which the interpreter would write at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


# -- Progress --------------------------------------------------------------------------------------------------------------


def _bar(*words: str, count: str = "", left: bool = False) -> rich.progress.Progress:
    """A bar on stderr, silent unless that is a terminal; `count` is the unit of done/total, else a percentage; `left` adds the
    time left.
    """
    from rich import progress as rich
    from rich.text import Text

    class Count(rich.MofNCompleteColumn):
        def render(self, task: rich.Task) -> Text:
            return Text() if task.total is None else Text.assemble(super().render(task), f" {count.strip()}".rstrip())

    columns: list[rich.ProgressColumn] = [*(rich.TextColumn(word, markup=False) for word in words), rich.BarColumn()]
    columns += [Count()] if count else [rich.TaskProgressColumn()]
    columns += [rich.TimeElapsedColumn(), *([rich.TextColumn("left"), rich.TimeRemainingColumn()] if left else [])]
    return rich.Progress(*columns, console=err(), transient=True, disable=not err().is_terminal)


@contextmanager
def loading(model: str) -> Iterator[Progress]:
    """A bar for reading weights."""
    with _bar("loading {task.description}", count=" ") as bar:
        task = bar.add_task(visible(model), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def compiling(program: str) -> None:
    """Name a program on stderr before its long compilation."""
    print(f"tq: compiling {program}", file=sys.stderr, flush=True)


@contextmanager
def prefilling() -> Iterator[OnPrefill]:
    """A bar for the prefill, gone before the first new token."""
    bar = _bar("reading the prompt", count="tokens")
    task = bar.add_task("")

    def on_prefill(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if done < total:
            bar.start()
        else:
            bar.stop()

    try:
        yield on_prefill
    finally:
        bar.stop()


@contextmanager
def scoring(total: int) -> Iterator[OnStep]:
    """A bar that names the current step."""
    with _bar("{task.description}", left=True) as bar:
        task = bar.add_task("scoring", total=total)
        yield lambda what, tokens: bar.update(task, description=what, advance=tokens)


@contextmanager
def counting(total: int, words: str, completed: int = 0) -> Iterator[Callable[[object], None]]:
    """A bar that advances at each call. `words` may hold `{task.description}`, what the call was given. `completed` is -1 if a
    call comes before its item.
    """
    with _bar(words, count=" ", left=True) as bar:
        task = bar.add_task("", total=total, completed=completed)
        yield lambda what: bar.update(task, description=str(what), advance=1)


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """A status line on stderr, which the next one replaces and "" clears; silent unless that is a terminal."""
    is_terminal = err().is_terminal

    def tell(what: str) -> None:
        if is_terminal:
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        tell("")
