"""The ladder: each rung's result is a JSON file, the first failure ends the climb, one report is sent home. No torch."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import write_whole

if TYPE_CHECKING:
    from haarkv.validation.bringup.workbench import Workbench

Verdict = Literal["passed", "failed", "not on this executor", "not tried"]

RUNGS = ("environment", "layer", "long-decode", "head", "teacher-forced", "free-running", "text", "latency")
"""Every rung, from the lowest up."""


@dataclass(frozen=True)
class RungFinding:
    """What a rung found.

    Attributes:
        passed: None if this executor has no counterpart of the rung.
        compared: how many of `unit` were compared or run; a rung that compared none fails.
        where: format, layer and stage of a fault.
        lacking: what is missing to try the rung; then `passed` is None.
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
    """A rung that was run.

    Attributes:
        seconds: wall time of the whole rung.
        inputs: what the verdict depends on, by name; if one changes, the rung runs again.
        log: file beside this one with the whole message of a failure.
    """

    name: str
    verdict: Verdict
    found: RungFinding
    seconds: float
    date: str
    inputs: Mapping[str, str]
    log: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Folder:
    """Where results are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, name: str) -> Result | None:
        """The result of a rung, if there is one.

        Raises:
            InputError: a file of that name that is no result.
        """
        file = self.path / f"{name}.json"
        if not file.exists():
            return None
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            return Result(**{**plain, "found": RungFinding(**plain["found"])})
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{file} is no result of tq dev bringup; delete it") from None

    def save(self, result: Result) -> None:
        write_whole(self.path / f"{result.name}.json", json.dumps(result.as_json(), indent=1) + "\n")

    def log(self, name: str, text: str) -> str:
        """Keep a message; the name of its file."""
        write_whole(self.path / f"{name}.log", text)
        return f"{name}.log"


# -- Climbing ------------------------------------------------------------------------------------------------------------
_LONGEST_LINE = 300


@dataclass(frozen=True)
class Rung:
    """One step of the ladder; an exception in `run` is a failure. With `always`, an earlier result does not count."""

    name: str
    run: Callable[[], RungFinding]
    inputs: dict[str, str] = field(default_factory=dict)
    always: bool = False


def climb(
    rungs: Iterable[Rung],
    folder: Folder,
    *,
    on_begin: Callable[[str, str], None],
    on_result: Callable[[Result, bool], None],
) -> list[Result]:
    """Run rungs up to the first failure; passed rungs with unchanged inputs are kept. Results are saved as they come.

    Args:
        rungs: a generator: a rung's imports and files are touched when those beneath it have passed.
        on_begin: gets a rung's name, and why it runs again or "".
        on_result: gets each result, and whether it was kept.
    """
    results = []
    for rung in rungs:
        old = folder.load(rung.name)
        changed_inputs = _changed_inputs(rung, old)
        reuse = old is not None and old.verdict != "failed" and not changed_inputs and not rung.always
        if not reuse or old is None:
            on_begin(rung.name, changed_inputs)
            result = _run(rung, folder)
            folder.save(result)
        else:
            result = old
        results.append(result)
        on_result(result, reuse)
        if result.verdict == "failed":
            break
    return results


def _changed_inputs(rung: Rung, old: Result | None) -> str:
    """Which inputs of an earlier result have changed, in words."""
    if old is None or old.verdict == "failed" or rung.always:
        return ""
    names = [name for name in {**old.inputs, **rung.inputs} if old.inputs.get(name) != rung.inputs.get(name)]
    return f"{' and '.join(names)} changed" if names else ""


def _run(rung: Rung, folder: Folder) -> Result:
    began = time.perf_counter()
    log = ""
    try:
        finding = rung.run()
    except Exception as error:
        finding = RungFinding(False, one_line(error))
        log = folder.log(rung.name, "".join(traceback.format_exception(error)))
    if finding.passed and not finding.compared:
        finding = replace(finding, passed=False, said=f"it compared nothing, which proves nothing ({finding.said})")
    verdict: Verdict = "passed" if finding.passed else "failed"
    if finding.passed is None:
        verdict = "not tried" if finding.lacking else "not on this executor"
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Result(rung.name, verdict, finding, time.perf_counter() - began, date, rung.inputs, log)


def one_line(error: Exception) -> str:
    """The first line of a message, cut to what a terminal shows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if len(first) <= _LONGEST_LINE else f"{first[:_LONGEST_LINE]}…"


# -- The ladder --------------------------------------------------------------------------------------------------------
def ladder(
    bench: Callable[[], Workbench], executor: str, device: str | None, latency: Callable[[Workbench], RungFinding],
    any_versions: bool = False,
) -> Iterator[Rung]:  # fmt: skip
    """Every rung, in order.

    Args:
        latency: the highest rung; measuring is another room's.
    """
    from haarkv.validation.bringup.environment import environment, versions

    def load() -> object:
        return import_module("torch")

    yield Rung("environment", lambda: environment(executor, device, load, any_versions), versions(executor), always=True)
    from haarkv.validation.bringup import rungs

    work = bench()
    runs: dict[str, Callable[[], RungFinding]] = {
        "layer": lambda: rungs.validate_formats(work, work.first_layer, "teacher-forced"),
        "long-decode": lambda: rungs.long_decode(work),
        "head": lambda: rungs.validate_formats(work, work.first_layer, "free-running"),
        "teacher-forced": lambda: rungs.validate_formats(work, work.model, "teacher-forced"),
        "free-running": lambda: rungs.validate_formats(work, work.model, "free-running"),
        "text": lambda: rungs.greedy_text(work),
        "latency": lambda: latency(work),
    }
    own_inputs = {
        "text": {"new tokens": str(work.new_tokens)}, "latency": {"contexts": ", ".join(map(str, work.contexts))},
    }  # fmt: skip
    for name, run in runs.items():
        yield Rung(name, run, {**work.inputs, **own_inputs.get(name, {})})


# -- What is sent home ---------------------------------------------------------------------------------------------------
REPORT = "report.json"
_LINES = 60


def report(results: Sequence[Result], about: Mapping[str, str], folder: Folder, host_logs: Mapping[str, Sequence[str]]) -> str:
    """All results with the ends of their logs, as JSON without paths, user and machine."""
    rungs = []
    for result in results:
        plain = result.as_json()
        if result.log:
            plain["log"] = (folder.path / result.log).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        rungs.append(plain)
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
    """Last lines of an NPU host's logs: `npu-smi info`, and the newest plog of CANN's runtime.

    Args:
        since: seconds since 1970; logs last written before are another run's.
    """
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
