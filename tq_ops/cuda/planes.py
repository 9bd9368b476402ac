"""How levels lie in a vector's bytes, for kernels: planes of bits, cut into tiles of equal width, and parts of coordinates.

A level of BITS bits lies in one plane of 2, 4 or 8 bits, or in two: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, low bits first. BITS
says which by its own binary digits. Its lowest digit is `narrow`; of 8 bits it is 4. A vector of D coordinates is cut into
8 / narrow parts of n = D * narrow / 8 coordinates, and each plane into one tile or more of n bytes:

    byte j of tile t, of the m tiles of a plane, holds coordinate j of the parts t, t + m, t + 2m, ..., the first lowest

So a kernel loads each byte once, and one shift takes a part out of it. It holds a vector as two halves of D/2 columns, in each
half of the parts laced together, a pair of pairs. `layout.kernel_order` is that order of columns; rotations have it folded in.

Vectors of N learned nibbles lie like those of 4 bits and N coordinates. Kernels hold W columns, a power of two: what is beyond
N/2 in either half is not read, stands for level 0 of a coordinate that is 0, and is not written.
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
def parts_of(half, PARTS: tl.constexpr):
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
    """Inverse of `parts_of`."""
    half = parts[0]
    if PARTS == 2:
        half = pair(parts[0], parts[1])
    elif PARTS == 4:
        half = pair(pair(parts[0], parts[1]), pair(parts[2], parts[3]))
    return half


@triton.jit
def load_codes(codes, at, N: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """The tiles of vectors of N levels in W columns whose bytes begin at `at` [rows]: a tuple of [rows, n] uint8."""
    narrow: tl.constexpr = min(BITS & -BITS, 4)
    n: tl.constexpr = W * narrow // 8
    place = tl.arange(0, n)[None, :]
    byte = codes + at[:, None] + place
    if N == W:
        tiles = (tl.load(byte),)
    else:
        tl.static_assert(BITS == 4, "only levels of 4 bits are fewer than their columns")
        tiles = (tl.load(byte, place < N // 2, 0),)
    for tile in tl.static_range(1, BITS // narrow):
        tiles = tiles + (tl.load(byte + tile * n),)  # noqa: RUF005
    return tiles


@triton.jit
def level_of(tiles, part: tl.constexpr, BITS: tl.constexpr):
    """Levels [rows, n] int32 of one part."""
    narrow: tl.constexpr = min(BITS & -BITS, 4)
    wide: tl.constexpr = BITS & ~narrow if BITS & ~narrow else BITS  # bits of the first plane
    m: tl.constexpr = wide // narrow
    level = (tiles[part - part // m * m].to(tl.int32) >> (wide * (part // m))) & (2**wide - 1)
    if wide != BITS:
        level = level | (((tiles[m].to(tl.int32) >> (narrow * part)) & (2**narrow - 1)) << wide)
    return level


@triton.jit
def store_codes(codes, at, live, low, high, N: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """Pack N levels, low and high [rows, W/2] int32, into the bytes that begin at `at` [rows]."""
    narrow: tl.constexpr = min(BITS & -BITS, 4)
    n: tl.constexpr = W * narrow // 8
    wide: tl.constexpr = BITS & ~narrow if BITS & ~narrow else BITS
    m: tl.constexpr = wide // narrow
    level = parts_of(low, 4 // narrow) + parts_of(high, 4 // narrow)
    place = tl.arange(0, n)[None, :]
    byte, live = codes + at[:, None] + place, live[:, None]
    if N != W:
        live = live & (place < N // 2)
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
