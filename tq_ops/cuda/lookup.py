"""The centroids of a tile of codes: byte permutations on a GPU for 2, 3 and 4 bits, arithmetic for learned keys, else loads.

`prmt` picks four bytes of eight by the nibbles of an index, so eight levels fit one table of high bytes and one of low bytes;
sixteen need the sign apart: 1.3 to 2.5 instructions a coordinate. In FP32, in the interpreter, which has no PTX, and from 5
bits on, each centroid is a load. Those of learned keys are a cubic of the level: in FP16 two at a time by `Halves`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from haarkv.codebooks.cubic import FACTORS, WIDTHS
from haarkv.tq_ops.cuda.planes import lace, part_levels
from haarkv.tq_ops.formats.learned import COLUMNS as LEARNED
from haarkv.tq_ops.formats.packing import Column, Part

BASE = 0x64006400
_MANTISSA = 10
_NUDGES = {4: (-1, 0), 6: (-4, 14)}
"""By bits: steps of FP16 by which a, and then rest, lie beside the nearest number."""


class Halves(NamedTuple):
    """Constants of a part, each the bits of an FP16 number in both halves of a word.

    By `codebooks.cubic` c = m * (a + b * m**2) with m = 2 * level + 1 - 2**bits. Here n = m / 2**(bits - 1), in FP16's range,
    and a is the sum of two FP16 numbers: c = n * a + n * (rest + b * n**2), whose every step but the last is exact or small.
    The result is the FP16 nearest to c for every level of every width: the constants were moved a little until it was.

    A level whose lowest bit is bit `place` of a half is or-ed into 1024 = 0x6400, which gives x = 1024 + level * 2**place
    without a conversion; n = scale * x + offset.
    """

    scale: int
    offset: int
    a: int
    rest: int
    b: int


def half_constants(bits: int, place: int) -> Halves:
    """The constants for levels of `bits` bits, the lowest of them bit `place` of a half."""
    a, b = FACTORS[bits]
    unit = 2.0 ** (bits - 1)
    scale, offset = 2.0 ** (1 - place) / unit, -(2.0 ** (1 + _MANTISSA - place) + 2**bits - 1) / unit
    assert _round_fp16(scale) == scale, "exact"
    assert _round_fp16(offset) == offset, "exact"
    a_nudge, rest_nudge = _NUDGES.get(bits, (0, 0))
    high = _nudge(a * unit, a_nudge)
    return Halves(*map(_word, (scale, offset, high, _nudge(a * unit - high, rest_nudge), b * unit**3)))


def unit_shift(part: Part) -> int:
    """Bits to shift a unit in a half to the right, or if negative to the left, before n is made of a part of it."""
    if part.shift == 0:
        return -1
    if part.shift + part.bits <= _MANTISSA:
        return 0
    return 6 if part.shift > 6 else part.shift - 1  # parts above bit 6 share one shift


def _round_fp16(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float16))


def _nudge(number: float, steps: int) -> float:
    """The FP16 number `steps` steps above the one nearest to a number."""
    return float((torch.tensor(number, dtype=torch.float16).view(torch.int16) + steps).view(torch.float16))


def _word(number: float) -> int:
    half = int(torch.tensor(number, dtype=torch.float16).view(torch.int16)) & 0xFFFF
    return half << 16 | half


def column_asm(column: Column) -> tuple[str, str]:
    """PTX for one word of a column's units, four of a byte or two of two bytes, and its operands.

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
        shift = unit_shift(part)
        place = part.shift - shift
        constants = half_constants(part.bits, place)
        lines += [f"mov.b32 {name}, 0x{value:08x};" for name, value in constants._asdict().items()]
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


# Four bytes of codes in $4, their low levels' centroids in $0 and $1, their high levels' in $2 and $3, two FP16 each.
# Level n >= 8 is +c[n & 7], level n < 8 is -c[~n & 7]: eight magnitudes fill two words of high bytes ($5, $9) and two of
# low bytes ($13, $17), and `prmt` picks four bytes by four nibbles at once. Of a nibble whose top bit is set `prmt` returns
# the sign of the byte, eight times: of 0x40 ($21) that is 0, which leaves the sign bits, halved, of negative levels.
# Each word is passed four times, once for each of the four codes; all four are the same register.
_SIXTEEN = tl.constexpr("""
{
    .reg .b32 negative, index, more, codes, high, low, sign;
    not.b32 negative, $4;
    and.b32 negative, negative, 0x88888888;
    shr.u32 index, negative, 3;
    sub.u32 index, negative, index;
    xor.b32 index, index, $4;
    and.b32 index, index, 0x77777777;
    prmt.b32 high, $5, $9, index;
    prmt.b32 low, $13, $17, index;
    prmt.b32 sign, $21, $21, $4;
    mad.lo.u32 high, sign, 2, high;
    prmt.b32 $0, low, high, 0x6240;
    prmt.b32 $2, low, high, 0x7351;
    shr.u32 more, index, 16;
    shr.u32 codes, $4, 16;
    prmt.b32 high, $5, $9, more;
    prmt.b32 low, $13, $17, more;
    prmt.b32 sign, $21, $21, codes;
    mad.lo.u32 high, sign, 2, high;
    prmt.b32 $1, low, high, 0x6240;
    prmt.b32 $3, low, high, 0x7351;
}
""")
_SIXTEEN_OPERANDS = tl.constexpr("=r,=r,=r,=r,r" + ",r" * 20)


