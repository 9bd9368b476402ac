"""How levels lie in a vector's bytes, for kernels: planes of bits, cut into tiles of equal width, and parts of coordinates.

A level of BITS bits lies in one plane of 2, 4 or 8 bits, or in two: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, low bits first, as the
binary digits of BITS. The lowest digit is `narrow`; of 8 bits it is 4. A vector of D coordinates is cut into 8 / narrow parts
of n = D * narrow / 8 coordinates, and each plane into one tile or more of n bytes:

    byte j of tile t, of the m tiles of a plane, holds coordinate j of the parts t, t + m, t + 2m, ..., the first lowest

So a kernel loads each byte once, and one shift extracts a part. It holds a vector as two halves of D/2 columns, in each half
of the parts laced together, a pair of pairs. `layout.kernel_order` is that order of columns; rotations have it folded in.

Learned keys lie in the columns of `tq_ops.formats.packing`: eight parts of D / 8 coordinates, each of its own width, which one
shift extracts as well. `layout.Columns` describes them for kernels.
"""

import triton
import triton.language as tl


@triton.jit
def pair(a, b):
    """Columns of a and b [rows, n] in turn: [rows, 2n]."""
    return tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def unpair(x):
    """Inverse of `pair`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def unlace(half, PARTS: tl.constexpr):
    """The PARTS parts that are laced into a half, in order."""
    if PARTS == 1:
        parts = (half,)
    elif PARTS == 2:
        parts = unpair(half)
    else:
        ab, cd = unpair(half)
        parts = unpair(ab) + unpair(cd)
    return parts


@triton.jit
def lace(parts, PARTS: tl.constexpr):
    """Inverse of `unlace`."""
    half = parts[0]
    if PARTS == 2:
        half = pair(parts[0], parts[1])
    elif PARTS == 4:
        half = pair(pair(parts[0], parts[1]), pair(parts[2], parts[3]))
    return half


@triton.jit
def units_at(side, at, column: tl.constexpr, D: tl.constexpr):
    """Pointers [rows, D / 8] to the units of a column of vectors whose bytes begin at `at` [rows]: uint8 or uint16."""
    codes, unit = side.codes, tl.arange(0, D // 8)[None, :]
    place = at[:, None] + side.UNITS[column][1] * (D // 8)
    if side.UNITS[column][0] == 2:
        # Every vector and every column begins at an even byte.
        codes, place = codes.to(tl.pointer_type(tl.uint16), bitcast=True), place // 2
    return codes + (place + unit)


@triton.jit
def load_codes(side, at, D: tl.constexpr):
    """The tiles of vectors whose bytes begin at `at` [rows]: a tuple of [rows, n] uint8, or uint16 of columns of two bytes."""
    if side.COLUMNS > 0:
        tiles = (tl.load(units_at(side, at, 0, D)),)
        for column in tl.static_range(1, side.COLUMNS):
            tiles = tiles + (tl.load(units_at(side, at, column, D)),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        narrow: tl.constexpr = min(side.BITS & -side.BITS, 4)
        n: tl.constexpr = D * narrow // 8
        byte = side.codes + at[:, None] + tl.arange(0, n)[None, :]
        tiles = (tl.load(byte),)
        for tile in tl.static_range(1, side.BITS // narrow):
            tiles = tiles + (tl.load(byte + tile * n),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def part_levels(tiles, part: tl.constexpr, BITS: tl.constexpr):
    """Levels [rows, n] int32 of one part of planes."""
    narrow: tl.constexpr = min(BITS & -BITS, 4)
    wide: tl.constexpr = BITS & ~narrow if BITS & ~narrow else BITS  # bits of the first plane
    m: tl.constexpr = wide // narrow
    level = (tiles[part - part // m * m].to(tl.int32) >> (wide * (part // m))) & (2**wide - 1)
    if wide != BITS:
        level = level | (((tiles[m].to(tl.int32) >> (narrow * part)) & (2**narrow - 1)) << wide)
    return level


@triton.jit
def packed_units(level, into, column: tl.constexpr):
    """Units [rows, D / 8] int32 of a column, of the levels of the eight parts."""
    first: tl.constexpr = into.UNITS[column][2]
    count: tl.constexpr = into.UNITS[column][3]
    unit = level[first]
    for part in tl.static_range(first + 1, first + count):
        unit = unit | (level[part] << into.PARTS[part][0])
    return unit


@triton.jit
def store_columns(into, at, live, low, high, D: tl.constexpr):
    """As `store_codes`, of levels of several widths; `into` is a `quantize.Write`."""
    level = unlace(low, 4) + unlace(high, 4)
    for column in tl.static_range(into.COLUMNS):
        pointer = units_at(into, at, column, D)
        tl.store(pointer, packed_units(level, into, column).to(pointer.dtype.element_ty), live[:, None])


@triton.jit
def store_codes(codes, at, live, low, high, D: tl.constexpr, BITS: tl.constexpr):
    """Pack levels, low and high [rows, D/2] int32, into planes whose bytes begin at `at` [rows]."""
    narrow: tl.constexpr = min(BITS & -BITS, 4)
    n: tl.constexpr = D * narrow // 8
    wide: tl.constexpr = BITS & ~narrow if BITS & ~narrow else BITS
    m: tl.constexpr = wide // narrow
    level = unlace(low, 4 // narrow) + unlace(high, 4 // narrow)
    byte, live = codes + at[:, None] + tl.arange(0, n)[None, :], live[:, None]
    for tile in tl.static_range(m):
        packed = level[tile] & (2**wide - 1)
        for place in tl.static_range(1, 8 // wide):
            packed = packed | ((level[tile + place * m] & (2**wide - 1)) << (wide * place))
        tl.store(byte + tile * n, packed.to(tl.uint8), live)
    if wide != BITS:
        packed = level[0] >> wide
        for place in tl.static_range(1, 8 // narrow):
            packed = packed | ((level[place] >> wide) << (narrow * place))
        tl.store(byte + m * n, packed.to(tl.uint8), live)
