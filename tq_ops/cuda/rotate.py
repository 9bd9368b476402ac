"""Rounding, products and turning vectors into the domain of the codes: pieces of kernels, and the rotation of queries."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """FP32 x as TYPE, to nearest, ties to even. Triton's interpreter would cut BF16 off instead of rounding it."""
    if TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x).to(TYPE)
    return x.to(TYPE)


@triton.jit
def dot(a, b, into, TYPE: tl.constexpr):
    """`into + a @ b` in FP32, operands as TYPE.

    FP32 operands go through three TF32 products, which keep FP32's precision on tensor cores.
    """
    if TYPE == tl.float32:
        return tl.dot(a.to(TYPE), b.to(TYPE), into, input_precision="tf32x3")
    return tl.dot(a.to(TYPE), b.to(TYPE), into)


@triton.jit
def turn(low, high, rotation, rows: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, BACK: tl.constexpr):
    """Both halves [rows, D/2] of `x @ rotation`, or of `x @ rotation.T` with BACK, in FP32.

    Args:
        low, high: [rows, D/2], the halves of x.
        rotation: pointer to [D, D] fp32.
    """
    half: tl.constexpr = D // 2
    i = tl.arange(0, half)
    # BACK reads the same matrix along its other axis.
    down: tl.constexpr = 1 if BACK else D
    across: tl.constexpr = D if BACK else 1
    corner = rotation + i[:, None] * down + i[None, :] * across
    zero = tl.zeros((rows, half), tl.float32)
    turned_low = dot(high, tl.load(corner + half * down), dot(low, tl.load(corner), zero, TYPE), TYPE)
    right = corner + half * across
    turned_high = dot(high, tl.load(right + half * down), dot(low, tl.load(right), zero, TYPE), TYPE)
    return turned_low, turned_high


@triton.jit
def rotate_kernel(
    q, out, rotation, vectors,
    D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out [vectors, D] = q [vectors, D] @ rotation, rounded to out's dtype. Grid: [vectors / ROWS]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
    live = row[:, None] < vectors
    low, high = tl.load(q + at, live, 0.0), tl.load(q + at + D // 2, live, 0.0)
    low, high = turn(low, high, rotation, ROWS, D, TYPE, False)
    tl.store(out + at, rounded(low, out.dtype.element_ty), live)
    tl.store(out + at + D // 2, rounded(high, out.dtype.element_ty), live)
