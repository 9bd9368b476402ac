"""Pieces of kernels: rounding, products and rotating vectors into the domain of the codes; the kernel that rotates queries.

Of learned coordinates every KV head has its own matrix, so a program takes vectors that share one (`vector_ids`). Learned keys
are stored by stretches (`tq_ops.formats.stretches`): a query is another one for the keys of each.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.formats.stretches import STRETCH as _STRETCH

STRETCH = tl.constexpr(_STRETCH)


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """FP32 x as TYPE, to nearest, ties to even. Triton's interpreter truncates to BF16 instead of rounding."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x).to(TYPE)
    return x.to(TYPE)


@triton.jit
def dot(a, b, into, TYPE: tl.constexpr):
    """`into + a @ b` in FP32, operands as TYPE.

    FP32 operands take three TF32 products on tensor cores, which keep FP32 precision.
    """
    if tl.float32 == TYPE:
        return tl.dot(a.to(TYPE), b.to(TYPE), into, input_precision="tf32x3")
    return tl.dot(a.to(TYPE), b.to(TYPE), into)


@triton.jit
def vector_ids(tile, tokens, HEADS: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr):
    """Token and head [ROWS] of the vectors of a tile, and the matrix that they share; a token past the last is none.

    There are `MATRICES * cdiv(tokens * HEADS / MATRICES, ROWS)` tiles: those of the first heads, which share the first matrix,
    come first.
    """
    shared: tl.constexpr = HEADS // MATRICES
    matrix = 0
    if MATRICES > 1:
        tiles = tl.cdiv(tokens * shared, ROWS)
        matrix = tile // tiles
        tile = tile % tiles
    vector = tile * ROWS + tl.arange(0, ROWS)
    return vector // shared, matrix * shared + vector % shared, matrix


