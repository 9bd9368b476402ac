"""Pieces of kernels: rounding, products and rotating vectors into the domain of the codes; the kernel that rotates queries."""

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


@triton.jit(do_not_specialize=["vectors"])
def rotate_kernel(
    q, out, rotation, vectors,
    D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [vectors, D] = q [vectors, D] @ rotation, rounded to out's dtype. Grid: [vectors / ROWS, D / WIDTH]."""
    row, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDTH
    vector, live = row[:, None].to(tl.int64) * D, row[:, None] < vectors
    at = q + vector + tl.arange(0, D // 2)[None, :]
    low, high = tl.load(at, live, 0.0), tl.load(at + D // 2, live, 0.0)
    rotated = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
    at = out + vector + first + tl.arange(0, WIDTH)[None, :]
    tl.store(at, rounded(rotated, out.dtype.element_ty), live)
