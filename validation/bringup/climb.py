"""Climbing: rungs in order, until one fails; what is known already is kept. Needs no torch."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING

from haarkv.validation.bringup.environment import environment, versions
from haarkv.validation.bringup.result import Folder, Found, Result, Verdict

if TYPE_CHECKING:
    from haarkv.validation.bringup.workbench import Workbench


_LONGEST_LINE = 300


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: of `result.RUNGS`.
        run: tries it; an exception is a failure.
        inputs: as in `Result`.
        always: it is run even if its result is known.
    """

    name: str
    run: Callable[[], Found]
    inputs: dict[str, str] = field(default_factory=dict)
    always: bool = False


def climb(
    rungs: Iterable[Rung],
    folder: Folder,
    *,
    on_begin: Callable[[str, str], None],
    on_result: Callable[[Result, bool], None],
) -> list[Result]:
    """Run rungs up to the first that fails. A passed one is kept if its inputs are the same; results are saved as they come.

    Args:
        rungs: made one by one, so that a rung's imports and files are not touched before those beneath it have passed.
        on_begin: called with a rung's name, and why it is run again or "".
        on_result: called with each result, and whether it was kept from before.
    Returns:
        the results, in order; the last one failed, or every rung is there.
    """
    results = []
    for rung in rungs:
        old = folder.load(rung.name)
        changed = _changed(rung, old)
        kept = old is not None and old.verdict != "failed" and not changed and not rung.always
        if not kept or old is None:
            on_begin(rung.name, changed)
            result = _run(rung, folder)
            folder.save(result)
        else:
            result = old
        results.append(result)
        on_result(result, kept)
        if result.verdict == "failed":
            break
    return results


def _changed(rung: Rung, old: Result | None) -> str:
    """In words, which inputs of an old result are others now; "" if none is."""
    if old is None or old.verdict == "failed" or rung.always:
        return ""
    names = [name for name in {**old.inputs, **rung.inputs} if old.inputs.get(name) != rung.inputs.get(name)]
    return f"{' and '.join(names)} changed" if names else ""


def _run(rung: Rung, folder: Folder) -> Result:
    began = time.perf_counter()
    log = ""
    try:
        found = rung.run()
    except Exception as error:
        found = Found(False, one_line(error))
        log = folder.log(rung.name, "".join(traceback.format_exception(error)))
    if found.passed and not found.compared:
        found = replace(found, passed=False, said=f"it compared nothing, which proves nothing ({found.said})")
    verdict: Verdict = "passed" if found.passed else "failed"
    if found.passed is None:
        verdict = "not tried" if found.lacking else "not on this executor"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Result(rung.name, verdict, found, time.perf_counter() - began, date, rung.inputs, log)


def one_line(error: Exception) -> str:
    """The first line of a message, be it a compiler's eighty, cut to what a terminal shows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if len(first) <= _LONGEST_LINE else f"{first[:_LONGEST_LINE]}…"


# -- The ladder --------------------------------------------------------------------------------------------------------
def ladder(
    bench: Callable[[], Workbench], executor: str, device: str | None, latency: Callable[[Workbench], Found],
    any_versions: bool = False,
) -> Iterator[Rung]:  # fmt: skip
    """Every rung, made when those beneath it have passed.

    Args:
        bench: makes the workbench of the request.
        executor, device: of the request.
        latency: the highest rung; measuring is another room's.
        any_versions: versions that nobody published together do not fail the lowest rung.
    Raises:
        InputError: whatever `bench` raises.
    """

    def load() -> object:
        return import_module("torch")

    yield Rung("environment", lambda: environment(executor, device, load, any_versions), versions(executor), always=True)
    from haarkv.validation.bringup import compiler, rungs

    work = bench()
    below = work.inputs
    by_compiler = {**below, "device's compiler": compiler.found_compiler() or "none"}
    yield Rung("compiler", lambda: compiler.by_the_device(work), by_compiler)
    yield Rung("store", lambda: rungs.store(work), below)
    whole = work.inputs_of_model
    yield Rung("layer", lambda: rungs.validated(work, work.first_layer, "teacher-forced"), whole)
    yield Rung("long-decode", lambda: rungs.long_decode(work), whole)
    yield Rung("head", lambda: rungs.validated(work, work.first_layer, "free-running"), whole)
    yield Rung("teacher-forced", lambda: rungs.validated(work, work.model, "teacher-forced"), whole)
    yield Rung("free-running", lambda: rungs.validated(work, work.model, "free-running"), whole)
    yield Rung("text", lambda: rungs.greedy_text(work), {**whole, "new tokens": str(work.new_tokens)})
    contexts = ", ".join(map(str, work.contexts))
    yield Rung("latency", lambda: latency(work), {**whole, "contexts": contexts})