def _look_up(index: str, low: int, high: int, high_bytes: str, low_bytes: str) -> str:
    """PTX: centroids of the levels in the nibbles of `index`, low nibbles' to ${low} and the next, high ones' to ${high}."""
    halves = []
    for half in range(2):
        if half:
            halves.append(f"shr.u32 index, {index}, 16;")
        halves += [
            f"prmt.b32 high, {high_bytes}, {'index' if half else index};",
            f"prmt.b32 low, {low_bytes}, {'index' if half else index};",
            f"prmt.b32 ${low + half}, low, high, 0x6240;",
            f"prmt.b32 ${high + half}, low, high, 0x7351;",
        ]
    return "\n".join(halves)


# Four bytes of codes in $8. Parts 0 and 2 are the low two bits of the nibbles, parts 1 and 3 the high two: $0 … $7.
# Four high bytes of centroids in $9, four low ones in $13.
_FOUR = tl.constexpr(
    "{\n.reg .b32 level, index, high, low;\nand.b32 level, $8, 0x33333333;\n"
    + _look_up("level", 0, 4, "$9, $9", "$13, $13")
    + "\nshr.u32 level, $8, 2;\nand.b32 level, level, 0x33333333;\n"
    + _look_up("level", 2, 6, "$9, $9", "$13, $13")
    + "\n}"
)
_FOUR_TYPES = tl.constexpr((tl.float16,) * 4)
_FOUR_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 9))


