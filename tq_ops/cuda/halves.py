"""Centroids of learned keys by arithmetic on pairs of FP16 numbers: its constants, and PTX that does it for a tile of units.

`codebooks.cubic` says c = m * (a + b * m**2) with m = 2 * level + 1 - 2**bits. Here n = m / 2**(bits - 1), so that no factor
leaves FP16's range, and a is the sum of two FP16 numbers:

    c = n * a + n * (rest + b * n**2)

Each step but the last is exact or small beside n * a. The result is the FP16 number nearest to c, for every level of every
width: the constants were moved a little until it was.

n costs no conversion. A level whose lowest bit is bit `place` of a half, 1 or above, is or-ed into 1024 = 0x6400. That makes
1024 + level * 2**place, of which one multiply-add makes n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from haarkv.codebooks.cubic import FACTORS
from haarkv.tq_ops.formats.columns import Column, Part

BASE = 0x64006400
_MANTISSA = 10
_NUDGES = {4: (-1, 0), 6: (-4, 14)}
"""By bits: steps of FP16 by which a, and then rest, lie beside the nearest number."""


class Halves(NamedTuple):
    """Constants of a part, each the bits of an FP16 number in both halves of a word.

    Attributes:
        scale, offset: n = scale * x + offset, of x = 1024 + level * 2**place.
        a, rest, b: as the module says.
    """

    scale: int
    offset: int
    a: int
    rest: int
    b: int


def halves_of(bits: int, place: int) -> Halves:
    """The constants for levels of so many bits, the lowest of them bit `place` of a half."""
    a, b = FACTORS[bits]
    unit = 2.0 ** (bits - 1)
    scale, offset = 2.0 ** (1 - place) / unit, -(2.0 ** (1 + _MANTISSA - place) + 2**bits - 1) / unit
    assert _rounded(scale) == scale, "exact"
    assert _rounded(offset) == offset, "exact"
    of_a, of_rest = _NUDGES.get(bits, (0, 0))
    high = _nudged(a * unit, of_a)
    return Halves(*map(_word, (scale, offset, high, _nudged(a * unit - high, of_rest), b * unit**3)))


def moved(part: Part) -> int:
    """Bits by which a unit in a half is shifted to the right, or to the left if negative, for n to be made of a part of it."""
    if part.shift == 0:
        return -1
    if part.shift + part.bits <= _MANTISSA:
        return 0
    return 6 if part.shift > 6 else part.shift - 1  # parts above bit 6 share one shift


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float16))


def _nudged(number: float, steps: int) -> float:
    """The FP16 number so many above the one nearest to a number, in its bits."""
    return float((torch.tensor(number, dtype=torch.float16).view(torch.int16) + steps).view(torch.float16))


def _word(number: float) -> int:
    half = int(torch.tensor(number, dtype=torch.float16).view(torch.int16)) & 0xFFFF
    return half << 16 | half


def column_asm(column: Column) -> tuple[str, str]:
    """PTX for one word of units of a column, of four units of a byte or of two of two bytes, and its operands.

    Outputs are two FP16 numbers a word, those of the first part first; the word of units is the last operand.
    """
    words = 2 // column.nbytes  # of an output
    units = f"${words * len(column.parts)}"
    lines = [".reg .b32 unit0, unit1, x, n, t, scale, offset, a, rest, b;"]
    if words == 1:
        lines.append(f"mov.b32 unit0, {units};")
    else:
        lines += [f"prmt.b32 unit0, {units}, 0, 0x4140;", f"prmt.b32 unit1, {units}, 0, 0x4342;"]
    for number, part in enumerate(column.parts):
        shift = moved(part)
        place = part.shift - shift
        of = halves_of(part.bits, place)
        lines += [f"mov.b32 {name}, 0x{value:08x};" for name, value in of._asdict().items()]
        mask = (2**part.bits - 1 << place) * 0x10001
        for word in range(words):
            source, out = f"unit{word}", f"${words * number + word}"
            if shift:
                lines.append(f"{'shr.u32' if shift > 0 else 'shl.b32'} x, {source}, {abs(shift)};")
                source = "x"
            lines += [
                f"and.b32 x, {source}, 0x{mask:08x};", f"or.b32 x, x, 0x{BASE:08x};", "fma.rn.f16x2 n, x, scale, offset;",
            ]  # fmt: skip
            if part.bits == 1:  # n is 1 or -1
                lines.append(f"mul.rn.f16x2 {out}, n, a;")
            else:
                lines += [
                    "mul.rn.f16x2 t, n, n;", "fma.rn.f16x2 t, t, b, rest;", "mul.rn.f16x2 t, t, n;",
                    f"fma.rn.f16x2 {out}, n, a, t;",
                ]  # fmt: skip
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=r"] * (words * len(column.parts)) + ["r"])
