"""The threads that run together: their registers, which of them are active, and how operands are read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.ptx.memory import Fault, Memory
from lab.ptx.syntax import Entry, Nowhere, Number, Operand, Register, Special, Symbol, Unknown

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
DTYPES: dict[str, Any] = {
    "pred": np.bool_, "f16": np.float16, "f32": np.float32, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32,
    "tf32": np.uint32, "s16x2": np.uint32, "u16x2": np.uint32,
    **{f"{kind}{bits}": UNSIGNED[bits] for kind in "bu" for bits in (8, 16, 32, 64)},
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
}  # fmt: skip
POISON = {8: 0xFF, 16: 0xFFFF, 32: 0xFFFFFFFF, 64: 0xFFFFFFFFFFFFFFFF}
"""What was never written: NaN in every float type, far outside every region as an address."""

Read = Callable[["Lanes"], np.ndarray]
Run = Callable[["Lanes"], None]


def bit_width(kind: str) -> int:
    """Of a type such as `s32` or `f16x2`."""
    return 1 if kind == "pred" else 8 * np.dtype(DTYPES[kind]).itemsize


@dataclass
class Lanes:
    """All threads of the programs that run together, thread after thread, program after program.

    Attributes:
        count, block, programs: threads, threads a program, programs.
        regs: a register of all threads, [count] of the unsigned integer of its width.
        live: [count] bool, which threads have not returned.
        mask: [count] bool, whose registers the instruction at hand writes; None for all that live.
        special: [count] uint32 or uint64 by name.
        shared: [programs * shared_stride] uint8.
        local: [count, bytes of a thread's own memory] uint8.
        clock: instructions so far.
        races, copies, products: who wrote what, and what asynchronous copies and products have yet to do.
    """

    count: int
    block: int
    programs: int
    memory: Memory
    regs: list[np.ndarray]
    special: dict[str, np.ndarray]
    symbols: dict[str, tuple[str, int]]
    params: np.ndarray
    shared: np.ndarray
    shared_stride: int
    shared_end: int
    local: np.ndarray
    live: np.ndarray
    mask: np.ndarray | None = None
    clock: int = 0
    races: Any = None
    copies: Any = None
    products: Any = None
    _lanes: np.ndarray | None = None

    def activate(self, mask: np.ndarray | None) -> None:
        """Choose the active threads; None for all that live."""
        self.mask, self._lanes = mask, None

    @property
    def lanes(self) -> np.ndarray:
        """[n], the active threads."""
        if self._lanes is None:
            self._lanes = np.flatnonzero(self.live if self.mask is None else self.mask)
        return self._lanes

    def write(self, index: int, value: np.ndarray) -> None:
        """Set a register of the active threads, value [count] or [1] of any type of its width."""
        old = self.regs[index]
        value = value.view(old.dtype)
        if self.mask is not None:
            self.regs[index] = np.where(self.mask, value, old)
        elif len(value) == self.count:
            self.regs[index] = value
        else:
            self.regs[index] = np.full(self.count, value[0], old.dtype)

    def write_some(self, index: int, value: np.ndarray) -> None:
        """Set a register of the active threads, value [active]."""
        old = self.regs[index]
        value = value.view(old.dtype)
        if len(value) == self.count:
            self.regs[index] = value
        else:
            new = old.copy()
            new[self.lanes] = value
            self.regs[index] = new

    def whole_warps(self, what: str) -> np.ndarray | None:
        """[n] the warps that are active, None for all.

        Raises:
            Fault: one is active in part.
        """
        if len(self.lanes) == self.count:
            return None
        active = np.zeros(self.count, np.bool_)
        active[self.lanes] = True
        counts = active.reshape(-1, 32).sum(1)
        if ((counts != 0) & (counts != 32)).any():
            warp = int(np.flatnonzero((counts != 0) & (counts != 32))[0])
            raise Fault(f"{what} by {counts[warp]} threads of a warp", warp * 32 + int(np.argmax(active[warp * 32 :])))
        return np.flatnonzero(counts)


def specials(block: tuple[int, int, int], grid: tuple[int, int, int], programs: np.ndarray) -> dict[str, np.ndarray]:
    """Special registers of the threads of programs [n] (numbers within the grid, x first)."""
    threads = block[0] * block[1] * block[2]
    thread = np.tile(np.arange(threads), len(programs))
    program = np.repeat(programs, threads)
    registers: dict[str, np.ndarray] = {}
    for axis, before in (("x", 1), ("y", block[0]), ("z", block[0] * block[1])):
        registers[f"%tid.{axis}"] = thread // before % block["xyz".index(axis)]
        registers[f"%ntid.{axis}"] = np.full(len(thread), block["xyz".index(axis)])
    for axis, before in (("x", 1), ("y", grid[0]), ("z", grid[0] * grid[1])):
        registers[f"%ctaid.{axis}"] = program // before % grid["xyz".index(axis)]
        registers[f"%nctaid.{axis}"] = np.full(len(thread), grid["xyz".index(axis)])
    return {name: value.astype(np.uint32) for name, value in registers.items()}


def constant(number: Number, kind: str) -> np.ndarray:
    """[1] of an immediate as a type."""
    bits = bit_width(kind)
    if number.is_float:
        if bits != 32:
            raise Unknown(f"a float of 32 bits as {kind}")
        return np.array([number.value], np.uint32).view(DTYPES[kind])
    if kind == "pred":
        return np.array([number.value != 0])
    if kind == "f32":
        return np.array([number.value], np.float32)
    return np.array([number.value % (1 << bits)], UNSIGNED[bits]).view(DTYPES[kind])


def reader(operand: Operand, kind: str) -> Read:
    """Reads an operand as a type: [count] or [1]. A wider register gives its low bits."""
    dtype, bits = DTYPES[kind], bit_width(kind)
    if isinstance(operand, Register):
        index = operand.index
        if operand.bits == bits:
            if kind == "pred" or dtype == UNSIGNED[bits]:
                return lambda s: s.regs[index]
            return lambda s: s.regs[index].view(dtype)
        if operand.bits > bits > 1:
            unsigned = UNSIGNED[bits]
            return lambda s: s.regs[index].astype(unsigned).view(dtype)
        raise Unknown(f"a register of {operand.bits} bits as {kind}")
    if isinstance(operand, Number):
        value = constant(operand, kind)
        return lambda s: value
    if isinstance(operand, Special):
        return _special(operand.name, dtype, bits)
    if isinstance(operand, Symbol):
        name = operand.name
        return lambda s: np.array([s.symbols[name][1]], UNSIGNED[bits]).view(dtype)
    raise Unknown(f"the operand {operand}")


def _special(name: str, dtype: Any, bits: int) -> Read:
    def read(s: Lanes) -> np.ndarray:
        if name not in s.special:
            raise Unknown(f"the register {name}")
        return s.special[name].astype(UNSIGNED[bits]).view(dtype)

    return read


def destination(operand: Operand, bits: int | None = None) -> int | None:
    """The place of the register that an instruction writes; None for `_`."""
    if isinstance(operand, Nowhere):
        return None
    if not isinstance(operand, Register) or (bits is not None and operand.bits != bits):
        raise Unknown(f"{operand} where a register of {bits} bits is written")
    return operand.index


def fresh(entry: Entry, count: int) -> list[np.ndarray]:
    """Registers of threads that have written none of them."""
    return [np.zeros(count, np.bool_) if bits == 1 else np.full(count, POISON[bits], UNSIGNED[bits]) for bits in entry.bits]
