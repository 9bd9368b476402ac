"""Integers, bits, predicates and moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lab.ptx import floats
from lab.ptx.state import DTYPES, UNSIGNED, Lanes, Run, bit_width, destination, reader
from lab.ptx.syntax import Instruction, Pair, Unknown

U8, U32, U64 = np.uint8, np.uint32, np.uint64
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def _shift(opcode: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    bits, dtype = bit_width(kind), DTYPES[kind]

    def run(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        few = np.minimum(by, bits - 1).astype(dtype)
        if opcode == "shl":
            return np.where(by >= bits, dtype(0), a << few)
        return a >> few if kind[0] == "s" else np.where(by >= bits, dtype(0), a >> few)

    return run


def _divide(a: np.ndarray, b: np.ndarray, opcode: str) -> np.ndarray:
    if a.dtype.kind == "u":
        return a // np.maximum(b, 1) if opcode == "div" else a % np.maximum(b, 1)
    safe = np.where(b == 0, 1, b)
    quotient = np.floor_divide(np.abs(a), np.abs(safe)) * (np.sign(a) * np.sign(safe))
    return (quotient if opcode == "div" else a - quotient * safe).astype(a.dtype)


def _multiply(ins: Instruction, kind: str) -> tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """The result's type, and the product of a `mul` or `mad`."""
    form = ins.modifiers[0]
    if form == "wide" and kind not in _WIDER:
        raise Unknown(ins.name)
    if form == "wide":
        wide = _WIDER[kind]
        return wide, lambda a, b: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide])
    if form == "lo":
        return kind, lambda a, b: a * b
    if form == "hi" and kind in _WIDER:
        wide = DTYPES[_WIDER[kind]]
        return kind, lambda a, b: ((a.astype(wide) * b.astype(wide)) >> bit_width(kind)).astype(DTYPES[kind])
    if form == "hi" and kind in ("u64", "s64"):
        return kind, _high_word
    raise Unknown(ins.name)


def _by_halves(function: Callable[[Any, Any], Any], dtype: type) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of both halves of a register."""

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        one, other = (np.ascontiguousarray(np.atleast_1d(x)).view(dtype).reshape(-1, 2) for x in (a, b))
        return np.asarray(function(one, other)).view(U32)[:, 0]

    return run


def _high_word(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 bits of a product of 64-bit integers, in Python's."""
    return ((a.astype(object) * b.astype(object)) >> 64).astype(a.dtype)


def _field(a: np.ndarray, at: np.ndarray, length: np.ndarray, kind: str) -> np.ndarray:
    """`bfe`."""
    bits = bit_width(kind)
    at, length = at & 0xFF, length & 0xFF
    wide = a.astype(np.int64) if kind[0] == "s" else a.view(UNSIGNED[bits]).astype(U64)
    if bits == 64:
        raise Unknown("bfe of 64 bits")
    if kind[0] == "u":
        field = np.where(at < bits, wide >> np.minimum(at, bits - 1).astype(U64), 0)
        keep = (U64(1) << np.minimum(length, bits).astype(U64)) - U64(1)
        return (field.astype(U64) & keep).astype(U32)
    field = wide >> np.minimum(at, 31).astype(np.int64)
    left = np.maximum(64 - length.astype(np.int64), 0)
    fits = (at + length) <= 32  # beyond, the sign already fills what is missing
    narrow = (field << np.where(fits, left, 0)) >> np.where(fits, left, 0)
    return np.where(length == 0, 0, narrow).astype(np.int32)


def _insert(a: np.ndarray, b: np.ndarray, at: np.ndarray, length: np.ndarray, kind: str) -> np.ndarray:
    """`bfi`."""
    bits, at, length = bit_width(kind), at & 0xFF, length & 0xFF
    if bits == 64:
        # A shift of 64 and more is none of a word's.
        ones = np.where(length >= 64, U64(0) - U64(1), (U64(1) << np.minimum(length, 63).astype(U64)) - U64(1))
        keep = np.where(at >= 64, U64(0), ones << np.minimum(at, 63).astype(U64))
        return ((a << np.minimum(at, 63).astype(U64)) & keep) | (b & ~keep)
    keep = ((U64(1) << np.minimum(length, 32).astype(U64)) - U64(1)) << np.minimum(at, 32).astype(U64)
    keep &= U64(0xFFFFFFFF)
    shifted_bits = a.astype(U64) << np.minimum(at, 32).astype(U64)
    return ((shifted_bits & keep) | (b.astype(U64) & ~keep)).astype(U32)


_NIBBLES = np.array([0, 4, 8, 12], U32)


