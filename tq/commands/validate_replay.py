"""What `tq validate --replay FILE` does with a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import write_whole
from tq.output import err

if TYPE_CHECKING:
    from haarkv.validation.layers.replay.shrink import OneRun

_SECONDS = 60.0
"""To make a failing layer smaller in."""


def write_replay(file: Path, runs: Sequence[OneRun]) -> str:
    """Write the failing layer, as small as it was found to fail; in words what was written, or why nothing was."""
    from haarkv.validation.layers.replay.file import dumps
    from haarkv.validation.layers.replay.shrink import replay_of
    from tq.commands.validate_report import versions

    try:
        with _shrinking() as on_try:
            found = replay_of(runs, versions()[0], _SECONDS, on_try)
    except InputError as error:
        return f"nothing was written: {error}"
    content = dumps(found)
    write_whole(file, content)
    return (
        f"{file} ({len(content):,} bytes): {found.case.describe()}; run it with tq replay {file} --executor {found.candidate}"
    )


@contextmanager
def _shrinking() -> Iterator[Callable[[], object]]:
    """A counter on stderr; silent when stderr is not a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("making the failing layer smaller, attempt {task.completed}"))
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda: bar.advance(task)
