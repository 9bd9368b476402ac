"""What of this process lies on large pages."""

from __future__ import annotations

from pathlib import Path

import pytest

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_large_pages = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(encoding="ascii"), reason="no large pages on this machine"
)


def on_large_pages() -> int:
    """Bytes of this process that lie on large pages."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.split("AnonHugePages:")[1].split()[0]) * 1024