@triton.jit
def places(HALF: tl.constexpr, D: tl.constexpr):
    """Where in memory a vector's two halves [D/2] have their numbers, so that RoPE turns number i of both together.

    Args:
        HALF: numbers i and i + HALF are turned together. If it is less than D/2, RoPE leaves those from 2 * HALF on alone.
    """
    number = tl.arange(0, D // 2)
    low, high = number, number + D // 2
    if HALF < D // 2:
        low, high = tl.where(number < HALF, low, low + HALF), tl.where(number < HALF, number + HALF, high)
    return low, high


@triton.jit
def turned_back(low, high, cos, sin):
    """Halves of vectors [ROWS, D/2] turned back by angles whose cos and sin [ROWS or 1, D/2] are given."""
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def rotate_columns(
    low, high, rotation, first,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Columns first … first + WIDTH - 1 of `x @ rotation`, or of `x @ rotation.T` with BACK: [ROWS, WIDTH] fp32.

    Args:
        low, high: [ROWS, D/2], the halves of x; a single row is multiplied without tensor cores, which take 16.
        rotation: pointer to [D, D] bf16.
    """
    i, column = tl.arange(0, D // 2)[:, None], first + tl.arange(0, WIDTH)[None, :]
    # BACK reads the same matrix along its other axis.
    at = rotation + (column * D + i if BACK else i * D + column)
    across: tl.constexpr = (D // 2) * (1 if BACK else D)
    if ROWS == 1:
        product = tl.trans(low) * tl.load(at).to(tl.float32) + tl.trans(high) * tl.load(at + across).to(tl.float32)
        return tl.sum(product, 0)[None, :]
    zero = tl.zeros((ROWS, WIDTH), tl.float32)
    return dot(high, tl.load(at + across), dot(low, tl.load(at), zero, TYPE), TYPE)


@triton.jit
def power_of_two(exponent):
    """2**exponent, exponent [...] int32 in -126 … 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_gains(low, high, largest, D: tl.constexpr):
    """Powers of two [ROWS], at least 1, by which queries in learned coordinates are divided: FP16 then holds them.

    Args:
        low, high: [ROWS, D/2], queries before they are multiplied.
        largest: what bounds a query's numbers; pointer to one head's of `layout.Learned.largest`.
    """
    dim = tl.arange(0, D // 2)
    largest_low, largest_high = tl.load(largest + dim)[None, :], tl.load(largest + D // 2 + dim)[None, :]
    most = tl.sum(tl.abs(low.to(tl.float32)) * largest_low, 1) + tl.sum(tl.abs(high.to(tl.float32)) * largest_high, 1)
    return power_of_two(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 126 - 15, 0))


@triton.jit
def rotate_finely(
    low, high, rotation, first,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """As `rotate_columns`, of FP32 vectors [ROWS, D/2] that hold no BF16 numbers.

    With BF16 operands each number is the sum of two, which together keep 16 bits: five more than the FP16 of the result.
    """
    if tl.bfloat16 == TYPE:
        i, column = tl.arange(0, D // 2)[:, None], first + tl.arange(0, WIDTH)[None, :]
        at = rotation + i * D + column
        out = tl.zeros((ROWS, WIDTH), tl.float32)
        for half in tl.static_range(2):
            x = low if half == 0 else high
            matrix = tl.load(at + half * (D // 2 * D))
            near = round_to(x, TYPE)
            out = dot(near, matrix, dot(round_to(x - near.to(tl.float32), TYPE), matrix, out, TYPE), TYPE)
    else:
        out = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
    return out


@triton.jit
def for_stretch(low, high, stretch, turning, head, D: tl.constexpr):
    """Queries of one KV head, given as halves [ROWS, D/2] of `places`, as the keys of a stretch meet them.

    Args:
        turning: of `arguments.Turning`.
    Returns:
        low, high [ROWS, D/2] fp32; gains [ROWS] of `query_gains`; and what logits lack [ROWS]: their products with K's mean.
    """
    dim = tl.arange(0, D // 2)
    at = stretch * (D // 2) + dim
    cos, sin = tl.load(turning.cos + at)[None, :], tl.load(turning.sin + at)[None, :]
    low, high = turned_back(low.to(tl.float32), high.to(tl.float32), cos, sin)
    mean_low, mean_high = (
        tl.load(turning.mean + head * D + dim)[None, :],
        tl.load(turning.mean + head * D + D // 2 + dim)[None, :],
    )
    lacks = tl.sum(low * mean_low, 1) + tl.sum(high * mean_high, 1)
    return low, high, query_gains(low, high, turning.largest + head * D, D), lacks


@triton.jit
def store_rotated(
    low, high, token, head, matrix, tokens, first, share, shares, rotation, out, gains, lacks, turning,
    HEADS: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns first … first + WIDTH - 1 of rotated queries [ROWS], rounded to out's dtype.

    Of learned keys once for each stretch that one of them sees: of `shares` programs with the same columns each takes every
    `shares`-th, and the program of the first columns stores gains and what logits lack.

    Args:
        out, gains, lacks: of `layout.Rotated`.
        turning: of `arguments.Turning`.
    """
    live = token < tokens
    vector, column = token * HEADS + head, first + tl.arange(0, WIDTH)[None, :]
    if gains is None:
        rotated = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
        tl.store(out + vector[:, None].to(tl.int64) * D + column, round_to(rotated, out.dtype.element_ty), live[:, None])
    else:
        position = tl.load(turning.positions + token, live, 0).to(tl.int32)
        begin = 0
        if turning.WINDOW > 0:
            begin = tl.maximum(tl.min(tl.where(live, position, 2147483646), 0) + 1 - turning.WINDOW, 0) // STRETCH
        for stretch in range(begin + share, tl.max(position, 0) // STRETCH + 1, shares):
            now_low, now_high, gain, lack = for_stretch(low, high, stretch, turning, matrix, D)
            rotated = rotate_finely(
                now_low, now_high, turning.rotation + matrix * (D * D), first, ROWS, D, WIDTH, turning.TYPE
            ) / gain[:, None]  # fmt: skip
            place = vector.to(tl.int64) + stretch * (tokens * HEADS)
            tl.store(out + place[:, None] * D + column, round_to(rotated, out.dtype.element_ty), live[:, None])
            if first == 0:
                tl.store(gains + place, gain, live)
                tl.store(lacks + place, lack, live)


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    q, out, gains, lacks, rotation, turning, tokens,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """out [tokens, HEADS, D] = q [tokens, HEADS, D] @ rotation [MATRICES, D, D], rounded to out's dtype.

    For learned keys out is [stretches, tokens, HEADS, D], and gains and lacks of `layout.Rotated` are stored as well.

    Grid: [tiles of `vector_ids`, D / WIDTH, programs that share the stretches].
    """
    token, head, matrix = vector_ids(tl.program_id(0), tokens, HEADS, MATRICES, ROWS)
    low_dims, high_dims = places(HALF, D)
    live, at = (token < tokens)[:, None], q + (token * HEADS + head)[:, None].to(tl.int64) * D
    low, high = tl.load(at + low_dims[None, :], live, 0.0), tl.load(at + high_dims[None, :], live, 0.0)
    store_rotated(
        low, high, token, head, matrix, tokens, tl.program_id(1) * WIDTH, tl.program_id(2), tl.num_programs(2), rotation,
        out, gains, lacks, turning, HEADS, D, TYPE, ROWS, WIDTH,
    )  # fmt: skip
