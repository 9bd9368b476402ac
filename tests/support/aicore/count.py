"""How many instructions the emitted kernel functions issue on the device, by its own headers.

The cost model of PyPTO charges for operations on tiles. The headers of the device turn one such operation into one
instruction, or into a dozen for each row. Here the kernel functions are compiled against pto-isa's headers for the A2 and A3,
with counters in place of the core's intrinsics, and called with the attributes of a schedule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from aicore.build import compile_leaves
from aicore.emission import Emission
from aicore.leaf import Leaf
from aicore.machine import Machine
from aicore.toolchain import Toolchain

_KINDS = ("vector", "copies", "cube", "barriers", "other")  # as `Kind` of count.h


@dataclass(frozen=True)
class Count:
    """Instructions of kernel functions.

    Attributes:
        vector: instructions of the vector pipe.
        repeats: lines of 256 bytes that they work on. A published calibration of the 910B gives one cycle a line to an
            instruction with one source and two to one with two, besides some 30 to begin and end.
        barriers: `pipe_barrier`; the pipe runs dry at each.
        copies: between memories, those into the cube's registers too.
        cube: products.
        other: masks, flags, settings.
    """

    vector: int = 0
    repeats: int = 0
    barriers: int = 0
    copies: int = 0
    cube: int = 0
    other: int = 0

    def __add__(self, more: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))


class CountingToolchain(Toolchain):
    """The same compiler and headers, with counters in place of the core."""

    PRELUDE: ClassVar[str] = "count.h"
    SUPPORT: ClassVar[str] = "count.cpp"

    def command(self, kind: str) -> list[str]:
        return [*(flag for flag in super().command(kind) if flag != "-D__CPU_SIM"), "-D__NPU_ARCH__=2201"]


class _Counter(Machine):
    """A machine whose library counts: what a call returns is what was counted since it began."""

    def counts(self) -> Iterator[tuple[Leaf, Count]]:
        """Run every task once. Yields its leaf and what it issued."""
        library = self._library
        library.count_calls.restype = library.count_repeats.restype = ctypes.c_uint64
        for task in self.schedule.tasks:
            call = self._calls[id(task)]
            self._perform(call)
            calls = {name: library.count_calls(kind) for kind, name in enumerate(_KINDS)}
            yield call.leaf, Count(repeats=library.count_repeats(), **calls)


def count_tasks(
    toolchain: Toolchain, emission: Emission, on_done: Callable[[int, int], None] = lambda _done, _of: None
) -> list[tuple[Leaf, Count]]:
    """What each task of a call issues, in the scheduler's order.

    Args:
        toolchain: of `find_toolchain`.
        on_done: called with the number of sources that are compiled, and of all.
    """
    counting = CountingToolchain(toolchain.compiler, toolchain.pto_isa)
    library: Path = compile_leaves(counting, emission.leaves, on_done)
    return list(_Counter(library, emission.leaves, emission.schedule, emission.arguments).counts())


def total(counts: list[tuple[Leaf, Count]]) -> Count:
    """The sum over tasks."""
    return sum((count for _, count in counts), Count())
