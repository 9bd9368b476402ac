"""What PyPTO's scheduler would start on a device: tasks with their attributes, their order, and where tensors lie.

A program's control flow launches roots, one for each pass through a loop's body; a root consists of tasks, each of which calls
a kernel function. Roots are launched in steps: a step begins when the one before it has ended, and within a step nothing but
the edges holds a task back.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from haarkv.tq_ops.errors import InputError

_FUNCTION = re.compile(r"\]:func (\d+) (\[0\] #predCnt:.*?)\n\]\.$", re.MULTILINE | re.DOTALL)
_EDGES = re.compile(r"^\[([0-9a-f]+)\] #predCnt:[0-9a-f]+ #succList: \[([^\]]*)\](?: #stitch:(.*))?$", re.MULTILINE)
_STITCH_TARGET = re.compile(r"=(\d+)!(\d+)")
_TASK = re.compile(
    r"^  \[\d+\]  #funcHash: (\d+) #funcIndex: (\d+) #taskID:(\d+) .*\n  #invokeAttrs : (.*)\n other attr:(.*)$", re.MULTILINE
)
_OPERAND = re.compile(r"(in|out):@\(rawidx:(\d+) attridx:(\d+)\), ((?:\d+, )*)")
_ADDRESS = re.compile(r"([0-9a-f]+)\(location:")
_SPILL = re.compile(r"#gmStackBase: ([0-9a-f]+) #stackSize: ([0-9a-f]+)")
_INPUT = re.compile(r"InputTensorElement\{(\d+),0x([0-9a-f]+),\d+\}")
_WORKSPACE = re.compile(r"CtrlEvent\{_,Workspace\{range\{0x([0-9a-f]+),0x([0-9a-f]+),")
_SCOPE = re.compile(r'RUid\{(\d+),(\d+),\d+\},RActDup\{name\{"TENSOR_(\w+?)_Unroll')
_TASKS_OF_A_FUNCTION = 20


@dataclass(frozen=True)
class Operand:
    """A tensor of a task.

    Attributes:
        is_write: whether the task writes it.
        address: as the scheduler had it.
        offset, shape, whole: of the piece, and of the tensor that lies there, in elements.
    """

    is_write: bool
    address: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One call of a kernel function.

    Attributes:
        number: the scheduler's, unique within a step.
        leaf: hash of the kernel function; 0 for a task that only joins others.
        attributes: what the kernel function reads by index.
        tensors: addresses to which the attributes' tensor indices refer.
        after: numbers of the tasks of this step that must end before it begins.
    """

    number: int
    leaf: int
    attributes: tuple[int, ...]
    tensors: tuple[int, ...]
    operands: tuple[Operand, ...]
    after: frozenset[int]

    @property
    def function(self) -> int:
        """The root of its step that it belongs to, as the control flow launches them."""
        return self.number >> _TASKS_OF_A_FUNCTION


@dataclass(frozen=True)
class Schedule:
    """All tasks of one call of a program.

    Attributes:
        steps: one after the other; within one, tasks run as their edges allow.
        inputs: addresses of the program's arguments, in order.
        workspace: first and last address of what lies between scopes.
        scopes: the loop's name in the program, as KEYS, by step and root.
    """

    steps: tuple[tuple[Task, ...], ...]
    inputs: tuple[int, ...]
    workspace: tuple[int, int]
    scopes: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def tasks(self) -> Iterator[Task]:
        """All that call a kernel function, step by step."""
        return (task for step in self.steps for task in step if task.leaf)


def read_schedule(text: str) -> Schedule:
    """A schedule from the record of a run.

    Raises:
        InputError: it is not what PyPTO 0.2.0 logs.
    """
    inputs = {int(m[1]): int(m[2], 16) for m in _INPUT.finditer(text)}
    workspace = _WORKSPACE.search(text)
    functions: list[list[tuple[int, str]]] = []
    for match in _FUNCTION.finditer(text):
        if match[1] == "0":
            functions.append([])
        if functions:
            functions[-1].append((int(match[1]), match[2]))
    if not inputs or not workspace or not functions:
        raise InputError("the record of a schedule is not what PyPTO 0.2.0 logs; this pypto is not supported")
    steps = tuple(_step(step) for step in functions)
    scopes = {(int(m[1]), int(m[2])): m[3] for m in _SCOPE.finditer(text)}
    return Schedule(steps, tuple(inputs[i] for i in sorted(inputs)), (int(workspace[1], 16), int(workspace[2], 16)), scopes)


