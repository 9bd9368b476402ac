"""Quantize and append: one launch rotates K and V of all new tokens and heads and writes codes and scales to their slots.

A vector of learned coordinates is multiplied by all of them, for its length, and by those that own levels, in the order of the
levels. So each level is chosen where it is stored: its column goes through its coordinate's stages up to its own.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.planes import store_codes
from haarkv.tq_ops.cuda.rotate import power_of_two, rotate_columns, rounded, vectors_of
from haarkv.tq_ops.cuda.window import keep


@triton.jit
def exact_norm(low, high):
    """Unit vectors and L2 norms without underflow or overflow, as `tq_ops.formats.turboquant.exact_norm`.

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
            higher = level + (1 << (BITS - 1 - bit))
            level = tl.where(y >= tl.load(boundaries + higher - 1), higher, level)
    return level


@triton.jit
def by_rotation(
    low, high, rotation, centroids, boundaries,
    D: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ROUNDS_UNIT: tl.constexpr, SMALLEST: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Levels [ROWS, D/2] of both halves of rotated vectors, and their scales [ROWS] fp32."""
    low, high, norm = exact_norm(low, high)
    small = norm <= SMALLEST
    norm = tl.where(small, 0.0, norm)
    low, high = tl.where(small[:, None], 0.0, low), tl.where(small[:, None], 0.0, high)
    if ROUNDS_UNIT:
        low, high = rounded(low, tl.bfloat16), rounded(high, tl.bfloat16)
    rotated_low = rotate_columns(low, high, rotation, 0, ROWS, D, D, D // 2, TYPE, False)
    rotated_high = rotate_columns(low, high, rotation, D // 2, ROWS, D, D, D // 2, TYPE, False)
    low, high = levels(rotated_low, boundaries, BITS), levels(rotated_high, boundaries, BITS)
    low_centroid, high_centroid = tl.load(centroids + low), tl.load(centroids + high)
    length = tl.sqrt_rn(tl.sum(low_centroid * low_centroid, 1) + tl.sum(high_centroid * high_centroid, 1))
    return low, high, tl.div_rn(norm, length)


@triton.jit
def refined(y, numbers, first, centroids, boundaries, D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """Levels [ROWS, W/2] of a half whose first column is `first`, and what they restore: its weighted square [ROWS].

    Args:
        y: [ROWS, W/2], the coordinate of each level, of a vector of length 1.
        numbers: one head's row of `layout.Learned.numbers`.
    """
    column = first + tl.arange(0, W // 2)
    weight, stage = tl.load(numbers + D + column)[None, :], tl.load(numbers + D + W + column)[None, :]
    level = levels(y, boundaries, BITS)
    restored = tl.load(centroids + level)
    left = y - restored
    for finer in tl.static_range(1, 3):
        step = tl.load(numbers + D + 2 * W + finer - 1)
        next_level = levels(tl.div_rn(left, step + tl.zeros(y.shape, tl.float32)), boundaries, BITS)
        more = step * tl.load(centroids + next_level)
        level = tl.where(stage >= finer, next_level, level)
        restored = tl.where(stage >= finer, restored + more, restored)
        left -= more
    return level, tl.sum(weight * restored * restored, 1)


@triton.jit
def by_coordinates(
    low, high, mean, forward, numbers, centroids, boundaries,
    D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """As `by_rotation`, of learned coordinates; mean, forward and numbers are one head's, as in `layout.Learned`."""
    dim = tl.arange(0, D // 2)
    low, high = low - tl.load(mean + dim)[None, :], high - tl.load(mean + D // 2 + dim)[None, :]
    low, high, gamma = exact_norm(low, high)
    low, high = rounded(low, tl.bfloat16), rounded(high, tl.bfloat16)
    all_low = rotate_columns(low, high, forward, 0, ROWS, D, D + W, D // 2, TYPE, False)
    all_high = rotate_columns(low, high, forward, D // 2, ROWS, D, D + W, D // 2, TYPE, False)
    of_low, of_high = tl.load(numbers + dim)[None, :], tl.load(numbers + D // 2 + dim)[None, :]
    rho = tl.sqrt_rn(tl.sum(of_low * all_low * all_low, 1) + tl.sum(of_high * all_high * all_high, 1))
    divisor = tl.where(rho > 0, rho, 1.0)[:, None]
    low_level = tl.div_rn(rotate_columns(low, high, forward, D, ROWS, D, D + W, W // 2, TYPE, False), divisor)
    high_level = tl.div_rn(rotate_columns(low, high, forward, D + W // 2, ROWS, D, D + W, W // 2, TYPE, False), divisor)
    low_level, low_share = refined(low_level, numbers, 0, centroids, boundaries, D, W, BITS)
    high_level, high_share = refined(high_level, numbers, W // 2, centroids, boundaries, D, W, BITS)
    kept = tl.sqrt_rn(low_share + high_share)
    return low_level, high_level, tl.where(kept > 0, tl.div_rn(gamma * rho, tl.where(kept > 0, kept, 1.0)), 0.0)


@triton.jit
def append(
    low, high, token, head, matrix, live, side: tl.constexpr,
    codes, scales, codes_stride, scales_stride, slots, forward, mean, numbers, centroids, boundaries, fault, layer,
    D: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ROUNDS_UNIT: tl.constexpr, SMALLEST: tl.constexpr, SATURATES: tl.constexpr, LEARNED: tl.constexpr, TYPE: tl.constexpr,
    WRITE: tl.constexpr, STAND_IN: tl.constexpr = False,
):  # fmt: skip
    """Quantize vectors [ROWS, D], given as halves, and store them at BITS a level; K and V alike.

    A vector that is not finite, or too large for a format that does not saturate, is not stored: the first of them, in the
    order layer, side, token, head, is left in `fault` [1] int64 as `fault_key` packs it. A negative slot is skipped. With
    STAND_IN a vector that is not finite is noted and stored as well, zeros in place of its numbers that are not.

    Args:
        matrix: with LEARNED the head of all these vectors, whose coordinates `forward`, `mean` and `numbers` hold.
    Returns:
        [ROWS], which vectors are stored, or would be without WRITE.
    """
    # inf - inf and NaN - NaN are NaN, which is not 0.
    bad = (tl.sum(low - low, 1) + tl.sum(high - high, 1)) != 0
    left_out = bad
    if STAND_IN:
        low, high = tl.where(low - low == 0, low, 0.0), tl.where(high - high == 0, high, 0.0)
        left_out = tl.zeros(bad.shape, tl.int1)
    if LEARNED:
        low, high, scale = by_coordinates(
            low, high, mean + matrix * D, forward + matrix * (D * (D + W)), numbers + matrix * (D + 2 * W + 2),
            centroids, boundaries, D, W, BITS, ROWS, TYPE,
        )  # fmt: skip
    else:
        low, high, scale = by_rotation(
            low, high, forward, centroids, boundaries, D, BITS, ROWS, ROUNDS_UNIT, SMALLEST, TYPE
        )  # fmt: skip
    if SATURATES:
        scale = tl.minimum(scale, 65504.0)
    else:
        bad, left_out = bad | (scale >= 65520.0), left_out | (scale >= 65520.0)
    slot = tl.load(slots + token, live, -1)
    live = live & (slot >= 0)
    key = ((layer.to(tl.int64) * 2 + side) << 48) + (token.to(tl.int64) << 16) + head
    tl.atomic_min(fault + tl.zeros((ROWS,), tl.int32), key, mask=live & bad)
    live = live & (left_out == 0)
    if WRITE:
        block, row = slot // BLOCK, head * BLOCK + slot % BLOCK
        store_codes(codes, block * codes_stride + row * (N * BITS // 8), live, low, high, N, W, BITS)
        tl.store(scales + block * scales_stride + row, scale.to(tl.float16), live)
    return live


@triton.jit
def store_side(
    x, side: tl.constexpr, codes, scales, codes_stride, scales_stride, slots, tokens,
    forward, mean, numbers, centroids, boundaries, fault, layer, window, rows, positions, query_start_loc, sequences,
    HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ROUNDS_UNIT: tl.constexpr, SMALLEST: tl.constexpr, SATURATES: tl.constexpr, LEARNED: tl.constexpr,
    TYPE: tl.constexpr, WRITE: tl.constexpr, STAND_IN: tl.constexpr,
    SINK: tl.constexpr, RING: tl.constexpr, SEQUENCE_BITS: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """What a program of `quantize_kernel` does of K or of V."""
    token, head, matrix = vectors_of(tl.program_id(0), tokens, HEADS, HEADS if LEARNED else 1, ROWS)
    live = token < tokens
    at = x + (token * HEADS + head)[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
    low, high = tl.load(at, live[:, None], 0.0).to(tl.float32), tl.load(at + D // 2, live[:, None], 0.0).to(tl.float32)
    live = append(
        low, high, token, head, matrix, live, side,
        codes, scales, codes_stride, scales_stride, slots, forward, mean, numbers, centroids, boundaries, fault, layer,
        D, BITS, N, W, BLOCK, ROWS, ROUNDS_UNIT, SMALLEST, SATURATES, LEARNED, TYPE, WRITE, STAND_IN,
    )  # fmt: skip
    if WRITE and SINK + RING > 0:
        keep(
            low, high, token, head, live, window, rows, positions, query_start_loc, sequences,
            HEADS, D, SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip


# Not specialized by their values: Triton would make a constant of layer 1, compile anew for layers that 16 divides, and for
# batches of one token.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences"])
def quantize_kernel(
    k, v, k_codes, v_codes, k_scales, v_scales, k_codes_stride, v_codes_stride, k_scales_stride, v_scales_stride,
    slots, tokens, k_forward, v_forward, k_mean, v_mean, k_numbers, v_numbers,
    k_centroids, v_centroids, k_boundaries, v_boundaries, fault, layer,
    k_window, v_window, rows, positions, query_start_loc, sequences,
    HEADS: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_N: tl.constexpr, V_N: tl.constexpr,
    K_W: tl.constexpr, V_W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    K_ROUNDS: tl.constexpr, V_ROUNDS: tl.constexpr, K_SMALLEST: tl.constexpr, V_SMALLEST: tl.constexpr,
    K_SATURATES: tl.constexpr, V_SATURATES: tl.constexpr, K_LEARNED: tl.constexpr, V_LEARNED: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, WRITE: tl.constexpr,
    STAND_IN: tl.constexpr, SINK: tl.constexpr, RING: tl.constexpr, SEQUENCE_BITS: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """Store k, v [tokens, HEADS, D] fp32 at slots [tokens] int64, and in BF16 where SINK or RING says so, as `window.keep`.

    Grid: [tiles of `vectors_of`, of the side that has more, 2], K's programs and V's.

    Args:
        k_forward, v_forward: `layout.Layout.forward`; with LEARNED k_mean, k_numbers and V's as in `layout.Learned`.
    """
    if tl.program_id(1) == 0:
        store_side(
            k, 0, k_codes, k_scales, k_codes_stride, k_scales_stride, slots, tokens,
            k_forward, k_mean, k_numbers, k_centroids, k_boundaries, fault, layer,
            k_window, rows, positions, query_start_loc, sequences,
            HEADS, D, K_BITS, K_N, K_W, BLOCK, ROWS, K_ROUNDS, K_SMALLEST, K_SATURATES, K_LEARNED, K_TYPE, WRITE, STAND_IN,
            SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip
    else:
        store_side(
            v, 1, v_codes, v_scales, v_codes_stride, v_scales_stride, slots, tokens,
            v_forward, v_mean, v_numbers, v_centroids, v_boundaries, fault, layer,
            v_window, rows, positions, query_start_loc, sequences,
            HEADS, D, V_BITS, V_N, V_W, BLOCK, ROWS, V_ROUNDS, V_SMALLEST, V_SATURATES, V_LEARNED, V_TYPE, WRITE, STAND_IN,
            SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip
