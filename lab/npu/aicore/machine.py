"""Executes a schedule on the host: kernel functions from a library, tensors and workspace in one image of the memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lab.npu.aicore.build import load
from lab.npu.aicore.leaf import Leaf
from lab.npu.aicore.schedule import Schedule, Task, topological_order

# Unwritten memory reads as this byte: NaN in every floating-point type.
_UNWRITTEN = 0xFF
# A cube loads whole tiles: rows behind a tensor's end are read, and are in no product.
_PAGE, _GUARD = 4096, 1 << 16
_VALUE_BITS = 63


class MachineError(AssertionError):
    """A task ended the process, left its buffers, or wrote where nothing of the program lies."""


class _FunctionData(ctypes.Structure):
    """What kernel functions read of PyPTO's `DynFuncData`."""

    _fields_ = [
        ("expressions", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("attribute_offsets", ctypes.c_void_p),
        ("expression_values", ctypes.c_void_p), ("tensors", ctypes.c_void_p), ("addresses", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint64), ("tensor_count", ctypes.c_uint64), ("address_count", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64), ("stack", ctypes.c_uint64), ("stack_size", ctypes.c_uint64),
        ("start", ctypes.c_void_p),
    ]  # fmt: skip


class _Parameters(ctypes.Structure):
    """PyPTO's `CoreFuncParam`."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("expressions", ctypes.c_void_p),
        ("task", ctypes.c_uint32), ("context", ctypes.c_void_p),
    ]  # fmt: skip


class _Tensor(ctypes.Structure):
    _fields_ = [("location", ctypes.c_uint32), ("index", ctypes.c_uint32)]


@dataclass
class _Call:
    """A task, ready to be called; keeps the memory alive that its parameters point to."""

    task: Task
    leaf: Leaf
    function: Callable[..., None]
    parameters: _Parameters
    keep_alive: tuple[object, ...] = field(repr=False)


class Image:
    """The device's memory: a copy of every argument and the workspace, with guards between them.

    Args:
        arguments: of the program, in order.
    """

    def __init__(self, schedule: Schedule, arguments: Sequence[Tensor]) -> None:
        sizes = [a.numel() * a.element_size() for a in arguments]
        ranges = [
            *zip(schedule.inputs, sizes, strict=True),
            (schedule.workspace[0], schedule.workspace[1] - schedule.workspace[0]),
        ]
        self._places: list[tuple[int, int, int]] = []  # address then, bytes, offset in the image
        offset = _GUARD
        for address, size in ranges:
            self._places.append((address, size, offset))
            offset += (size + _GUARD + _PAGE - 1) // _PAGE * _PAGE
        # Shared, so that a child process fills it.
        self._memory = mmap.mmap(-1, offset)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._base = self._bytes.data_ptr()
        self._arguments = [a.detach().clone() for a in arguments]

    def reset(self) -> None:
        """Every argument as it was given; everything else unwritten."""
        self._bytes.fill_(_UNWRITTEN)
        for argument, (_, size, offset) in zip(self._arguments, self._places, strict=False):
            self._bytes[offset : offset + size] = argument.view(-1).view(torch.uint8)

    def address(self, then: int) -> int:
        """Where lies now what the scheduler had at an address.

        Raises:
            MachineError: nothing of the program lay there.
        """
        for begin, size, offset in self._places:
            if begin <= then < begin + size:
                return self._base + offset + then - begin
        raise MachineError(f"the schedule names address {then:#x}, where no argument and no workspace lies")

    def read(self) -> list[Tensor]:
        """The arguments as they are now, copied."""
        tensors = []
        for argument, (_, size, offset) in zip(self._arguments, self._places, strict=False):
            tensors.append(self._bytes[offset : offset + size].clone().view(argument.dtype).view(argument.shape))
        return tensors

    def overrun(self) -> bool:
        """Whether a guard between two tensors was written."""
        ends = [(offset + size) for _, size, offset in self._places]
        return any(bool((self._bytes[end : end + _GUARD] != _UNWRITTEN).any()) for end in ends)


class Machine:
    """One core that runs the tasks of a schedule one after the other.

    Args:
        library: of `compile_leaves`, with all leaves of the schedule.
        leaves: those of the program.
        arguments: of the program, in order, with the values that it shall be called with.
    """

    def __init__(self, library: Path, leaves: Iterable[Leaf], schedule: Schedule, arguments: Sequence[Tensor]) -> None:
        self._library = load(library)
        self._leaves = {leaf.hash: leaf for leaf in leaves}
        self.image = Image(schedule, arguments)
        self._calls = {id(task): self._call(task) for task in schedule.tasks}
        self.schedule = schedule
        self._at = mmap.mmap(-1, _PAGE)

    def run(self, choose: random.Random | None = None, skip: Callable[[Task], bool] | None = None) -> list[Tensor]:
        """Run every task once, on the arguments as given.

        Args:
            choose: the order, within what the edges allow, is left to chance; None takes the scheduler's own.
            skip: tasks that are left out, as a bug would.
        Returns:
            all arguments, as they are afterwards.
        Raises:
            MachineError: a task ended the process or wrote where it must not.
        """
        self.image.reset()
        tasks = [
            task
            for step in self.schedule.steps
            for task in topological_order(step, choose)
            if task.leaf and not (skip and skip(task))
        ]
        self._in_child([self._calls[id(task)] for task in tasks])
        if self.image.overrun():
            raise MachineError("bytes behind a tensor were written")
        return self.image.read()

    def call_counts(self) -> Counter[str]:
        """Symbol of a leaf -> how many tasks of the schedule call it."""
        return Counter(call.leaf.symbol for call in self._calls.values())

    def _in_child(self, calls: list[_Call]) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for index, call in enumerate(calls):
                    self._at[:8] = index.to_bytes(8, "little")
                    if not self._perform(call):
                        os._exit(2)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        call = calls[int.from_bytes(self._at[:8], "little")]
        if os.WIFSIGNALED(status):
            why = f"ended with {signal.Signals(os.WTERMSIG(status)).name}"
        else:
            why = "wrote behind its unified buffer" if os.WEXITSTATUS(status) == 2 else "could not be called"
        raise MachineError(f"{call.leaf.file} (task {call.task.number}) {why}")

    def _perform(self, call: _Call) -> bool:
        """Call a kernel function in freshly poisoned buffers. Returns whether it stayed within them."""
        self._library.machine_fill(_UNWRITTEN)
        call.function(ctypes.byref(call.parameters), ctypes.c_int64(0), None, None)
        return not self._library.machine_overran(_UNWRITTEN)

    def _call(self, task: Task) -> _Call:
        leaf = self._leaves[task.leaf]
        count = len(task.tensors)
        addresses = (ctypes.c_uint64 * count)(*(self.image.address(a) for a in task.tensors))
        tensors = (_Tensor * count)(*(_Tensor(1, i) for i in range(count)))
        # A value with its highest bit set would be taken for the index of an expression: it is handed over as one.
        values: list[int] = []
        expressions: list[int] = []
        for value in task.attributes:
            if value >> _VALUE_BITS:
                values.append(1 << _VALUE_BITS | len(expressions))
                expressions.append(value)
            else:
                values.append(value)
        attributes = (ctypes.c_uint64 * len(values))(*values)
        table = (ctypes.c_uint64 * max(len(expressions), 1))(*expressions)
        data = _FunctionData()
        data.tensors, data.addresses = ctypes.addressof(tensors), ctypes.addressof(addresses)
        parameters = _Parameters(
            ctypes.addressof(data), ctypes.addressof(attributes), ctypes.addressof(table), task.number, None
        )
        function = getattr(self._library, leaf.symbol)
        function.restype = None
        return _Call(task, leaf, function, parameters, (addresses, tensors, attributes, table, data))
