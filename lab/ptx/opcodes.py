"""Which part executes which opcode; what needs no part of its own: moves, fences, traps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lab.ptx import access, copies, floats, integers, matrix, warpgroup, warps
from lab.ptx.memory import Fault
from lab.ptx.state import UNSIGNED, Lanes, Run, bit_width, destination, reader
from lab.ptx.syntax import Instruction, Register, Unknown, Vector

CONTROL = ("bra", "ret", "exit", "bar", "barrier")
"""What the run itself executes."""
_FLOATS = ("ex2", "sqrt", "rsqrt", "fma", "abs")
_EITHER = ("add", "sub", "mul", "div", "min", "max", "neg")
_INTEGERS = ("mad", "rem", "and", "or", "xor", "not", "shl", "shr", "prmt", "bfe", "bfi", "popc", "brev", "bfind")


def _parts(vector: Vector) -> list[int]:
    bits = [item.bits for item in vector.items if isinstance(item, Register)]
    if not bits or len(set(bits)) != 1:
        raise Unknown(f"{vector} in a move")
    return bits


def _move(ins: Instruction) -> Run:
    """`mov` of a value, of the address of an array, and of one register into several or back."""
    kind = ins.modifiers[-1]
    to, source = ins.operands
    if isinstance(source, Vector):
        each = _parts(source)[0]
        place, reads = destination(to, each * len(source.items)), [reader(item, f"b{each}") for item in source.items]

        def pack(s: Lanes) -> None:
            values = np.stack([np.broadcast_to(read(s), s.count) for read in reads], -1)
            s.write(place, values.view(UNSIGNED[each * len(reads)])[:, 0])

        return pack
    if isinstance(to, Vector):
        each, places = _parts(to)[0], [destination(item) for item in to.items]
        read = reader(source, f"b{each * len(places)}")

        def unpack(s: Lanes) -> None:
            values = np.broadcast_to(read(s), s.count).copy().view(UNSIGNED[each]).reshape(s.count, -1)
            for place, value in zip(places, values.T, strict=True):
                if place is not None:
                    s.write(place, np.ascontiguousarray(value))

        return unpack
    place, read = destination(to, bit_width(kind)), reader(source, kind)
    return lambda s: s.write(place, read(s))


def _to_address(ins: Instruction) -> Run:
    """`cvta.to.global`: an address in global memory is the generic one."""
    if ins.modifiers != ("to", "global", "u64"):
        raise Unknown(ins.name)
    place, read = destination(ins.operands[0], 64), reader(ins.operands[1], "u64")
    return lambda s: s.write(place, read(s))


def _fence(ins: Instruction) -> Run:
    """`fence` and `membar`: what an atomic operation afterwards, or an asynchronous product, makes visible."""
    if ins.name == "fence.proxy.async.shared__cta":

        def proxy(s: Lanes) -> None:
            s.races.proxy_fence_time[s.lanes] = s.clock

        return proxy
    if ins.name not in ("membar.gl", "fence.acq_rel.gpu"):
        raise Unknown(ins.name)

    def run(s: Lanes) -> None:
        s.races.fence_time[s.lanes] = s.clock

    return run


def _trap(ins: Instruction) -> Run:
    def run(s: Lanes) -> None:
        if len(s.lanes):
            raise Fault("a trap", int(s.lanes[0]))

    return run


_BUILDERS: dict[str, Callable[[Instruction], Run]] = {
    **dict.fromkeys(_FLOATS, floats.build),
    **dict.fromkeys(_INTEGERS, integers.build),
    "setp": integers.set_predicate, "selp": integers.select, "mov": _move, "cvta": _to_address,
    "cvt": floats.convert, "ld": access.load, "st": access.store,
    "cp": copies.copy_async, "atom": copies.atomic,
    "mma": matrix.multiply, "ldmatrix": matrix.load_matrix, "stmatrix": matrix.store_matrix, "movmatrix": matrix.move_matrix,
    "wgmma": warpgroup.warpgroup, "shfl": warps.shuffle, "redux": warps.reduce, "vote": warps.vote,
    "fence": _fence, "membar": _fence, "trap": _trap,
    "prefetch": lambda ins: lambda s: None,
}  # fmt: skip


def build(ins: Instruction) -> Run | None:
    """What an instruction does to the active threads; None for control.

    Raises:
        Unknown: it is not known here.
    """
    if ins.opcode in CONTROL:
        return None
    try:
        if ins.opcode in _EITHER:
            return (floats if ins.modifiers[-1] in floats.FLOATS else integers).build(ins)
        if ins.opcode.startswith("tcgen05"):
            raise Unknown("products in the tensor memory of sm_100 are not executed here")
        if ins.opcode not in _BUILDERS:
            raise Unknown("the opcode is not known")
        return _BUILDERS[ins.opcode](ins)
    except Unknown as error:
        raise Unknown(f"line {ins.line}: {ins.name}: {error}") from None
