"""Whether other processes took the processors while something was measured: then its times mean little."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
MOST_WAITED = 0.1
"""Share of its time that a process may wait for a processor. An idle machine stays below a hundredth."""


class ThreadTimes(NamedTuple):
    """Nanoseconds that the threads of this process ran, and that they could have run but waited for a processor."""

    run_ns: int = 0
    wait_ns: int = 0


def thread_times() -> ThreadTimes | None:
    """Of all threads until now, as Linux counts; None where the system does not."""
    each = []
    for task in TASKS.glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            each.append([int(word) for word in task.read_text(encoding="ascii").split()[:2]])
    return ThreadTimes(*map(sum, zip(*each, strict=True))) if each else None


def share_waited(begin: ThreadTimes | None, end: ThreadTimes | None) -> float | None:
    """The share of the time between the two that was waited; None where it is not known."""
    if begin is None or end is None:
        return None
    run_ns, wait_ns = (max(after - before, 0) for before, after in zip(begin, end, strict=True))
    return wait_ns / (run_ns + wait_ns) if run_ns + wait_ns else None


def warning(share: float | None) -> str | None:
    """What to say of a run that waited so long, if anything."""
    if share is None or share < MOST_WAITED:
        return None
    return (
        f"the machine was busy: this run waited for a processor {100 * share:.0f} % of its time, so its times mean little; "
        "measure again when nothing else runs"
    )
