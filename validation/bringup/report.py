"""What a bring-up leaves behind to send home: one file that names no private path. Needs no torch."""

from __future__ import annotations

import getpass
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haarkv.validation.bringup.result import RUNGS, Folder, Result

REPORT = "report.json"
_LINES = 60


def report(results: Sequence[Result], about: Mapping[str, str], folder: Folder, collected: Mapping[str, Sequence[str]]) -> str:
    """Everything that was found, with the ends of the logs, as JSON; of a path only its last name is left.

    Args:
        collected: what the machine's own tools say.
    """
    rungs = []
    for result in results:
        plain = result.as_json()
        if result.log:
            plain["log"] = (folder.path / result.log).read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        rungs.append(plain)
    missing = [name for name in RUNGS if name not in {result.name for result in results}]
    whole = {"bringup": verdict(results), **about, "rungs": rungs, "not run": missing, "collected": collected}
    return json.dumps(_public(whole), indent=1) + "\n"


def _public(value: Any) -> Any:
    """A JSON value without what is the user's own: folders, and names of user and machine."""
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """A text in which of every path its last name is left, and neither user nor machine is named."""
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
    """In one line."""
    passed = sum(result.verdict == "passed" for result in results)
    absent = [result.name for result in results if result.verdict == "not on this executor"]
    beside = f", not on this executor: {', '.join(absent)}" if absent else ""
    untried = [f"{result.name} ({result.found.lacking})" for result in results if result.verdict == "not tried"]
    beside += f", not tried: {', '.join(untried)}" if untried else ""
    beside += ", with versions that nobody published" if any(result.found.allowed for result in results) else ""
    if failed := next((result for result in results if result.verdict == "failed"), None):
        where = f" at {failed.found.where}" if failed.found.where else ""
        return f"failed: {failed.name}{where}; {passed} of {len(RUNGS)} rungs passed{beside}"
    word = "unfinished" if len(results) < len(RUNGS) else "passed"
    return f"{word}: {passed} of {len(RUNGS)} rungs{' passed' * (word == 'unfinished')}{beside}"


def collected(since: float) -> dict[str, list[str]]:
    """Last lines of what an NPU's host says: `npu-smi info`, and the newest log of CANN's runtime.

    Args:
        since: seconds since 1970; logs that were last written before are another run's.
    """
    found = {}
    if shutil.which("npu-smi"):
        command = ["npu-smi", "info"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False)
            code = [f"exit code {done.returncode}"] * (done.returncode != 0)
            found["npu-smi"] = [*code, *(done.stdout + done.stderr).splitlines()]
        except (OSError, subprocess.TimeoutExpired) as error:
            found["npu-smi"] = [f"could not be run: {error}"]
    try:
        dated = [(file.stat().st_mtime, file) for file in (Path.home() / "ascend" / "log").rglob("plog*.log")]
        if newest := max((one for one in dated if one[0] >= since), default=None):
            found["plog"] = newest[1].read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        found["plog"] = [f"cannot be read: {error.strerror}"]
    return {name: lines[-_LINES:] for name, lines in found.items()}
