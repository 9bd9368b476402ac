"""What every subcommand prints with: tables, and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from haarkv.models.checkpoint import Progress
    from haarkv.validation.fidelity.evaluation import OnStep


# A pipe or a file has no width; so many columns keep every table in one piece.
_WIDE = 140


@cache
def err() -> Console:
    """The console on stderr."""
    from rich.console import Console

    width = None if sys.stderr.isatty() else _WIDE
    return Console(stderr=True, width=width, soft_wrap=True, markup=False, emoji=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """Print a title and a table, on stdout unless a console is given.

    Columns of numbers are right-aligned. Without column names there is no header and nothing is aligned.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=bool(columns), pad_edge=False)
    for index in range(len(rows[0])):
        cells = [row[index] for row in rows]
        numeric = bool(columns) and all(cell.lstrip("+-")[:1].isdigit() or cell == "–" for cell in cells)
        table.add_column(columns[index] if columns else "", justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Names of folders may look like markup and are none.
    target = console or Console(width=None if sys.stdout.isatty() else _WIDE, markup=False, emoji=False)
    target.print(title, highlight=False, soft_wrap=True)
    target.print(table)


@contextmanager
def loading(model: str) -> Iterator[Progress]:
    """A progress bar on stderr while weights come in; silent when stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task(model, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def scoring(total: int) -> Iterator[OnStep]:
    """A bar on stderr with what is being done; silent when stderr is not a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("scoring", total=total)
        yield lambda what, tokens: bar.update(task, description=what, advance=tokens)
