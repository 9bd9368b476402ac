"""The rung that needs the device's toolkit and no card: the C++ of a program, through the compiler of a card's host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from haarkv.models.qwen3_14b.npu.compile import KERNELS, written
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.npu.versions import sourced_from
from haarkv.tq_ops.output_files import TemporaryFolder
from haarkv.validation.bringup.result import Found
from haarkv.validation.bringup.workbench import Workbench

COMPILER = "bisheng"
_PROGRAM = "decode"
_BELOW_CANN = ("bin", "compiler/ccec_compiler/bin", "tools/bisheng_compiler/bin")


def found_compiler() -> str | None:
    """The device's compiler: on the path, or within the toolkit that is sourced."""
    if found := shutil.which(COMPILER):
        return found
    cann = sourced_from()
    places = [Path(cann, below, COMPILER) for below in _BELOW_CANN] if cann else []
    return next((str(place) for place in places if os.access(place, os.X_OK)), None)


def by_the_device(bench: Workbench) -> Found:
    """Emit the C++ of decode's program, as `tq dev compile --cpp` does, and compile every kernel function."""
    if bench.programs is None:
        return Found(None, "its kernels are no programs that PyPTO emits")
    compiler = found_compiler()
    lacks = [tool for tool, found in ((COMPILER, compiler), ("make", shutil.which("make"))) if found is None]
    if compiler is None or lacks:
        return Found(
            None, f"{' and '.join(lacks)} not found; source CANN's set_env.sh, and the C++ is compiled", lacking=lacks[0]
        )
    from haarkv.models.qwen3_14b.npu.compile import compile_programs

    plan = next(iter(bench.plans.values()))
    plan = replace(plan, layers=plan.layers[:1])
    try:
        (program,) = compile_programs(
            bench.config.with_layers(1), (_PROGRAM,), lambda name: bench.tell(f"emitting the C++ of {name}"), plan
        )
    except InputError as error:
        return Found(None, f"no C++ is emitted here: {error}", lacking="PyPTO's simulator")
    bench.tell(f"compiling {len(program.sources)} files by {compiler}")
    return compiled({_PROGRAM: program.sources}, compiler)


def compiled(programs: Mapping[str, Mapping[str, str]], compiler: str) -> Found:
    """Write the folder of some programs and compile it.

    Args:
        programs: name -> path -> source.
        compiler: the executable.
    """
    functions = sum(path.startswith(KERNELS) for sources in programs.values() for path in sources)
    with TemporaryFolder("cpp") as folder:
        written(folder, programs)
        done = subprocess.run(
            ["make", "--keep-going", f"--jobs={os.cpu_count() or 1}", f"BISHENG={compiler}", f"PYTHON={sys.executable}"],
            cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        objects = len(list(folder.glob("*/kernel_aicore/*.o")))
    facts = {"device's compiler": _version(compiler)}
    if done.returncode == 0 and objects == functions:
        said = f"{functions} kernel functions compiled by {Path(compiler).name}"
        return Found(True, said, functions, "functions", facts=facts)
    lines = [line.strip() for line in (*done.stderr.splitlines(), *done.stdout.splitlines()) if line.strip()]
    wrong = re.findall(r"\*\*\* \[\S+ (\S+)\.o\]", done.stderr)
    word = next((line for line in lines if re.search(r"\b(fatal )?error\b", line, re.IGNORECASE)), lines[0] if lines else "")
    where = wrong[0] if wrong else _PROGRAM
    said = f"{functions - objects} of {functions} kernel functions do not compile; {where}: {word[:200]}"
    return Found(False, said, functions, "functions", where, facts=facts)


def _version(compiler: str) -> str:
    """What it says of itself, in a line."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "says no version"
    return next(iter(done.stdout.splitlines()), "says no version").strip()[:100]