def _eight_level_ptx(part: int) -> str:
    """PTX: the levels of parts `part` and `part + 4` into the nibbles of `level`, and their centroids."""
    tile, shift = 16 + part % 2, 2 * (part // 2)
    third = 2 - part  # from its place to bit 2 of each nibble
    lines = [f"shr.u32 level, ${tile}, {shift};" if shift else f"mov.b32 level, ${tile};", "and.b32 level, level, 0x33333333;"]
    lines.append(f"shl.b32 top, $18, {third};" if third >= 0 else f"shr.u32 top, $18, {-third};")
    lines += ["and.b32 top, top, 0x44444444;", "or.b32 level, level, top;"]
    return "\n".join([*lines, _look_up("level", 2 * part, 2 * part + 8, "$19, $23", "$27, $31")])


# Two tiles of low bits in $16 and $17, one of third bits in $18; the eight parts in $0 … $15.
# Eight high bytes of centroids in $19 and $23, eight low ones in $27 and $31.
_EIGHT = tl.constexpr(
    "{\n.reg .b32 level, top, index, high, low;\n" + "\n".join(_eight_level_ptx(part) for part in range(4)) + "\n}"
)
_EIGHT_TYPES = tl.constexpr((tl.float16,) * 8)
_EIGHT_OPERANDS = tl.constexpr(",".join(["=r"] * 16 + ["r"] * 19))


_FACTORS = tl.constexpr(tuple(FACTORS[bits] for bits in WIDTHS))
# By 10 * B + column. Flat, since kernels are given no tuples of strings.
_ASM_OF_COLUMNS = {10 * bits + n: column_asm(one) for bits, columns in LEARNED.items() for n, one in enumerate(columns)}
_COLUMN_ASM = tl.constexpr({key: asm for key, (asm, _) in _ASM_OF_COLUMNS.items()})
_COLUMN_OPERANDS = tl.constexpr({key: operands for key, (_, operands) in _ASM_OF_COLUMNS.items()})
_PART_TYPES = tl.constexpr(((), (), (tl.float16,) * 2, (tl.float16,) * 3, (tl.float16,) * 4, (tl.float16,) * 5))


@triton.jit
def load_words(side):
    """The words of `Layout.words` as scalars, to stay in registers; `side` is an `attention.Read`."""
    count: tl.constexpr = 5 if side.BITS == 4 else 2 * (side.BITS - 1)
    words = (0,)
    if side.PERMUTE and side.COLUMNS == 0:
        words = (tl.load(side.words),)
        for index in tl.static_range(1, count):
            words = words + (tl.load(side.words + index),)  # noqa: RUF005
    return words


@triton.jit
def _lace_parts(parts, PARTS: tl.constexpr):
    """As `planes.lace`, of FP16 or FP32 numbers, as integers of their bits.

    Were a product's operand a reshape itself, Triton would look for a layout in shared memory with the parts apart, and for
    Blackwell it refuses the kernel where there is none.
    """
    half = parts[0]
    if PARTS > 1:
        TYPE: tl.constexpr = half.dtype
        BITS: tl.constexpr = tl.int16 if TYPE.primitive_bitwidth == 16 else tl.int32
        words = (half.to(BITS, bitcast=True),)
        for part in tl.static_range(1, PARTS):
            words = words + (parts[part].to(BITS, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
        half = lace(words, PARTS).to(TYPE, bitcast=True)
    return half


@triton.jit
def _load_centroids(tiles, table, first: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr):
    """Centroids of the half whose first part is `first`, by loads."""
    parts: tl.constexpr = 4 // min(BITS & -BITS, 4)
    centroids = (tl.load(table + part_levels(tiles, first, BITS)).to(TYPE),)
    for part in tl.static_range(1, parts):
        centroids = centroids + (tl.load(table + part_levels(tiles, first + part, BITS)).to(TYPE),)  # type: ignore[assignment]  # noqa: RUF005
    return _lace_parts(centroids, parts)


@triton.jit
def cubic(level, BITS: tl.constexpr):
    """Centroids fp32 of levels of BITS bits, as `codebooks.cubic.centroids`; higher bits are ignored."""
    m = (2 * (level & (2**BITS - 1)) + (1 - 2**BITS)).to(tl.float32)
    return m * (_FACTORS[BITS - 1][0] + _FACTORS[BITS - 1][1] * (m * m))


@triton.jit
def _column_centroids(units, side, column: tl.constexpr, TYPE: tl.constexpr):
    """Centroids of each part of a column of units [rows, D / 8]: a tuple."""
    first: tl.constexpr = side.UNITS[column][2]
    count: tl.constexpr = side.UNITS[column][3]
    if side.PERMUTE:
        asm: tl.constexpr = 10 * side.BITS + column
        centroids = tl.inline_asm_elementwise(
            _COLUMN_ASM[asm], _COLUMN_OPERANDS[asm], [units], dtype=_PART_TYPES[count], is_pure=True,
            pack=4 // side.UNITS[column][0],
        )  # fmt: skip
    else:
        units = units.to(tl.int32)
        centroids = (cubic(units, side.PARTS[first][1]).to(TYPE),)
        for part in tl.static_range(first + 1, first + count):
            centroids = centroids + (cubic(units >> side.PARTS[part][0], side.PARTS[part][1]).to(TYPE),)  # noqa: RUF005
    return centroids


@triton.jit
def tile_centroids(tiles, side, words, TYPE: tl.constexpr):
    """Centroids of both halves [rows, D/2] of vectors, of `tiles` of `planes.load_codes` and `words` of `load_words`.

    Without PERMUTE of `side`, an `attention.Read`, they are of TYPE.
    """
    table = side.centroids
    BITS: tl.constexpr = side.BITS
    if side.COLUMNS > 0:
        parts = _column_centroids(tiles[0], side, 0, TYPE)
        for column in tl.static_range(1, side.COLUMNS):
            parts = parts + _column_centroids(tiles[column], side, column, TYPE)
        low = _lace_parts((parts[0], parts[1], parts[2], parts[3]), 4)
        high = _lace_parts((parts[4], parts[5], parts[6], parts[7]), 4)
    elif not side.PERMUTE:
        narrow: tl.constexpr = min(BITS & -BITS, 4)
        low = _load_centroids(tiles, table, 0, BITS, TYPE)
        high = _load_centroids(tiles, table, 4 // narrow, BITS, TYPE)
    elif BITS == 2:
        a, b, c, d = tl.inline_asm_elementwise(
            _FOUR, _FOUR_OPERANDS, [tiles[0], words[0], words[1]], dtype=_FOUR_TYPES, is_pure=True, pack=4
        )
        low, high = _lace_parts((a, b), 2), _lace_parts((c, d), 2)
    elif BITS == 3:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _EIGHT, _EIGHT_OPERANDS, [tiles[0], tiles[1], tiles[2], words[0], words[1], words[2], words[3]],
            dtype=_EIGHT_TYPES, is_pure=True, pack=4,
        )  # fmt: skip
        low, high = _lace_parts((a, b, c, d), 4), _lace_parts((e, f, g, h), 4)
    else:
        tl.static_assert(BITS == 4, "only 2, 3 and 4 bits are looked up by permutations")
        low, high = tl.inline_asm_elementwise(
            _SIXTEEN, _SIXTEEN_OPERANDS, [tiles[0], words[0], words[1], words[2], words[3], words[4]],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high
