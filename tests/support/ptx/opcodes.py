"""Which part executes which opcode."""

from __future__ import annotations

from collections.abc import Callable

from ptx import access, copies, floats, integers, matrix, moves, warpgroup, warps
from ptx.memory import Fault
from ptx.state import Lanes, Run
from ptx.syntax import Instruction, Unknown

CONTROL = ("bra", "ret", "exit", "bar", "barrier")
"""What the run itself executes."""
_FLOATS = ("ex2", "rcp", "sqrt", "rsqrt", "fma")
_EITHER = ("add", "sub", "mul", "mad", "div", "min", "max", "neg", "abs")
_INTEGERS = (
    "rem", "and", "or", "xor", "not", "shl", "shr", "shf", "lop3", "prmt", "bfe", "bfi", "popc", "clz", "brev", "bfind",
)  # fmt: skip


def _fence(ins: Instruction) -> Run:
    """`fence` and `membar`: what an atomic operation afterwards makes visible."""
    if ins.opcode == "fence" and ins.modifiers[0] == "proxy":
        if ins.modifiers[1:] not in (("async",), ("async", "shared__cta"), ("async__shared", "cta")):
            raise Unknown(ins.name)

        def proxy(s: Lanes) -> None:
            s.races.proxy_fenced[s.lanes] = s.clock

        return proxy
    if unknown := set(ins.modifiers) - {"gl", "sys", "cta", "gpu", "acq_rel", "sc", "cluster"}:
        raise Unknown(f"{ins.name}: {unknown}")
    if {"cta", "cluster"} & set(ins.modifiers):
        return lambda s: None

    def run(s: Lanes) -> None:
        s.races.fenced[s.lanes] = s.clock

    return run


def _nothing(ins: Instruction) -> Run:
    """What changes no value: prefetching and sleeping."""
    return lambda s: None


def _trap(ins: Instruction) -> Run:
    def run(s: Lanes) -> None:
        if len(s.lanes):
            raise Fault("a trap", int(s.lanes[0]))

    return run


_BUILDERS: dict[str, Callable[[Instruction], Run]] = {
    **dict.fromkeys(_FLOATS, floats.build),
    **dict.fromkeys(_INTEGERS, integers.build),
    "setp": integers.set_predicate, "selp": integers.select, "mov": moves.move, "cvta": moves.to_address,
    "cvt": floats.convert, "ld": access.load, "st": access.store,
    "cp": copies.copy_async, "atom": copies.atomic, "red": copies.atomic,
    "mma": matrix.multiply, "ldmatrix": matrix.load_matrix, "stmatrix": matrix.store_matrix, "movmatrix": matrix.move_matrix,
    "wgmma": warpgroup.warpgroup, "shfl": warps.shuffle, "redux": warps.reduce, "vote": warps.vote,
    "fence": _fence, "membar": _fence, "trap": _trap,
    "prefetch": _nothing, "nanosleep": _nothing,
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
