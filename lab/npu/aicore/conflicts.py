"""Accesses to the same bytes that nothing in a schedule puts in order: on a device, either may come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from lab.npu.aicore.schedule import Operand, Schedule, Task, topological_order


@dataclass(frozen=True)
class Conflict:
    """Two tasks of one step that touch the same elements of a tensor, at least one of them writing, in no certain order.

    Attributes:
        first, then: in the order of the program.
        kind: `read after write`, `write after read` or `write after write`: what the program means by that order.
        address: of the tensor.
    """

    first: Task
    then: Task
    kind: str
    address: int


def conflicts(schedule: Schedule) -> Iterator[Conflict]:
    """All conflicts of a schedule.

    Tensors with different addresses are taken for disjoint, and two views of one address for tensors of one element type.
    """
    for step in schedule.steps:
        after = _followers(step)
        accesses_at: dict[int, list[tuple[Task, Operand]]] = {}
        for task in step:
            for operand in dict.fromkeys(task.operands):
                accesses_at.setdefault(operand.address, []).append((task, operand))
        for address, accesses in accesses_at.items():
            pieces = [(task, operand.is_write, _runs(operand)) for task, operand in accesses]
            for writer, _, mine in (piece for piece in pieces if piece[1]):
                for other, both, theirs in pieces:
                    # Two writes meet each other twice.
                    if other is writer or (both and other.number < writer.number) or _disjoint(mine, theirs):
                        continue
                    if not after(writer, other) and not after(other, writer) and _overlap(mine, theirs):
                        yield _conflict(writer, other, both, address)


def _conflict(writer: Task, other: Task, both: bool, address: int) -> Conflict:
    if both:
        return Conflict(writer, other, "write after write", address)
    if writer.number < other.number:
        return Conflict(writer, other, "read after write", address)
    return Conflict(other, writer, "write after read", address)


def _followers(step: tuple[Task, ...]) -> Callable[[Task, Task], bool]:
    """Tells of two tasks whether the second certainly begins after the end of the first."""
    bit = {task.number: i for i, task in enumerate(step)}
    after = dict.fromkeys(bit, 0)
    for task in reversed(list(topological_order(step))):
        for number in task.after:
            after[number] |= after[task.number] | 1 << bit[task.number]
    return lambda one, other: bool(after[one.number] >> bit[other.number] & 1)


Runs = tuple[tuple[int, int], ...]


def _runs(operand: Operand) -> Runs:
    return _pieces(operand.offset, operand.shape, operand.whole)


@cache
def _pieces(offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> Runs:
    """A piece of a tensor as runs of elements that lie side by side, from the first on."""
    begins, length, contiguous = [0], 1, True
    for axis in reversed(range(len(shape))):
        stride = prod(whole[axis + 1 :])
        if contiguous:
            # All within is one run: rows that are whole lie side by side.
            begins, length = [begins[0] + offset[axis] * stride], length * shape[axis]
            contiguous = shape[axis] == whole[axis]
        else:
            begins = [begin + (offset[axis] + i) * stride for i in range(shape[axis]) for begin in begins]
    return tuple((begin, begin + length) for begin in begins)


def _disjoint(ones: Runs, others: Runs) -> bool:
    """Whether one piece ends before the other begins: most do, and it is soon seen."""
    return others[0][0] >= ones[-1][1] or ones[0][0] >= others[-1][1]


def _overlap(ones: Runs, others: Runs) -> bool:
    """Whether two pieces share an element; both are in order."""
    i = j = 0
    while i < len(ones) and j < len(others):
        if ones[i][0] < others[j][1] and others[j][0] < ones[i][1]:
            return True
        if ones[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return False
