"""The ladder of a bring-up: rungs from the lowest up, the first failure ends the climb, one report is sent home. No torch."""

from __future__ import annotations

import getpass
import json
import platform
import re
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:
    from haarkv.validation.bringup.workbench import Workbench

Verdict = Literal["passed", "failed", "not on this executor", "not tried"]

RUNGS = ("environment", "layer", "long-decode", "head", "teacher-forced", "free-running", "text", "latency")
"""Every rung, from the lowest up."""


@dataclass(frozen=True)
class RungFinding:
    """What a rung found.

    Attributes:
        passed: None if this executor has no such rung, or something is `lacking`.
        compared: how many of `unit` were compared or run; a rung that compared none fails.
        where: format, layer and stage of a fault.
        allowed: what would have failed the rung and was allowed by the request.
    """

    passed: bool | None
    said: str
    compared: int = 0
    unit: str = "numbers"
    where: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    lacking: str = ""
    allowed: str = ""


@dataclass(frozen=True)
class Result:
    """A rung that was run; `log` is the whole message of an exception."""

    name: str
    verdict: Verdict
    found: RungFinding
    seconds: float
    date: str
    log: str = ""


# -- Climbing ------------------------------------------------------------------------------------------------------------
_LONGEST_LINE = 300
Rung = tuple[str, Callable[[], RungFinding]]
"""A name, and what runs; an exception there is a failure."""


def climb(rungs: Iterable[Rung], on_begin: Callable[[str], object], on_result: Callable[[Result], object]) -> list[Result]:
    """Run rungs up to the first failure. Of a generator, a rung's imports run when those beneath it have passed."""
    results = []
    for name, run in rungs:
        on_begin(name)
        results.append(_run(name, run))
        on_result(results[-1])
        if results[-1].verdict == "failed":
            break
    return results


def _run(name: str, run: Callable[[], RungFinding]) -> Result:
    began, log = time.perf_counter(), ""
    try:
        finding = run()
    except Exception as error:
        finding, log = RungFinding(False, one_line(error)), "".join(traceback.format_exception(error))
    if finding.passed and not finding.compared:
        finding = replace(finding, passed=False, said=f"it compared nothing, which proves nothing ({finding.said})")
    verdict: Verdict = "passed" if finding.passed else "failed"
    if finding.passed is None:
        verdict = "not tried" if finding.lacking else "not on this executor"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Result(name, verdict, finding, time.perf_counter() - began, date, log)


