"""Floating point: arithmetic of FP32 and of FP16 pairs with its rounding; conversions of FP32, FP16, BF16 and integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lab.ptx.state import DTYPES, UNSIGNED, Lanes, Run, bit_width, destination, reader
from lab.ptx.syntax import Instruction, Unknown

FLOATS = ("f16", "f32", "bf16", "tf32", "f16x2", "bf16x2")


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """[...] uint16 to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """[...] float32 to uint16, to nearest, ties to even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), nearest.astype(np.uint16))


def flush_denormals(x: np.ndarray) -> np.ndarray:
    """Denormal float32 as zeros of their sign."""
    return np.where(np.abs(x) < np.float32(1.1754943508222875e-38), np.copysign(np.float32(0), x), x)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: the product is exact in float64, and the sum is rounded to odd there."""
    product, wide = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + wide
    part = total - product
    residue = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    odd = even & (residue != 0) & np.isfinite(total) & np.isfinite(residue)
    if odd.any():
        away = (residue > 0) == (total > 0)
        total = np.where(odd, (bits + np.where(away, 1, -1)).view(np.float64), total)
    return total.astype(np.float32)


def on_f16_pairs(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A function of float64 on each of two FP16 numbers in a word, rounded once: float64 holds what FP16 numbers make."""

    def on_words(*words: np.ndarray) -> np.ndarray:
        pairs = (np.ascontiguousarray(word, np.uint32)[..., None].view(np.float16).astype(np.float64) for word in words)
        return np.ascontiguousarray(function(*pairs).astype(np.float16)).view(np.uint32)[..., 0]

    return on_words


def less_of_bf16(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x - y of each of two BF16 numbers in a word, rounded once. Compilers make numbers of bytes so.

    Raises:
        Unknown: a difference that FP32 does not hold, of numbers far apart.
    """
    a, b = (from_bf16(np.ascontiguousarray(word, np.uint32)[..., None].view(np.uint16)) for word in (x, y))
    exact = a.astype(np.float64) - b
    if not np.array_equal(exact.astype(np.float32), exact, equal_nan=True):
        raise Unknown("a difference of BF16 numbers that are far apart")
    return np.ascontiguousarray(to_bf16(exact.astype(np.float32))).view(np.uint32)[..., 0]


def _smaller(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == y) & np.signbit(x), x, np.fmin(x, y))


def _larger(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == y) & ~np.signbit(x), x, np.fmax(x, y))


_FUNCTIONS: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply), "div": (2, np.divide),
    "fma": (3, fma), "min": (2, _smaller), "max": (2, _larger), "neg": (1, np.negative), "abs": (1, np.abs),
    "ex2": (1, np.exp2), "sqrt": (1, np.sqrt),
    "rsqrt": (1, lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)),
}  # fmt: skip
"""How many operands an FP32 instruction has, and what it does with them."""
_F16X2_FUNCTIONS = {"mul": (2, on_f16_pairs(np.multiply)), "fma": (3, on_f16_pairs(lambda a, b, c: a * b + c))}
_MAGNITUDES = {"bf16": np.uint16(0x7FFF), "bf16x2": np.uint32(0x7FFF7FFF)}
"""What the magnitude of a BF16 number, or of two, keeps of its bits."""


def build(ins: Instruction) -> Run:
    """An instruction on FP32 or FP16 pairs, or the magnitude of BF16 numbers.

    Raises:
        Unknown: another type, a rounding mode or an opcode that is not known here.
    """
    kind = ins.modifiers[-1]
    if set(ins.modifiers[:-1]) - {"ftz", "rn", "approx", "full"}:
        raise Unknown(ins.name)
    if ins.opcode == "abs" and kind in _MAGNITUDES:
        bits = _MAGNITUDES[kind]
        count, function = 1, lambda a: a & bits
    elif ins.opcode in _FUNCTIONS and kind == "f32":
        count, function = _FUNCTIONS[ins.opcode]
    elif ins.opcode == "sub" and kind == "bf16x2":
        count, function = 2, less_of_bf16
    elif ins.opcode in _F16X2_FUNCTIONS and kind == "f16x2":
        count, function = _F16X2_FUNCTIONS[ins.opcode]
    else:
        raise Unknown(ins.name)
    target = destination(ins.operands[0], bit_width(kind))
    if len(ins.operands) != count + 1:
        raise Unknown(f"{ins.name} of {len(ins.operands)} operands")
    reads = [reader(operand, kind) for operand in ins.operands[1:]]
    ftz = "ftz" in ins.modifiers

    def run(s: Lanes) -> None:
        values = [read(s) for read in reads]
        if ftz:
            values = [flush_denormals(value) for value in values]
        result = function(*values)
        s.write(target, np.ascontiguousarray(flush_denormals(result) if ftz else result))

    return run


# -- Conversions --------------------------------------------------------------------------------------------------------
def _float(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 or float64 as a float type, to nearest; TF32 of float32, ties away from zero."""
    if kind == "tf32":
        bits = x.view(np.uint32)
        return np.where(np.isfinite(x), (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)
    return to_bf16(x.astype(np.float32)) if kind == "bf16" else x.astype(DTYPES[kind])


def convert(ins: Instruction) -> Run:
    """`cvt`: of the last two modifiers the first is the result's type."""
    to, source_kind = ins.modifiers[-2:]
    for kind in (to, source_kind):
        if kind not in DTYPES:
            raise Unknown(f"the type {kind}")
    if ins.modifiers[:-2] not in ((), ("rn",), ("rna",)) or (to == "tf32") != ("rna" in ins.modifiers):
        raise Unknown("its rounding is not known")
    if to in ("f16x2", "bf16x2"):
        return _convert_two(ins, to)
    if source_kind in FLOATS and to not in FLOATS:
        raise Unknown("a float to an integer")
    target = ins.operands[0]
    bits = target.bits if hasattr(target, "bits") else 0
    place, read = destination(target), reader(ins.operands[1], source_kind)

    def run(s: Lanes) -> None:
        x = read(s)
        x = from_bf16(x) if source_kind == "bf16" else x
        if to in FLOATS:
            result = _float(x if source_kind in FLOATS else x.astype(np.float64), to)
        else:
            result = x.astype(DTYPES[to])
            if bits > bit_width(to):  # a narrow result fills its register as its sign says
                result = result.astype(np.int64 if to[0] == "s" else np.uint64).astype(UNSIGNED[bits])
        s.write(place, np.ascontiguousarray(result))

    return run


def _convert_two(ins: Instruction, to: str) -> Run:
    """Two floats into one register; the first operand is the upper half."""
    if ins.modifiers[-1] != "f32":
        raise Unknown(ins.name)
    place = destination(ins.operands[0], 32)
    reads = [reader(operand, "f32") for operand in ins.operands[1:]]

    def run(s: Lanes) -> None:
        high, low = (_float(read(s), to[:-2]).view(np.uint16) for read in reads)
        s.write(place, np.stack(np.broadcast_arrays(low, high), -1).view(np.uint32)[..., 0])

    return run
