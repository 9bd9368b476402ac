"""What of this process was asked to lie on large pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_large_pages = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(encoding="ascii"), reason="no large pages on this machine"
)


def asks_for_large_pages(tensor: Tensor) -> bool:
    """Whether the middle of its memory has the flag `hg`; whether the system had such pages to give is up to the hour."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= middle < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping holds it")