def one_line(error: Exception) -> str:
    """The first line of a message, cut to what a terminal shows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if len(first) <= _LONGEST_LINE else f"{first[:_LONGEST_LINE]}…"


# -- The lowest rung: are the installed versions known to work together? -----------------------------------------------
SIMULATOR = "sim"
"""The device that needs no card."""


def require_executor(name: str) -> None:
    """Refuse an unknown executor without importing one, and the reference, which all others are compared with."""
    if name == "reference":
        raise InputError("the reference compared with itself proves nothing; name another --executor")
    if not name.isidentifier() or not all(find_spec(f"haarkv.{room}.{name}") for room in ("executors", "tq_ops")):
        raise InputError(f"unknown executor {name!r}; name npu, cuda, cpu or onnx")


def environment(executor: str, device: str | None, load: Callable[[], object], any_versions: bool = False) -> RungFinding:
    """Compare what is installed with what is published to work, then load torch; unpublished versions may be allowed."""
    # An executor's own table of published combinations, if it has one, judges the packages of its extra.
    module = f"haarkv.tq_ops.{executor}.versions"
    table: Any = import_module(module) if find_spec(module) else None
    versions = {"haarkv": _installed_version("haarkv") or "a checkout", "python": platform.python_version()}
    stack = table and table.find_installation()
    if table:
        parts = {name.replace("_", "-"): value for name, value in asdict(stack).items() if not name.endswith("folder")}
        versions |= {name: str(value) for name, value in parts.items() if value}
    requirements = _requirements("" if table else executor)
    for requirement in requirements:
        versions.setdefault(requirement.name, _installed_version(requirement.name) or "none")
    problem, allowance, newer = next(filter(None, map(_missing, requirements)), None), "", ""
    if table and problem is None:
        if device == SIMULATOR:
            problem = table.unsimulated_reason(stack)
        elif reason := table.unpublished_reason(stack):
            advice = f"{reason} (--device {SIMULATOR} rehearses without a card)"
            problem, allowance = (None, advice) if any_versions else (advice, "")
        else:
            newer = table.newer_note(stack) or ""
    if problem is None:
        try:
            load()
        except (ImportError, OSError, RuntimeError) as error:
            problem = f"torch cannot be imported: {' '.join(str(error).split())[:300]}"
    summary = ", ".join(f"{name} {value}" for name, value in versions.items() if name in _REPORTED_PACKAGES)
    summary += f"; allowed by --any-versions: {allowance}" * bool(allowance) + f"; {newer}" * bool(newer)
    return RungFinding(problem is None, problem or summary, len(versions), "versions", facts=versions, allowed=allowance)


_REPORTED_PACKAGES = ("python", "torch", "torch-npu", "pypto", "cann", "driver")


def _missing(requirement: Requirement) -> str | None:
    """What is wrong with a package that haarkv requires: absent, too old or too new; None if nothing is."""
    package_version = _installed_version(requirement.name)
    if package_version is None:
        return f"{requirement.name} is not installed; haarkv needs {requirement}"
    if not requirement.specifier.contains(package_version, prereleases=True):
        return f"{requirement.name} {package_version} is installed, and haarkv needs {requirement}"
    return None


def _requirements(extra: str) -> list[Requirement]:
    """What haarkv requires, with an extra or ""."""
    try:
        lines = requires("haarkv") or ()
    except PackageNotFoundError:  # run from a checkout
        return []
    return [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": extra})]


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- The ladder --------------------------------------------------------------------------------------------------------
def ladder(
    bench: Callable[[], Workbench], executor: str, device: str | None, latency: Callable[[Workbench], RungFinding],
    any_versions: bool = False,
) -> Iterator[Rung]:  # fmt: skip
    """Every rung, in order; `latency` is the highest, measured by another room."""
    yield "environment", lambda: environment(executor, device, lambda: import_module("torch"), any_versions)
    from haarkv.validation.bringup import rungs

    work = bench()
    yield "layer", lambda: rungs.validate_formats(work, work.first_layer, "teacher-forced")
    yield "long-decode", lambda: rungs.long_decode(work)
    yield "head", lambda: rungs.validate_formats(work, work.first_layer, "free-running")
    yield "teacher-forced", lambda: rungs.validate_formats(work, work.model, "teacher-forced")
    yield "free-running", lambda: rungs.validate_formats(work, work.model, "free-running")
    yield "text", lambda: rungs.greedy_text(work)
    yield "latency", lambda: latency(work)


# -- What is sent home ---------------------------------------------------------------------------------------------------
_LINES = 60


def report(results: Sequence[Result], about: Mapping[str, str], host_logs: Mapping[str, Sequence[str]]) -> str:
    """All results with the ends of their logs, as JSON without paths, user and machine."""
    rungs = [{**asdict(result), "log": result.log.splitlines()[-_LINES:]} for result in results]
    missing = [name for name in RUNGS if name not in {result.name for result in results}]
    whole = {"bringup": verdict(results), **about, "rungs": rungs, "not run": missing, "collected": host_logs}
    return json.dumps(_public(whole), indent=1) + "\n"


def _public(value: Any) -> Any:
    """A JSON value without folders and names of user and machine."""
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """A text without folders and names of user and machine."""
    text = re.sub(r"(?<![\w.…/])(?:~|\.{1,2})?/+(?:[^\s/:'\"<>,;()\[\]]+/)*([^\s/:'\"<>,;()\[\]]*)", r"…/\1", text)
    for private in (Path.home().name, _user(), platform.node()):
        # A name such as `root` is a word like any other.
        if len(private) > 3 and private not in ("root", "home", "user", "localhost"):
            text = re.sub(rf"\b{re.escape(private)}\b", "…", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, in a container
        return ""


def verdict(results: Sequence[Result]) -> str:
    """All results in one line."""
    passed_count = sum(result.verdict == "passed" for result in results)
    absent = [result.name for result in results if result.verdict == "not on this executor"]
    remarks = f", not on this executor: {', '.join(absent)}" if absent else ""
    untried_rungs = [f"{result.name} ({result.found.lacking})" for result in results if result.verdict == "not tried"]
    remarks += f", not tried: {', '.join(untried_rungs)}" if untried_rungs else ""
    remarks += ", with unpublished versions" if any(result.found.allowed for result in results) else ""
    if failed_rung := next((result for result in results if result.verdict == "failed"), None):
        where = f" at {failed_rung.found.where}" if failed_rung.found.where else ""
        return f"failed: {failed_rung.name}{where}; {passed_count} of {len(RUNGS)} rungs passed{remarks}"
    word = "unfinished" if len(results) < len(RUNGS) else "passed"
    return f"{word}: {passed_count} of {len(RUNGS)} rungs{' passed' * (word == 'unfinished')}{remarks}"


def collect_host_logs(since: float) -> dict[str, list[str]]:
    """Last lines of `npu-smi info`, and of CANN's newest plog written since a time (seconds since 1970)."""
    host_logs = {}
    if shutil.which("npu-smi"):
        command = ["npu-smi", "info"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
            code = [f"exit code {done.returncode}"] * (done.returncode != 0)
            host_logs["npu-smi"] = [*code, *(done.stdout + done.stderr).splitlines()]
        except (OSError, subprocess.TimeoutExpired) as error:
            host_logs["npu-smi"] = [f"could not be run: {error}"]
    try:
        log_times = [(file.stat().st_mtime, file) for file in (Path.home() / "ascend" / "log").rglob("plog*.log")]
        if newest := max((one for one in log_times if one[0] >= since), default=None):
            host_logs["plog"] = newest[1].read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        host_logs["plog"] = [f"cannot be read: {error.strerror}"]
    return {name: lines[-_LINES:] for name, lines in host_logs.items()}
