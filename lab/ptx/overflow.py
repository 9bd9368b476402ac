"""Sums and products in int32 that wrap on their way to an address.

Which instructions those are is found in the text: whatever reaches an address of global memory through sums, products, shifts
to the left, moves, conversions and choices. Masks and shifts to the right end the way: what wraps before them is a trick.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lab.ptx.memory import Fault
from lab.ptx.state import Lanes, Read, Run, reader
from lab.ptx.syntax import Address, Instruction, Operand, Pair, Register, Vector

_PASSED = {"add", "sub", "mul", "mad", "shl", "mov", "cvt", "cvta", "selp", "min", "max", "or", "neg"}
_SUMS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "shl": lambda a, b: a << np.minimum(b, 31),
}  # fmt: skip


def _registers(operand: Operand) -> list[int]:
    if isinstance(operand, Register):
        return [operand.index]
    if isinstance(operand, Address):
        return _registers(operand.base)
    if isinstance(operand, Vector):
        return [index for item in operand.items for index in _registers(item)]
    if isinstance(operand, Pair):
        return [*_registers(operand.first), *_registers(operand.second)]
    return []


def feeding_addresses(code: list[Instruction]) -> set[int]:
    """The registers from which addresses of global memory are reckoned."""
    found: set[int] = set()
    for ins in code:
        if ins.opcode in ("ld", "st", "cp", "atom") and "global" in ins.modifiers:
            addresses = [operand for operand in ins.operands if isinstance(operand, Address)]
            found.update(_registers(addresses[-1]))
    sources: dict[int, set[int]] = {}
    for ins in code:
        if ins.opcode in _PASSED and ins.operands:
            of = {index for operand in ins.operands[1:] for index in _registers(operand)}
            for index in _registers(ins.operands[0]):
                sources.setdefault(index, set()).update(of)
    waiting = list(found)
    while waiting:
        for index in sources.get(waiting.pop(), set()) - found:
            found.add(index)
            waiting.append(index)
    return found


def watched(ins: Instruction, feeding: set[int], run: Run) -> Run:
    """The instruction, which fails where it wraps, if it is one that feeds an address."""
    kind, lo = ins.modifiers[-1] if ins.modifiers else "", ins.opcode in ("add", "sub", "shl") or "lo" in ins.modifiers
    if ins.opcode not in _SUMS or not lo or kind not in ("s32", "b32") or not set(_registers(ins.operands[0])) & feeding:
        return run
    reads: list[Read] = [reader(operand, "s32") for operand in ins.operands[1:]]
    exact, limit = _SUMS[ins.opcode], 2**32 if ins.opcode == "shl" else 2**31

    def checked(s: Lanes) -> None:
        wide = np.broadcast_to(exact(*(read(s).astype(np.int64) for read in reads)), s.count)
        wrong = (wide >= limit) | (wide < -(2**31))
        if wrong.any() and (wrong := wrong & (s.live if s.mask is None else s.mask)).any():
            lane = int(np.argmax(wrong))
            raise Fault(f"{int(wide[lane])} does not fit an int32 that feeds an address", lane)
        run(s)

    return checked
