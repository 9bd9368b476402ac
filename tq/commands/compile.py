"""`tq dev compile`: compile a model's NPU programs and list the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.output_files import check_folder, whole_folder
from tq import options
from tq.groups import Command
from tq.output import counting, print_table

if TYPE_CHECKING:
    from haarkv.models.qwen3_14b.npu.compile import Compiled
    from haarkv.tq_ops.kv.plan import KVSpec

_PROGRAMS = ("decode", "prefill", "head")


@click.command("compile", cls=Command)
@options.model_option()
@click.option(
    "--program", "names", multiple=True, type=click.Choice(_PROGRAMS), help="Compile only this one; repeatable [default: all]."
)
@options.file("--cpp", "Write the C++ to a new folder, with a Makefile.", "folder", metavar="DIR")
@options.kv_options(default="as said above")
@options.json_option
def command(model: str, names: tuple[str, ...], folder: Path | None, as_json: bool, **kv: Any) -> int:
    """Compile a model's NPU programs down to AICore C++. Only the model's config is read.

    Without --kv the cache is the one that `--kv auto` chose for this model and the NPU, or tq4 with 124 recent and 4 first
    tokens in BF16.

    Layers that store K and V alike share a program; a plan of several formats is compiled into several.

    This shows that the programs compile, how long it takes, and the C++ they become. It does not speed up a later run: PyPTO
    keeps compiled programs only within a process, so the first forward on an NPU compiles them again.
    """
    from haarkv.engine.plans import plan_for
    from haarkv.models.catalog import read_config
    from haarkv.models.qwen3_14b.npu.compile import compile_programs, wanted

    if folder is not None:
        check_folder(folder)
    config = read_config(model)
    plan = plan_for(_cache(model, kv), config)
    compiled: list[Compiled] = []
    kinds = names or _PROGRAMS
    with counting(len(wanted(config, kinds, plan)), "compiling {task.description}") as begin:
        compiled.extend(compile_programs(config, kinds, begin, plan))
    if folder is not None:
        _write(folder, compiled)
    if as_json:
        rows = [_row(program) for program in compiled]
        print(json.dumps({"model": model, "kv": plan.describe(), "programs": rows, "cpp": folder and str(folder)}))
        return 0
    columns = ("program", "seconds", "kernel functions", "lines of C++")
    print_table(f"{model} with a {plan.describe()} cache for Ascend NPU", columns, [_cells(c) for c in compiled])
    if folder is not None:
        print(f"C++ in {folder}")
    return 0


def _cache(model: str, given: dict[str, Any]) -> KVSpec:
    """The cache to compile for; where none is named, the one that was chosen before, and none is chosen now."""
    from haarkv.models.catalog import read_config
    from haarkv.validation.planning.auto import LOSS
    from haarkv.validation.planning.remembered import chosen_before, default_cache, file_for, fixed_cache
    from tq.loading import kv_spec

    fixed = fixed_cache(read_config(model), "npu")
    if all(value in (None, ()) for value in given.values()):
        return chosen_before(file_for(model, LOSS, executor="npu")) or default_cache(model, executor="npu") or fixed
    if all(given[name] is None for name in ("kv", "calibration", "kv_plan", "kv_loss")):
        given = {**given, "kv": fixed.kv}
    return kv_spec({"model": model, "executor": "npu", **given})


def _row(program: Compiled) -> dict[str, object]:
    functions = program.functions
    return {
        "program": program.name, "layers": list(program.layers), "seconds": program.seconds, "functions": len(functions),
        "lines": _lines(functions),
    }  # fmt: skip


def _cells(program: Compiled) -> tuple[str, ...]:
    functions = program.functions
    return program.name, f"{program.seconds:.1f}", str(len(functions)), str(_lines(functions))


def _lines(texts: list[str]) -> int:
    return sum(text.count("\n") for text in texts)


def _write(folder: Path, compiled: list[Compiled]) -> None:
    """All files or none."""
    from haarkv.tq_ops.npu.cpp_folder import written

    with whole_folder(folder) as half:
        written(half, {program.name: program.sources for program in compiled})
