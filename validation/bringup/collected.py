"""What the tools of an NPU's host say, for whoever reads a report far from the card: npu-smi, plog and a profile by msprof.

Each is there or is not: a tool that fails says so in its place, and fails no rung.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from haarkv.tq_ops.temporary import TemporaryFolder

_LINES = 60
_SECONDS, _PROFILE_SECONDS = 30, 900


def collected(since: float, profiled: Sequence[str] = ()) -> dict[str, list[str]]:
    """Lines of each tool that is found.

    Args:
        since: seconds since 1970; logs that were last written before are another run's.
        profiled: a command that msprof runs; none if there is nothing to profile.
    """
    found = {"npu-smi": _npu_smi(), "plog": _plog(since), "msprof": _msprof(profiled) if profiled else []}
    return {name: lines for name, lines in found.items() if lines}


def _npu_smi() -> list[str]:
    return _said(["npu-smi", "info"], _SECONDS) if shutil.which("npu-smi") else []


def _plog(since: float) -> list[str]:
    """The end of what CANN's runtime logged last."""
    root = Path.home() / "ascend" / "log"
    try:
        files = [(file.stat().st_mtime, file) for file in root.rglob("plog*.log")]
        newest = max((dated for dated in files if dated[0] >= since), default=None)
        return newest[1].read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:] if newest else []
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]


def _msprof(command: Sequence[str]) -> list[str]:
    """The time of each kind of operation while a command runs."""
    if not shutil.which("msprof"):
        return []
    with TemporaryFolder("profile") as folder:
        said = _said(["msprof", f"--output={folder}", f"--application={shlex.join(command)}"], _PROFILE_SECONDS)
        tables = sorted(folder.rglob("op_statistic*.csv"))
        lines = tables[-1].read_text(encoding="utf-8", errors="replace").splitlines()[:_LINES] if tables else []
    return lines or ["it left no op_statistic; it said:", *said]


def _said(command: Sequence[str], seconds: float) -> list[str]:
    """The last lines of what a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]} could not be run: {error}"]
    failed = [f"exit code {done.returncode}"] if done.returncode else []
    return [*failed, *(done.stdout + done.stderr).splitlines()[-_LINES:]]
