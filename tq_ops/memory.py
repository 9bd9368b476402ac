"""Memory limits of this machine, what a process uses, and how it gives memory back."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from haarkv.tq_ops.errors import InputError

LARGE_PAGE = 2 * 2**20
"""Bytes."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MEMORY, _STATUS, _MAPPINGS = Path("/proc/meminfo"), Path("/proc/self/status"), Path("/proc/self/smaps")
_MEMBERSHIP, _CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Most bytes that a process can have here: all memory, or what its process or container limits allow."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min(limits + [limit for limit, _ in _groups()])


def available_memory() -> int:
    """Bytes that this process can allocate now without evicting more than pages of files.

    The least of what the system calls available, what each control group above this process leaves (pages of files not
    counted), and what its own limits leave; `memory_limit` where the system does not say.
    """
    left = [memory_limit()]
    with suppress(OSError, ValueError, KeyError):
        left.append(_kibibytes(_MEMORY)["MemAvailable"])
    left += [limit - usage for limit, usage in _groups()]
    with suppress(OSError, ValueError, KeyError):
        status = _kibibytes(_STATUS)
        for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            soft, _ = resource.getrlimit(kind)
            if soft != resource.RLIM_INFINITY:
                left.append(soft - status[name])
    return max(0, min(left))


def _kibibytes(path: Path) -> dict[str, int]:
    """What Linux says of memory in lines of `Name: N kB`, in bytes."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].removesuffix(":"): 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}


_GROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""By controller, as versions 2 and 1 of control groups name it: limit, use, and what names in memory.stat begin with."""


def _groups() -> Iterator[tuple[int, int]]:
    """(limit, use without pages of files) in bytes of every control group above this process that has a limit."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _GROUP_FILES.keys() & set(controllers.split(",")):
            folder = _CONTROL_GROUPS / controller
            inside = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(inside) + 1):
                # Not a number: no limit. Not there: this process sees another part of the tree.
                with suppress(OSError, ValueError):
                    yield _limit_and_use(folder.joinpath(*inside[:depth]), *_GROUP_FILES[controller])


def _limit_and_use(group: Path, limit: str, use: str, prefix: str) -> tuple[int, int]:
    most, usage = (int((group / name).read_text(encoding="ascii")) for name in (limit, use))
    lines = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    stat = {name: int(value) for name, value in lines}
    return most, max(0, usage - stat.get(f"{prefix}active_file", 0) - stat.get(f"{prefix}inactive_file", 0))


def require_memory(count: float, what: str, remedy: str) -> None:
    """Refuse more host memory than `available_memory`, in a sentence that begins with `what` and ends with `remedy`."""
    if count > (free := available_memory()):
        raise InputError(f"{what} would take {count / 2**30:,.1f} GiB, and {free / 2**30:,.1f} are free; {remedy}")


def peak_memory() -> int:
    """Bytes of memory that this process had at most, at a time."""
    with suppress(OSError, ValueError, KeyError):
        return _kibibytes(_STATUS)["VmHWM"]
    # Until this process has had more, the maximum is its parent's.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def mapped_memory(files: Iterable[Path]) -> int:
    """Resident bytes of mapped files, which the system can drop and reread; 0 where the system does not say."""
    names, total, inside = {str(path.resolve()) for path in files}, 0, False
    with suppress(OSError, ValueError):
        for line in _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split(None, 5)
            if not words[0].endswith(":"):
                inside = len(words) == 6 and words[5] in names
            elif inside and words[0] == "Rss:":
                total += 1024 * int(words[1])
    return total


def forget_pages(address: int, nbytes: int) -> None:
    """Drop resident pages of a mapped file that lie whole in this range and were not written to; they can be read again."""
    _advise(address, nbytes, mmap.PAGESIZE, "MADV_DONTNEED")


def hand_back() -> None:
    """Make glibc's malloc return unused memory to the system; takes some milliseconds.

    Blocks of some megabytes that come and go beside small ones that stay leave gaps, which grow to twice what is in use.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep what is freed until `hand_back`; blocks beyond 32 MiB still come from the system each time.

    By default it returns blocks of some megabytes when they are freed: every op's result then begins with page faults.
    """
    if option := getattr(ctypes.CDLL(None), "mallopt", None):
        option(_MMAP_THRESHOLD, 32 * 2**20)  # the most that it accepts
        option(_TRIM_THRESHOLD, 2**30)


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Ask the system for large pages (`madvise`) in a range that is not written to yet; only whole large pages inside it.

    What is read once a step from end to end then needs no page-table walk for each 4 KB.
    """
    _advise(address, nbytes, LARGE_PAGE, "MADV_HUGEPAGE")


def _advise(address: int, nbytes: int, page: int, advice_name: str) -> None:
    """`madvise` of the whole pages in a range; nothing where the system has no such advice."""
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if begin < end and (advice := getattr(mmap, advice_name, None)) is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
