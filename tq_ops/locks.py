"""Locks on files and folders that last as long as the process that holds them, and so tell who is still at work."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
