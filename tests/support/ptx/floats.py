"""Floating point: types that NumPy lacks, rounding, flushing of denormal numbers, and conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.memory import Fault
from ptx.state import DTYPES, UNSIGNED, Lanes, Run, bits_of, destination, reader
from ptx.syntax import Instruction, Unknown

FLOATS = ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2")


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """[...] uint16 to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """[...] float32 to uint16, to nearest, ties to even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), nearest.astype(np.uint16))


def halves(bits: np.ndarray) -> np.ndarray:
    """[n] uint32 to [n, 2] uint16, the low half first."""
    return np.ascontiguousarray(bits).view(np.uint16).reshape(-1, 2)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two [n] of 16 bits to [n] uint32."""
    return np.stack(np.broadcast_arrays(low.view(np.uint16), high.view(np.uint16)), -1).view(np.uint32)[..., 0]


def flushed(x: np.ndarray) -> np.ndarray:
    """Denormal float32 as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(1.1754943508222875e-38), np.copysign(np.float32(0), x), x)


def widened(x: np.ndarray, kind: str) -> np.ndarray:
    """As a type in which a sum or a product of two is exact enough to be rounded once more: float32 or float64."""
    if kind == "bf16":
        return from_bf16(x)
    if kind in ("f16x2", "bf16x2"):
        return from_bf16(halves(x)) if kind[0] == "b" else halves(x).view(np.float16).astype(np.float32)
    return x.astype(np.float32) if kind == "f16" else x


def narrowed(x: np.ndarray, kind: str) -> np.ndarray:
    """Back to the bits of a type."""
    if kind == "bf16":
        return to_bf16(x)
    if kind in ("f16x2", "bf16x2"):
        pair = to_bf16(x.astype(np.float32)) if kind[0] == "b" else x.astype(np.float16).view(np.uint16)
        return np.ascontiguousarray(pair).view(np.uint32)[:, 0]
    return x.astype(DTYPES[kind])


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    product, wide = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + wide
    part = total - product
    lost = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    odd = even & (lost != 0) & np.isfinite(total) & np.isfinite(lost)
    if odd.any():
        away = (lost > 0) == (total > 0)
        total = np.where(odd, (bits + np.where(away, 1, -1)).view(np.float64), total)
    return total.astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f32":
        return fma32(a, b, c)
    if kind == "f64":
        raise Unknown("fma of f64")
    wide = [widened(x, kind).astype(np.float64) for x in (a, b, c)]
    total = wide[0] * wide[1] + wide[2]
    return narrowed(total.astype(np.float32) if kind[0] == "b" else total, kind)


_PLAIN = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


_APPROXIMATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ex2": np.exp2, "sqrt": np.sqrt, "rcp": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
}  # fmt: skip


def _smaller(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == y) & np.signbit(x), x, np.fmin(x, y))


def _larger(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == y) & ~np.signbit(x), x, np.fmax(x, y))


def function_of(opcode: str, modifiers: tuple[str, ...], kind: str) -> tuple[int, Callable[..., np.ndarray]]:
    """How many operands a float instruction has, and what it does with them.

    Raises:
        Unknown: a rounding mode or an opcode that is not known here.
    """
    if set(modifiers[:-1]) - {"ftz", "rn", "approx", "full", "NaN", "ieee"}:
        raise Unknown(f"{opcode}.{'.'.join(modifiers)}")
    if opcode in _PLAIN:
        plain = _PLAIN[opcode]
        return 2, lambda a, b: narrowed(plain(widened(a, kind), widened(b, kind)), kind)
    if opcode in ("fma", "mad"):
        return 3, lambda a, b, c: fma(a, b, c, kind)
    if opcode in ("min", "max"):
        pick = _smaller if opcode == "min" else _larger
        if "NaN" in modifiers:
            pick = np.minimum if opcode == "min" else np.maximum
        return 2, lambda a, b: narrowed(pick(widened(a, kind), widened(b, kind)), kind)
    if opcode in ("neg", "abs"):
        unsigned, bits = UNSIGNED[bits_of(kind)], bits_of(kind)
        sign = unsigned(0x80008000 if kind.endswith("x2") else 1 << (bits - 1))
        if opcode == "neg":
            return 1, lambda a: (a.view(unsigned) ^ sign).view(a.dtype)
        return 1, lambda a: (a.view(unsigned) & ~sign).view(a.dtype)
    if opcode in _APPROXIMATE:
        one = _APPROXIMATE[opcode]
        return 1, lambda a: narrowed(one(widened(a, kind)), kind)
    raise Unknown(f"{opcode}.{'.'.join(modifiers)}")


def build(ins: Instruction) -> Run:
    """An instruction on floats."""
    kind = ins.modifiers[-1]
    count, function = function_of(ins.opcode, ins.modifiers, kind)
    target = destination(ins.operands[0], bits_of(kind))
    if len(ins.operands) != count + 1:
        raise Unknown(f"{ins.name} of {len(ins.operands)} operands")
    reads = [reader(operand, kind) for operand in ins.operands[1:]]
    ftz = "ftz" in ins.modifiers and kind == "f32"

    def run(s: Lanes) -> None:
        values = [read(s) for read in reads]
        if ftz:
            values = [flushed(value) for value in values]
        if kind.endswith("x2"):
            values = [np.broadcast_to(value, s.count) for value in values]
        result = function(*values)
        if ftz:
            result = flushed(result)
        s.write(target, np.ascontiguousarray(result))

    return run


# -- Conversions --------------------------------------------------------------------------------------------------------
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _integer(x: np.ndarray, kind: str, rounding: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    wide, limits = rounding(x.astype(np.float64)), np.iinfo(DTYPES[kind])
    wide = np.where(np.isnan(wide), 0.0, wide)
    low, high = wide <= limits.min, wide >= limits.max
    whole = np.where(low | high, 0, wide).astype(np.int64 if kind[0] == "s" else np.uint64)
    return np.where(low, limits.min, np.where(high, limits.max, whole)).astype(DTYPES[kind])


def _float(x: np.ndarray, kind: str, modifiers: set[str]) -> np.ndarray:
    """float32 or float64 as a float type."""
    if kind == "tf32":
        bits = x.astype(np.float32).view(np.uint32)
        add = np.uint32(0x1000) if "rna" in modifiers else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        return np.where(np.isfinite(x), (bits + add) & np.uint32(0xFFFFE000), bits)
    if "rna" in modifiers:
        raise Unknown(f"cvt.{'.'.join(modifiers)}")
    if kind == "bf16":
        return to_bf16(x.astype(np.float32))
    return x.astype(DTYPES[kind])


def convert(ins: Instruction) -> Run:
    """`cvt`: of the last two modifiers the first is the result's type."""
    to, of = ins.modifiers[-2:]
    rest = set(ins.modifiers[:-2])
    for kind in (to, of):
        if kind not in DTYPES:
            raise Unknown(f"the type {kind}")
    if unknown := rest - {"rn", "ftz", "rna", *_TO_INTEGER}:
        raise Unknown(f"{unknown}")
    target = ins.operands[0]
    bits = target.bits if hasattr(target, "bits") else 0
    if to in ("f16x2", "bf16x2"):
        return _convert_two(ins, to, rest)
    place, read = destination(target), reader(ins.operands[1], of)
    rounding = next((_TO_INTEGER[name] for name in rest if name in _TO_INTEGER), None)

    def run(s: Lanes) -> None:
        x = read(s)
        x = from_bf16(x) if of == "bf16" else x
        x = flushed(x) if "ftz" in rest and of == "f32" else x
        if to in FLOATS or to == "tf32":
            if of in FLOATS and rounding is not None:
                x = rounding(x)
            result = _float(x if of in FLOATS else x.astype(np.float64), to, rest)
        elif of in FLOATS:
            if rounding is None:
                raise Fault(f"{ins.name} does not say how to round")
            result = _integer(x, to, rounding)
        else:
            result = x.astype(DTYPES[to])
            if bits > bits_of(to):  # a narrow result fills its register as its sign says
                result = result.astype(np.int64 if to[0] == "s" else np.uint64).astype(UNSIGNED[bits])
        s.write(place, np.ascontiguousarray(result))

    return run


def _convert_two(ins: Instruction, to: str, rest: set[str]) -> Run:
    """Two floats into one register; the first operand is the upper half."""
    if ins.modifiers[-1] != "f32":
        raise Unknown(ins.name)
    place = destination(ins.operands[0], 32)
    reads = [reader(operand, "f32") for operand in ins.operands[1:]]

    def run(s: Lanes) -> None:
        high, low = (_float(read(s), to[:-2], rest) for read in reads)
        s.write(place, joined(low, high))

    return run
