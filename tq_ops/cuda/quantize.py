"""Quantize and append: one launch rotates K and V of all new tokens and heads and writes codes and scales to their slots.

Both are multiplied by a matrix whose columns are in the kernels' order, so each level is chosen where it is packed.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.in_bf16 import keep
from haarkv.tq_ops.cuda.planes import store_codes, store_columns
from haarkv.tq_ops.cuda.rotate import STRETCH, places, power_of_two, rotate_columns, round_to, turned_back, vector_ids


@triton.jit
def exact_norm(low, high):
    """Unit vectors and L2 norms without underflow or overflow, as `tq_ops.formats.rotated.exact_norm`.

    Returns:
        low, high [rows, D/2] of the unit vectors, zeros where x is zero; norm [rows].
    """
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    tiny = largest < 7.888609052210118e-31  # 2**-100: denormals first become normal numbers
    lift = tl.where(tiny, 18446744073709551616.0, 1.0)
    exponent = ((largest * lift).to(tl.int32, bitcast=True) >> 23) - 127
    # In two steps, since 2**-127 is no normal number.
    first = exponent >> 1
    down, further = power_of_two(-first), power_of_two(first - exponent)
    low = low * lift[:, None] * down[:, None] * further[:, None]
    high = high * lift[:, None] * down[:, None] * further[:, None]
    norm = tl.sqrt_rn(tl.sum(low * low, 1) + tl.sum(high * high, 1))
    divisor = tl.where(norm > 0, norm, 1.0)[:, None]
    norm = norm * power_of_two(first) * power_of_two(exponent - first) * tl.where(tiny, 5.421010862427522e-20, 1.0)
    return tl.div_rn(low, divisor), tl.div_rn(high, divisor), norm


@triton.jit
def levels(y, boundaries, BITS: tl.constexpr):
    """Number of boundaries [2**BITS - 1], ascending, that each coordinate reaches, int32."""
    level = tl.zeros(y.shape, tl.int32)
    if BITS <= 4:
        for index in tl.static_range(2**BITS - 1):
            level += (y >= tl.load(boundaries + index)).to(tl.int32)
    else:
        # Bit by bit from the top: BITS loads for each coordinate, rather than a comparison with each of many boundaries.
        for bit in tl.static_range(BITS):
            higher = level + 2 ** (BITS - 1 - bit)
            level = tl.where(y >= tl.load(boundaries + higher - 1), higher, level)
    return level


@triton.jit
def by_rotation(
    low, high, rotation, centroids, boundaries,
    D: tl.constexpr, BITS: tl.constexpr, ALONG: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Levels [ROWS, D/2] of both halves of rotated vectors, and their scales [ROWS] fp32."""
    low, high, norm = exact_norm(low, high)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    rotated_low = rotate_columns(low, high, rotation, 0, ROWS, D, D // 2, TYPE, False)
    rotated_high = rotate_columns(low, high, rotation, D // 2, ROWS, D, D // 2, TYPE, False)
    low, high = levels(rotated_low, boundaries, BITS), levels(rotated_high, boundaries, BITS)
    low_centroid, high_centroid = tl.load(centroids + low), tl.load(centroids + high)
    if ALONG:
        length = tl.sum(low_centroid * rotated_low, 1) + tl.sum(high_centroid * rotated_high, 1)
    else:
        length = tl.sqrt_rn(tl.sum(low_centroid * low_centroid, 1) + tl.sum(high_centroid * high_centroid, 1))
    return low, high, tl.where(length > 0, tl.div_rn(norm, tl.where(length > 0, length, 1.0)), 0.0)


@triton.jit
def fit_levels(y, gain, weight, width, centroids, boundaries):
    """Levels [ROWS, D/2] of half of the coordinates, at a gain, and two sums [ROWS] over these.

    Args:
        y: [ROWS, D/2], of deviation 1.
        weight, width: [1, D/2], of each coordinate, and bits of its level.
        centroids, boundaries: of all widths, as in `layout.Layout`.
    Returns:
        levels; the weighted product of y and of what they restore, and the weighted square of that.
    """
    level, value = tl.zeros(y.shape, tl.int32), gain * y
    width_offset = (1 << width) - 1 - width  # the first of its boundaries
    for bit in tl.static_range(6):
        half = (1 << width) >> (bit + 1)
        higher = level + half
        boundary = tl.load(boundaries + width_offset + higher - 1, half > 0, float("inf"))
        level = tl.where(value >= boundary, higher, level)
    centroid = tl.load(centroids + ((1 << width) - 2) + level)
    weighted_centroid = centroid * weight
    return level, tl.sum(weighted_centroid * y, 1), tl.sum(weighted_centroid * centroid, 1)


@triton.jit
def by_coordinates(low, high, into, matrix, D: tl.constexpr, ROWS: tl.constexpr):
    """As `by_rotation`, of learned keys; `into` is of `arguments.Write`, and `matrix` the head of all these vectors."""
    half, dim = tl.arange(0, D // 2), matrix * D + tl.arange(0, D // 2)
    low, high = low - tl.load(into.mean + dim)[None, :], high - tl.load(into.mean + D // 2 + dim)[None, :]
    low, high, gamma = exact_norm(low, high)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    forward = into.forward + matrix * (D * D)
    y_low = rotate_columns(low, high, forward, 0, ROWS, D, D // 2, into.TYPE, False)
    y_high = rotate_columns(low, high, forward, D // 2, ROWS, D, D // 2, into.TYPE, False)
    rho = tl.sqrt_rn((tl.sum(y_low * y_low, 1) + tl.sum(y_high * y_high, 1)) / D)
    weight_low, weight_high = tl.load(into.weights + dim)[None, :], tl.load(into.weights + D // 2 + dim)[None, :]
    length = gamma * tl.sqrt_rn(tl.sum(y_low * y_low * weight_low, 1) + tl.sum(y_high * y_high * weight_high, 1))
    divisor = tl.where(rho > 0, rho, 1.0)[:, None]
    y_low, y_high = tl.div_rn(y_low, divisor), tl.div_rn(y_high, divisor)
    width_low, width_high = tl.load(into.widths + half)[None, :], tl.load(into.widths + D // 2 + half)[None, :]
    level_low, level_high = tl.zeros((ROWS, D // 2), tl.int32), tl.zeros((ROWS, D // 2), tl.int32)
    square, best = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS,), -1.0, tl.float32)
    # A loop and not three copies of it, which take three times as long to compile.
    for attempt in tl.range(0, 3):
        gain = tl.load(into.gains + attempt)
        next_low, inner_low, square_low = fit_levels(y_low, gain, weight_low, width_low, into.centroids, into.boundaries)
        next_high, inner_high, square_high = fit_levels(y_high, gain, weight_high, width_high, into.centroids, into.boundaries)
        inner, next_square = inner_low + inner_high, square_low + square_high
        fit = tl.div_rn(inner * inner, next_square)
        better = fit > best
        level_low = tl.where(better[:, None], next_low, level_low)
        level_high = tl.where(better[:, None], next_high, level_high)
        square, best = tl.where(better, next_square, square), tl.where(better, fit, best)
    return level_low, level_high, tl.div_rn(length, tl.sqrt_rn(square))


@triton.jit
def by_stretch(low, high, token, live, into, positions, D: tl.constexpr):
    """Learned keys as their stretches store them; `into` is of `arguments.Write`, positions [tokens] int64."""
    # The positions of rows that only pad a batch mean nothing.
    stretch = tl.load(positions + token, live, 0) // STRETCH
    stretch = tl.minimum(tl.maximum(stretch, 0), into.STRETCHES - 1).to(tl.int32)
    at = stretch[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    return turned_back(low, high, tl.load(into.cos + at), tl.load(into.sin + at))


@triton.jit
def append(
    low, high, token, head, matrix, live, side: tl.constexpr, into, positions, slots, fault, layer,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, STAND_IN: tl.constexpr,
):  # fmt: skip
    """Quantize vectors [ROWS, D], given as halves, and store them; K and V alike.

    A vector that is not finite is not stored: the first of them, in the order layer, side, token, head, is left in `fault` [1]
    int64 as `layout.fault_place` reads it. A negative slot is skipped.
    With STAND_IN a vector that is not finite is noted and stored as well, zeros in place of its numbers that are not.

    Args:
        low, high: halves of `places`.
        matrix: of learned keys the head of all these vectors.
        into: of `arguments.Write`.
        positions: of the batch.
    Returns:
        [ROWS], which vectors are stored, or would be without WRITE.
    """
    if into.LEARNED and not STAND_IN:
        # What is too large to be turned is refused as well.
        low, high = by_stretch(low, high, token, live, into, positions, D)
    # inf - inf and NaN - NaN are NaN, which is not 0.
    bad = (tl.sum(low - low, 1) + tl.sum(high - high, 1)) != 0
    left_out = bad
    if STAND_IN:
        low, high = tl.where(low - low == 0, low, 0.0), tl.where(high - high == 0, high, 0.0)
        left_out = tl.zeros(bad.shape, tl.int1)
        if into.LEARNED:
            low, high = by_stretch(low, high, token, live, into, positions, D)
    if into.LEARNED:
        low, high, scale = by_coordinates(low, high, into, matrix, D, ROWS)
    else:
        low, high, scale = by_rotation(
            low, high, into.forward, into.centroids, into.boundaries, D, into.BITS, into.ALONG, ROWS, into.TYPE
        )  # fmt: skip
    scale = tl.minimum(scale, 65504.0)
    slot = tl.load(slots + token, live, -1)
    live = live & (slot >= 0)
    key = ((layer.to(tl.int64) * 2 + side) << 48) + (token.to(tl.int64) << 16) + head
    tl.atomic_min(fault + tl.zeros((ROWS,), tl.int32), key, mask=live & bad)
    live = live & (left_out == 0)
    if WRITE:
        block, row = slot // BLOCK, head * BLOCK + slot % BLOCK
        at = block * into.codes_stride + row * (D * into.BITS // 8)
        if into.LEARNED:
            store_columns(into, at, live, low, high, D)
        else:
            store_codes(into.codes, at, live, low, high, D, into.BITS)
        tl.store(into.scales + block * into.scales_stride + row, scale.to(tl.float16), live)
    return live


@triton.jit
def append_and_keep(
    low, high, token, head, matrix, live, side: tl.constexpr, into, keeping, sequences, positions, slots, fault, layer,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr,
    STAND_IN: tl.constexpr,
):  # fmt: skip
    """`append`, and what it stores in BF16 as well, where `keeping` says so."""
    keeps: tl.constexpr = WRITE and keeping.SINK + keeping.RING > 0
    # Learned coordinates take registers, and nothing finite is refused: the vectors need not wait until levels are chosen.
    if keeps and into.LEARNED:
        finite = (tl.sum(low - low, 1) + tl.sum(high - high, 1)) == 0
        valid = live & finite & (tl.load(slots + token, live, -1) >= 0)
        keep(low, high, token, head, valid, into.kept, keeping, sequences, HEADS, into.HALF, D)
    live = append(
        low, high, token, head, matrix, live, side, into, positions, slots, fault, layer, D, BLOCK, ROWS, WRITE, STAND_IN
    )  # fmt: skip
    if keeps and not into.LEARNED:
        keep(low, high, token, head, live, into.kept, keeping, sequences, HEADS, into.HALF, D)


@triton.jit
def store_side(
    x, side: tl.constexpr, into, keeping, sequences, positions, slots, tokens, fault, layer,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr,
    STAND_IN: tl.constexpr,
):  # fmt: skip
    """What a program of `quantize_kernel` does of K or of V."""
    token, head, matrix = vector_ids(tl.program_id(0), tokens, HEADS, HEADS if into.LEARNED else 1, ROWS)
    low_dims, high_dims = places(into.HALF, D)
    live, at = token < tokens, x + (token * HEADS + head)[:, None].to(tl.int64) * D
    low = tl.load(at + low_dims[None, :], live[:, None], 0.0).to(tl.float32)
    high = tl.load(at + high_dims[None, :], live[:, None], 0.0).to(tl.float32)
    append_and_keep(
        low, high, token, head, matrix, live, side, into, keeping, sequences, positions, slots, fault, layer,
        HEADS, D, BLOCK, ROWS, WRITE, STAND_IN,
    )  # fmt: skip


# Not specialized by their values: Triton would make a constant of layer 1, compile anew for layers that 16 divides, and for
# batches of one token.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences"])
def quantize_kernel(
    x_of_k, x_of_v, k, v, keeping, sequences, positions, slots, tokens, fault, layer,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr,
    STAND_IN: tl.constexpr,
):  # fmt: skip
    """Store K and V [tokens, HEADS, D] at slots [tokens] int64, and in BF16 where `keeping` says so.

    Grid: [tiles of `vector_ids`, of the side that has more, 2], K's programs and V's.

    Args:
        x_of_k, x_of_v: K and V, bf16 or fp32.
        k, v: of `arguments.Write`.
        keeping: of `arguments.Keeping`.
        positions: [tokens] int64; None where no keys are stored by stretches.
    """
    if tl.program_id(1) == 0:
        store_side(
            x_of_k, 0, k, keeping, sequences, positions, slots, tokens, fault, layer,
            HEADS, D, BLOCK, ROWS, WRITE, STAND_IN,
        )  # fmt: skip
    else:
        store_side(
            x_of_v, 1, v, keeping, sequences, positions, slots, tokens, fault, layer,
            HEADS, D, BLOCK, ROWS, WRITE, STAND_IN,
        )  # fmt: skip
