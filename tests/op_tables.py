"""The op tables that must do what the reference does, and where each can run; tests take every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from models.qwen3_14b.layer import Ops
from tq_ops.cpu import library
from tq_ops.cpu.build import compiler
from tq_ops.cpu.ops import CpuOps


@dataclass(frozen=True)
class OpTable:
    """One table to test.

    Attributes:
        name: of the test.
        device: where its tensors live.
        open: the table, or a skip with the reason why it cannot run here.
    """

    name: str
    device: str
    open: Callable[[], Ops]


def _cpu(level: str) -> Callable[[], Ops]:
    def open_level() -> Ops:
        # With a compiler the package builds the kernels as it is installed: then their absence is a failure.
        if compiler() is None:
            pytest.skip("no C++ compiler, so no CPU kernels")
        if level not in library.levels():
            pytest.skip(f"this CPU has no {level}")
        return CpuOps(level)

    return open_level


TABLES = tuple(OpTable(f"cpu-{level}", "cpu", _cpu(level)) for level in library.LEVELS)
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
