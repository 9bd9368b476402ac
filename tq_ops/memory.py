"""The memory of this machine: whether something fits into it at all, and what a process gives back to it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from contextlib import suppress
from pathlib import Path

from haarkv.tq_ops.errors import InputError

LARGE_PAGE = 2 * 2**20
"""Bytes."""
_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Bytes that a process on this machine can have at most: all of its memory, or what this process or its container may."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limits.append(int(_OF_CONTAINER.read_text(encoding="ascii")))
    return min(limits)


def require_memory(count: float, what: str, remedy: str) -> None:
    """Refuse what cannot fit.

    Args:
        count: bytes of host memory.
        what: takes them, as the beginning of a sentence.
        remedy: what to do instead.
    Raises:
        InputError: they are more than `memory_limit`.
    """
    if count > (limit := memory_limit()):
        raise InputError(f"{what} would take {count / 2**30:,.1f} GiB, and there are {limit / 2**30:,.1f}; {remedy}")


def hand_back() -> None:
    """Let malloc give back to the system what it keeps for later, where it is glibc's. It takes some milliseconds.

    Blocks of some megabytes that come and go beside small ones that stay leave gaps, which grow to twice what is in use.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Ask the system to put memory on large pages as it is first written to, where it gives them to whoever asks (`madvise`).

    What is read once a step from end to end then needs no walk through page tables for each 4 KB. Only whole large pages
    inside are asked for, so that nothing beside them comes to take memory.

    Args:
        address: where the memory begins, of this process.
        nbytes: how long it is.
    """
    begin, end = -(-address // LARGE_PAGE) * LARGE_PAGE, (address + nbytes) // LARGE_PAGE * LARGE_PAGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if begin < end and advice is not None:  # a system without them says so, and nothing changes
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