def _permute(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """`prmt`: four bytes of eight, by a nibble each; its top bit gives the byte's sign eight times."""
    if len(select) == 1 and not select[0] & 0x8888:
        octets = np.stack(np.broadcast_arrays(a, b), -1).view(U8)
        places = [int(select[0]) >> shift & 7 for shift in (0, 4, 8, 12)]
        return np.ascontiguousarray(octets[:, places]).view(U32)[:, 0]
    a, b, select = np.broadcast_arrays(a, b, select)
    pool = np.stack([a, b], -1).view(U8).reshape(-1)
    nibbles = (select[:, None] >> _NIBBLES) & U32(15)
    octets = pool[(nibbles & U32(7)) + np.arange(0, len(pool), 8, U32)[:, None]]
    if (select & U32(0x8888)).any():
        octets = np.where(nibbles & U32(8), (octets >> U8(7)) * U8(0xFF), octets)
    return octets.view(U32)[:, 0]


def _leading(a: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    count = np.full(a.shape, bits, U32)
    for place in range(bits):
        count = np.where((a >> a.dtype.type(place)) & a.dtype.type(1), U32(bits - 1 - place), count)
    return count


def _reverse_bits(a: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8).reshape(len(a), -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


def _shape(ins: Instruction) -> tuple[str, list[str], Callable[..., np.ndarray]]:
    """The result's type, the operands' types, and the function."""
    opcode, kind = ins.opcode, ins.modifiers[-1]
    if kind not in DTYPES:
        raise Unknown(ins.name)
    unsigned = f"u{bit_width(kind)}"
    if set(ins.modifiers) & {"sat", "cc"}:
        raise Unknown(ins.name)
    if opcode in _TWO and kind.endswith("x2"):
        return kind, [kind] * 2, _by_halves(_TWO[opcode], DTYPES[kind.removesuffix("x2")])
    if opcode in _TWO:
        return kind, [kind] * 2, _TWO[opcode]
    if opcode in ("shl", "shr"):
        return kind, [kind, "u32"], _shift(opcode, kind)
    if opcode in ("mul", "mad"):
        result, product = _multiply(ins, kind)
        if opcode == "mul":
            return result, [kind] * 2, product
        return result, [kind, kind, result], lambda a, b, c: product(a, b) + c
    if opcode in ("div", "rem"):
        return kind, [kind] * 2, lambda a, b: _divide(a, b, opcode)
    ones: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "not": np.logical_not if kind == "pred" else np.invert, "neg": np.negative, "brev": _reverse_bits,
    }  # fmt: skip
    if opcode in ones:
        return kind, [kind], ones[opcode]
    if opcode == "popc":
        return "u32", [unsigned], lambda a: np.bitwise_count(a).astype(U32)
    if opcode == "bfind" and ins.modifiers[0] == "shiftamt" and kind[0] == "u":
        return "u32", [kind], lambda a: np.where(a == 0, U32(0xFFFFFFFF), _leading(a)).astype(U32)
    if opcode == "bfe":
        return kind, [kind, "u32", "u32"], lambda a, b, c: _field(a, b, c, kind)
    if opcode == "bfi":
        return kind, [kind, kind, "u32", "u32"], lambda a, b, c, d: _insert(a, b, c, d, kind)
    if opcode == "prmt" and len(ins.modifiers) == 1:
        return "b32", ["b32"] * 3, _permute
    raise Unknown(ins.name)


def build(ins: Instruction) -> Run:
    """An instruction on integers or bits, operand by operand."""
    kind, kinds, function = _shape(ins)
    if len(ins.operands) != len(kinds) + 1:
        raise Unknown(f"{ins.name} of {len(ins.operands)} operands")
    target = destination(ins.operands[0], bit_width(kind))
    reads = [reader(operand, each) for operand, each in zip(ins.operands[1:], kinds, strict=True)]
    dtype = DTYPES[kind]
    if len(reads) == 2:
        first, second = reads
        return lambda s: s.write(target, np.asarray(function(first(s), second(s)), dtype))
    return lambda s: s.write(target, np.asarray(function(*(read(s) for read in reads)), dtype))


# -- Predicates ---------------------------------------------------------------------------------------------------------
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_JOIN: dict[str, Callable[[Any, Any], Any]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if kind not in floats.FLOATS:
        return np.not_equal if name == "ne" else _COMPARE[name]
    if kind != "f32":
        raise Unknown(f"setp of {kind}")

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        either = np.isnan(a) | np.isnan(b)
        if name in ("num", "nan"):
            return either if name == "nan" else ~either
        if name.endswith("u"):
            return either | (np.not_equal(a, b) if name == "neu" else _COMPARE[name[:-1]](a, b))
        return ~either & np.not_equal(a, b) if name == "ne" else _COMPARE[name](a, b)

    return run


def set_predicate(ins: Instruction) -> Run:
    """`setp`, with a second result and a second condition where there are."""
    kind, names = ins.modifiers[-1], [name for name in ins.modifiers[:-1] if name != "ftz"]
    if len(names) not in (1, 2):
        raise Unknown(ins.name)
    compare = _comparison(names[0], kind)
    kinds = [kind, kind] + ["pred"] * (len(names) - 1)
    reads = [reader(operand, each) for operand, each in zip(ins.operands[1:], kinds, strict=True)]
    to = ins.operands[0]
    targets = [destination(to.first), destination(to.second)] if isinstance(to, Pair) else [destination(to, 1), None]
    ftz = "ftz" in ins.modifiers

    def run(s: Lanes) -> None:
        values = [read(s) for read in reads]
        if ftz:
            values[:2] = map(floats.flush_denormals, values[:2])
        outcome = compare(*values[:2])
        for target, value in zip(targets, (outcome, ~outcome), strict=True):
            if target is not None:
                s.write(target, _JOIN[names[1]](value, values[2]) if len(names) == 2 else value)

    return run


def select(ins: Instruction) -> Run:
    """`selp`."""
    kind = ins.modifiers[-1]
    target = destination(ins.operands[0], bit_width(kind))
    first, second = (reader(operand, kind) for operand in ins.operands[1:3])
    condition = reader(ins.operands[3], "pred")
    return lambda s: s.write(target, np.where(condition(s), first(s), second(s)))
