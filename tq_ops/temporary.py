"""Temporary folders that a killed process does not leave behind for good: the next one of the same kind removes them.

Locks on files and folders last as long as the process that holds them, and so tell who is still at work.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType


def lock_alone(path: Path) -> int | None:
    """Lock a file or folder against every other process, without waiting.

    Returns:
        An open descriptor, which holds the lock until it is closed or the process ends; None if it cannot be had.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return None
    return opened


class TemporaryFolder:
    """An empty folder of this user's alone, removed by `close`, as a context manager, or at the end of the process.

    Its name holds the number of the process that made it, and it is locked as long as that process lives. A folder of this
    kind that nobody has locked, and whose process is gone, was left by one that was killed: it is removed first.

    Args:
        kind: a word for its name.
        parent: where it is to be; the system's folder for temporary files unless given.
    Attributes:
        path: the folder.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        prefix = f"haarkv-{kind}-"
        _clear(parent, re.compile(rf"{re.escape(prefix)}(\d+)-\w+"))
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        self._finalizer = weakref.finalize(self, _remove, self.path, lock_alone(self.path), os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove it."""
        self._finalizer()


def _clear(parent: Path, name: re.Pattern[str]) -> None:
    """Remove what killed processes have left in a folder."""
    for left in parent.iterdir():
        found = name.fullmatch(left.name)
        if not found or _runs(int(found[1])) or (lock := lock_alone(left)) is None:
            continue
        with suppress(OSError):
            if left.stat().st_uid == os.geteuid():
                shutil.rmtree(left, ignore_errors=True)
        os.close(lock)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OverflowError, PermissionError):  # no number of a process; another user's
        return True
    return True


def _remove(folder: Path, lock: int | None, process: int) -> None:
    if os.getpid() != process:  # a fork of the process whose it is
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