def _step(functions: list[tuple[int, str]]) -> tuple[Task, ...]:
    """The tasks of one step, which names its functions from 0 on."""
    before: dict[int, set[int]] = {}
    for index, text in functions:
        for edge in _EDGES.finditer(text):
            number = _number(index, int(edge[1], 16))
            near = [_number(index, int(name, 16)) for name in edge[2].split(", ") if name]
            far = [_number(int(m[1]), int(m[2])) for m in _STITCH_TARGET.finditer(edge[3] or "")]
            for successor in (*near, *far):
                before.setdefault(successor, set()).add(number)
    indices = {index for index, _ in functions} | {number >> _TASKS_OF_A_FUNCTION for number in before}
    if len(functions) != len(indices) or max(indices) >= len(indices):
        raise InputError("the record of a schedule lacks a function that others name: run the program again")
    return tuple(task for _, text in functions for task in _tasks(text, before))


def _number(function: int, operation: int) -> int:
    return function << _TASKS_OF_A_FUNCTION | operation


def _tasks(text: str, before: dict[int, set[int]]) -> Iterator[Task]:
    if (spill := _SPILL.search(text)) and int(spill[2], 16):
        raise InputError("a kernel function spills to global memory, which cannot be executed here")
    addresses = tuple(int(m[1], 16) for m in _ADDRESS.finditer(text.partition("#rawTensorAddrs:")[2]))
    for match in _TASK.finditer(text):
        attributes, operands = {0: int(match[2])}, []
        for operand in _OPERAND.finditer(match[4]):
            tensor, place = int(operand[2]), int(operand[3])
            values = _numbers(operand[4])
            attributes[place] = tensor
            attributes.update(enumerate(values, place + 1))
            n = len(values) // 4
            offset, shape, whole = values[:n], values[n : 2 * n], values[2 * n : 3 * n]
            operands.append(Operand(operand[1] == "out", addresses[tensor], offset, shape, whole))
        # The list goes on behind the last operand; without operands it begins with the function's index.
        attributes.update(enumerate(_numbers(match[5]), max(attributes) + 1 if operands else 0))
        attribute_values = tuple(attributes[i] for i in range(max(attributes) + 1))
        number = int(match[3])
        yield Task(number, int(match[1]), attribute_values, addresses, tuple(operands), frozenset(before.get(number, ())))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in text.split(", ") if value.strip())


def topological_order(step: tuple[Task, ...], choose: random.Random | None = None) -> Iterator[Task]:
    """The tasks of a step in an order that its edges allow: the scheduler's first, or any by chance.

    Raises:
        ValueError: the edges go round in a circle.
    """
    waiting = {task.number: set(task.after) for task in step}
    by_number = {task.number: task for task in step}
    followers: dict[int, list[int]] = {}
    for task in step:
        for number in task.after:
            followers.setdefault(number, []).append(task.number)
    ready = [number for number, after in waiting.items() if not after]
    done = 0
    while ready:
        number = ready.pop(choose.randrange(len(ready)) if choose else 0)
        done += 1
        yield by_number[number]
        for follower in followers.get(number, ()):
            waiting[follower].discard(number)
            if not waiting[follower]:
                ready.append(follower)
    if done != len(step):
        raise ValueError("the scheduler's edges go round in a circle")


@dataclass(frozen=True)
class Root:
    """One pass through a loop's body.

    Attributes:
        place: among all roots of the run, as the control flow launches them.
        tile: how many roots of the program's first scope were launched before, this one included, less one.
        scope: the loop's name in the program, as KEYS.
    """

    place: int
    tile: int
    step: int
    scope: str
    tasks: tuple[Task, ...]


def roots(schedule: Schedule) -> list[Root]:
    """The roots of a run, in the order of their launch."""
    by_root: dict[tuple[int, int], list[Task]] = {}
    for number, step in enumerate(schedule.steps):
        for task in step:
            by_root.setdefault((number, task.function), []).append(task)
    result: list[Root] = []
    tile = -1
    for place, ((number, root), tasks) in enumerate(sorted(by_root.items())):
        scope = schedule.scopes[number, root]
        tile += not result or scope == result[0].scope
        result.append(Root(place, tile, number, scope, tuple(tasks)))
    return result
