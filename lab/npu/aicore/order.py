"""The order in which a device may run a program's tasks: PyPTO's own dependency tables, read.

A program's control flow launches roots, one for each pass through a loop's body; a root consists of tasks, each of which calls
a kernel function. Tasks wait for those that name them as successors. Roots are launched in steps: a step begins when the one
before it has ended, and within a step nothing but the tables holds a task back.
"""

from __future__ import annotations

import re
from csv import reader
from dataclasses import dataclass

_ROOT_BITS = 20  # a task's number within its step: root << 20 | task of the root


@dataclass(frozen=True)
class TaskOrder:
    """One task as the device sees it.

    Attributes:
        step: of the whole run; a barrier stands between two steps.
        root: of the step, in the order in which the control flow launches them.
        scope: the loop's name in the program, as KEYS.
        path: which branch of the loop's body; -1 where the name does not say.
        number: within the step.
        leaf: hash of the kernel function it calls.
        successors: tasks of the same step, by number, that wait for this one.
    """

    step: int
    root: int
    scope: str
    path: int
    number: int
    leaf: int
    successors: tuple[int, ...]


_ROOT_NAME = re.compile(r"#name: TENSOR_(\w+?)(?:_Unroll\d+)?(?:_PATH(\d+))?(?:_hiddenfunc\d+)?_root #hash: (\d+)")

_COLUMNS = ["seqNo", "taskId", "rootIndex", "rootHash", "opmagic", "leafIndex", "leafHash", "coreType", "psgId", "successors"]


def read_order(table: str, control_flow: str) -> list[TaskOrder]:
    """Read PyPTO's table of tasks.

    Args:
        table: `dyn_topo.txt`.
        control_flow: the source of the program's control flow, which names the roots.
    Raises:
        ValueError: the table has other columns, or a root has no name.
    """
    names = {hash_: (name, int(path or -1)) for name, path, hash_ in _ROOT_NAME.findall(control_flow)}
    rows = reader(table.splitlines())
    head = next(rows, [])
    if head != _COLUMNS:
        raise ValueError(f"PyPTO's table of tasks has other columns: {head}")
    tasks = []
    for step, number, _, root_hash, _, _, leaf, _, _, *successors in rows:
        if root_hash not in names:
            raise ValueError(f"PyPTO's control flow does not name root {root_hash}")
        scope, path = names[root_hash]
        waiting = tuple(int(s) for s in successors if s)
        tasks.append(TaskOrder(int(step), int(number) >> _ROOT_BITS, scope, path, int(number), int(leaf), waiting))
    return tasks


@dataclass(frozen=True)
class Root:
    """One pass through a loop's body.

    Attributes:
        place: among all roots of the run, as the control flow launches them.
        tile: how many roots of the program's first scope were launched before, this one included, less one.
        tasks: in the table's order.
    """

    place: int
    tile: int
    step: int
    scope: str
    path: int
    tasks: tuple[TaskOrder, ...]


def roots(tasks: list[TaskOrder]) -> list[Root]:
    """The roots of a run, in the order of their launch."""
    grouped: dict[tuple[int, int], list[TaskOrder]] = {}
    for task in tasks:
        grouped.setdefault((task.step, task.root), []).append(task)
    found: list[Root] = []
    tile = -1
    for place, ((step, _), members) in enumerate(sorted(grouped.items())):
        first = members[0]
        tile += not found or first.scope == found[0].scope
        found.append(Root(place, tile, step, first.scope, first.path, tuple(members)))
    return found
