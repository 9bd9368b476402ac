"""Which part executes which opcode."""

from __future__ import annotations

from collections.abc import Callable

from lab.ptx import access, copies, floats, integers, matrix, moves, warpgroup, warps
from lab.ptx.memory import Fault
from lab.ptx.state import Lanes, Run
from lab.ptx.syntax import Instruction, Unknown

CONTROL = ("bra", "ret", "exit", "bar", "barrier")
"""What the run itself executes."""
_FLOATS = ("ex2", "sqrt", "rsqrt", "fma", "abs")
_EITHER = ("add", "sub", "mul", "div", "min", "max", "neg")
_INTEGERS = ("mad", "rem", "and", "or", "xor", "not", "shl", "shr", "prmt", "bfe", "bfi", "popc", "brev", "bfind")


def _fence(ins: Instruction) -> Run:
    """`fence` and `membar`: what an atomic operation afterwards, or an asynchronous product, makes visible."""
    if ins.name == "fence.proxy.async.shared__cta":

        def proxy(s: Lanes) -> None:
            s.races.proxy_fenced[s.lanes] = s.clock

        return proxy
    if ins.name not in ("membar.gl", "fence.acq_rel.gpu"):
        raise Unknown(ins.name)

    def run(s: Lanes) -> None:
        s.races.fenced[s.lanes] = s.clock

    return run


def _prefetch(ins: Instruction) -> Run:
    """It changes no value."""
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
    "cp": copies.copy_async, "atom": copies.atomic,
    "mma": matrix.multiply, "ldmatrix": matrix.load_matrix, "stmatrix": matrix.store_matrix, "movmatrix": matrix.move_matrix,
    "wgmma": warpgroup.warpgroup, "shfl": warps.shuffle, "redux": warps.reduce, "vote": warps.vote,
    "fence": _fence, "membar": _fence, "trap": _trap,
    "prefetch": _prefetch,
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
