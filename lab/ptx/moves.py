"""Moves between registers, packing and unpacking them, and addresses of arrays."""

from __future__ import annotations

import numpy as np

from lab.ptx.state import UNSIGNED, Lanes, Run, bits_of, destination, reader
from lab.ptx.syntax import Instruction, Register, Unknown, Vector


def _parts(vector: Vector) -> list[int]:
    bits = [item.bits for item in vector.items if isinstance(item, Register)]
    if not bits or len(set(bits)) != 1:
        raise Unknown(f"{vector} in a move")
    return bits


def move(ins: Instruction) -> Run:
    """`mov` of a value, of the address of an array, and of one register into several or back."""
    kind = ins.modifiers[-1]
    to, of = ins.operands
    if isinstance(of, Vector):
        each = _parts(of)[0]
        place, reads = destination(to, each * len(of.items)), [reader(item, f"b{each}") for item in of.items]

        def pack(s: Lanes) -> None:
            values = np.stack([np.broadcast_to(read(s), s.count) for read in reads], -1)
            s.write(place, values.view(UNSIGNED[each * len(reads)])[:, 0])

        return pack
    if isinstance(to, Vector):
        each, places = _parts(to)[0], [destination(item) for item in to.items]
        read = reader(of, f"b{each * len(places)}")

        def unpack(s: Lanes) -> None:
            values = np.broadcast_to(read(s), s.count).copy().view(UNSIGNED[each]).reshape(s.count, -1)
            for place, value in zip(places, values.T, strict=True):
                if place is not None:
                    s.write(place, np.ascontiguousarray(value))

        return unpack
    place, read = destination(to, bits_of(kind)), reader(of, kind)
    return lambda s: s.write(place, read(s))


def to_address(ins: Instruction) -> Run:
    """`cvta.to.global`: an address in global memory is the generic one."""
    if ins.modifiers != ("to", "global", "u64"):
        raise Unknown(ins.name)
    place, read = destination(ins.operands[0], 64), reader(ins.operands[1], "u64")
    return lambda s: s.write(place, read(s))
