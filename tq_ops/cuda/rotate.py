"""Pieces of kernels: rounding, products and rotating vectors into the domain of the codes; the kernel that rotates queries.

Of learned coordinates every KV head has its own matrix, so a program takes vectors that share one (`vectors_of`).
"""

import triton
import triton.language as tl


@triton.jit
def rounded(x, TYPE: tl.constexpr):
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
def vectors_of(tile, tokens, HEADS: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr):
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
def rotate_columns(
    low, high, rotation, first,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Columns first … first + WIDTH - 1 of `x @ rotation`, or of `x @ rotation.T` with BACK: [ROWS, WIDTH] fp32.

    Args:
        low, high: [ROWS, D/2], the halves of x; a single row is multiplied without tensor cores, which take 16.
        rotation: pointer to [D, D] bf16 or fp32.
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
def gains_of(low, high, largest, D: tl.constexpr):
    """Powers of two [ROWS], at least 1, by which queries in learned coordinates are divided: FP16 then holds them.

    Args:
        low, high: [ROWS, D/2], queries before they are multiplied.
        largest: what bounds a query's numbers; pointer to one head's of `layout.Learned.largest`.
    """
    dim = tl.arange(0, D // 2)
    of_low, of_high = tl.load(largest + dim)[None, :], tl.load(largest + D // 2 + dim)[None, :]
    most = tl.sum(tl.abs(low.to(tl.float32)) * of_low, 1) + tl.sum(tl.abs(high.to(tl.float32)) * of_high, 1)
    return power_of_two(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 126 - 15, 0))


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    q, out, gains, rotation, largest, tokens,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [tokens, HEADS, D] = q [tokens, HEADS, D] @ rotation [MATRICES, D, D], rounded to out's dtype.

    Of learned coordinates they are divided by their gains [tokens, HEADS] fp32 of `gains_of`, which are stored as well; else
    `gains` is None.

    Grid: [tiles of `vectors_of`, D / WIDTH].
    """
    token, head, matrix = vectors_of(tl.program_id(0), tokens, HEADS, MATRICES, ROWS)
    first, live = tl.program_id(1) * WIDTH, (token < tokens)[:, None]
    vector = (token * HEADS + head)[:, None].to(tl.int64)
    at = q + vector * D + tl.arange(0, D // 2)[None, :]
    low, high = tl.load(at, live, 0.0), tl.load(at + D // 2, live, 0.0)
    rotated = rotate_columns(low, high, rotation + matrix * (D * D), first, ROWS, D, WIDTH, TYPE, False)
    if gains is not None:
        gain = gains_of(low, high, largest + matrix * D, D)
        rotated = rotated / gain[:, None]
        tl.store(gains + token * HEADS + head, gain, token < tokens)
    at = out + vector * D + first + tl.arange(0, WIDTH)[None, :]
    tl.store(at, rounded(rotated, out.dtype.element_ty), live)
