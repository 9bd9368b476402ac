"""`tq compile`: compile a model's NPU programs and list the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq.files import check_folder, whole_folder
from tq.options import json_option, kv_option, model_option
from tq.output import err, print_table

if TYPE_CHECKING:
    from haarkv.models.qwen3_14b.npu.compile import Compiled

_PROGRAMS = ("decode", "prefill", "head")


@click.command("compile")
@model_option()
@click.option(
    "--program", "names", multiple=True, type=click.Choice(_PROGRAMS), help="Compile only this one; repeatable [default: all]."
)
@click.option("--cpp", "folder", metavar="DIR", type=click.Path(path_type=Path), help="Write the AICore C++ to a new folder.")
@kv_option
@json_option
def command(model: str, names: tuple[str, ...], folder: Path | None, kv: str, as_json: bool) -> None:
    """Compile a model's NPU programs down to AICore C++. Only the model's config is read.

    This shows that the programs compile, how long it takes, and the C++ they become. It does not speed up a later run: PyPTO
    keeps compiled programs only within a process, so the first forward on an NPU compiles them again.
    """
    from haarkv.models.catalog import read_config
    from haarkv.models.qwen3_14b.npu.compile import compile_programs
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.kv.plan import KVPlan

    if folder is not None:
        check_folder(folder)
    config, plan = read_config(model), KVPlan.uniform(*formats.parse(kv), 1)
    compiled: list[Compiled] = []
    with _progress(len(names or _PROGRAMS)) as begin:
        compiled.extend(compile_programs(config, names or _PROGRAMS, begin, plan))
    if folder is not None:
        _write(folder, compiled)
    if as_json:
        rows = [{"program": c.name, "seconds": c.seconds, "files": sorted(c.sources), "lines": c.lines} for c in compiled]
        print(json.dumps({"model": model, "kv": kv, "programs": rows, "cpp": str(folder) if folder else None}))
        return
    cells = [(c.name, f"{c.seconds:.1f}", str(len(c.sources)), str(c.lines)) for c in compiled]
    print_table(f"{model} with a {kv} cache for Ascend NPU", ("program", "seconds", "kernel functions", "lines of C++"), cells)
    if folder is not None:
        print(f"C++ in {folder}")


def _write(folder: Path, compiled: list[Compiled]) -> None:
    """All files or none."""
    with whole_folder(folder) as half:
        for program in compiled:
            (half / program.name).mkdir()
            for name, text in program.sources.items():
                (half / program.name / name).write_text(text, encoding="utf-8")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that names the current program; silent when stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("compiling {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def begin(name: str) -> None:
            bar.update(task, description=name, advance=1)

        yield begin
