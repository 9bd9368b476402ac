"""Copies from global to shared memory that a thread does not wait for, and atomic operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.ptx.access import active, address_reader, read_global, require_hints, shared_offset
from lab.ptx.access import split_by_window as windows
from lab.ptx.floats import FLOATS
from lab.ptx.memory import Fault, gather, scatter
from lab.ptx.state import DTYPES, Lanes, Run, bit_width, destination, reader
from lab.ptx.syntax import Instruction, Number, Unknown


@dataclass
class _Copy:
    lanes: np.ndarray
    group: np.ndarray  # which of a thread's groups it belongs to
    to: np.ndarray  # offsets in shared memory
    source: np.ndarray  # addresses
    size: np.ndarray  # bytes to read; the rest of `width` becomes 0
    width: int

    def part(self, which: np.ndarray) -> _Copy:
        return _Copy(*(x[which] for x in (self.lanes, self.group, self.to, self.source, self.size)), self.width)


class Copies:
    """Copies under way. They land as late as the waits allow: at the one that asks for their group."""

    def __init__(self, count: int) -> None:
        self.committed = np.zeros(count, np.int64)
        self.pending: list[_Copy] = []

    def land(self, s: Lanes, groups: int) -> None:
        """Finish the active threads' copies but for their last `groups` groups."""
        limit = np.full(s.count, -1)
        limit[s.lanes] = self.committed[s.lanes] - groups
        left = []
        for copy in self.pending:
            now = copy.group < limit[copy.lanes]
            if now.any():
                _finish(s, copy if now.all() else copy.part(now))
            if not now.all():
                left.append(copy.part(~now))
        self.pending = left


def _finish(s: Lanes, copy: _Copy) -> None:
    values = np.zeros((len(copy.lanes), copy.width), np.uint8)
    for size in np.unique(copy.size).tolist():
        if size:
            these = np.flatnonzero(copy.size == size)
            if size & (size - 1):
                raise Fault(f"a copy of {size} bytes", int(copy.lanes[these[0]]))
            values[these, :size] = read_global(s, copy.lanes[these], copy.source[these], size)
    s.races.shared_write(s, copy.lanes, copy.to, values, copy.width)
    scatter(s.shared, copy.to, values)


def copy_async(ins: Instruction) -> Run:
    """`cp.async` and what waits for it."""
    if ins.modifiers == ("async", "commit_group"):

        def commit(s: Lanes) -> None:
            s.copies.committed[s.lanes] += 1

        return commit
    if ins.modifiers == ("async", "wait_group"):
        groups = ins.operands[0]
        assert isinstance(groups, Number)
        return lambda s: s.copies.land(s, groups.value)
    require_hints(ins, {"async"})
    if not {"global", "shared", "shared__cta"} & set(ins.modifiers) or len(ins.operands) not in (3, 4):
        raise Unknown(ins.name)
    to, source = (address_reader(operand) for operand in ins.operands[:2])
    width = ins.operands[2]
    assert isinstance(width, Number)
    size = reader(ins.operands[3], "u32") if len(ins.operands) == 4 else None

    def run(s: Lanes) -> None:
        lanes = s.lanes
        if not len(lanes):
            return
        sizes = active(s, size(s)).astype(np.int64) if size else np.full(len(lanes), width.value)
        address, at = active(s, source(s)), shared_offset(s, lanes, active(s, to(s)), width.value)
        if (sizes > width.value).any():
            raise Fault(f"a copy reads more than its {width.value} bytes", int(lanes[np.argmax(sizes > width.value)]))
        if len(reads := np.flatnonzero(sizes)):
            windows(s, lanes[reads], address[reads], width.value)
        # The copy may write from now on, whenever it lands.
        s.races.shared_write(s, lanes, at, None, width.value)
        s.copies.pending.append(_Copy(lanes, s.copies.committed[lanes], at, address, sizes, width.value))

    return run


# -- Atomic operations --------------------------------------------------------------------------------------------------
_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {"add": lambda old, x: old + x, "min": min}
_ORDERS = {"acq_rel", "gpu"}


def atomic(ins: Instruction) -> Run:
    """`atom` on global memory, thread after thread."""
    kind, names = ins.modifiers[-1], [name for name in ins.modifiers if name in _ATOMIC]
    require_hints(ins, {kind, *names} | _ORDERS)
    if len(names) != 1 or kind not in DTYPES or kind in FLOATS or "global" not in ins.modifiers:
        raise Unknown(ins.name)
    target = destination(ins.operands[0], bit_width(kind))
    address, value = address_reader(ins.operands[1]), reader(ins.operands[2], kind)
    function, width, orders = _ATOMIC[names[0]], bit_width(kind) // 8, set(ins.modifiers)

    def run(s: Lanes) -> None:
        lanes = s.lanes
        if not len(lanes):
            return
        where, operands = active(s, address(s)), active(s, value(s))
        result = np.zeros(len(lanes), DTYPES[kind])
        for place, lane in enumerate(lanes.tolist()):
            ((window, _, offset),) = windows(s, np.array([lane]), where[place : place + 1], width)
            s.races.atomic(s, lane, window, int(offset[0]), orders)
            old = gather(window.data, offset, width).view(DTYPES[kind])[0, 0]
            scatter(window.data, offset, np.array([[function(old, operands[place])]], DTYPES[kind]).view(np.uint8))
            result[place] = old
        if target is not None:
            s.write_some(target, result)

    return run
