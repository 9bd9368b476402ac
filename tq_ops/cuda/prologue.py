"""All that stands between the packed projections and attention, in one launch.

Bias, norms of Q and K, RoPE; queries are rotated into the domain of the codes, K and V are quantized and stored.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.quantize import append, finite_with_slot
from haarkv.tq_ops.cuda.rotate import gains_of, rotate_columns, rounded, vectors_of
from haarkv.tq_ops.cuda.window import keep


@triton.jit
def projected(qkv, bias, token, column, live, ROW: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr):
    """Halves [ROWS, D/2] fp32 of the vectors that begin at `column` [ROWS] of the rows `token` [ROWS] of qkv [T, ROW]."""
    dim = tl.arange(0, D // 2)[None, :]
    at = qkv + (token.to(tl.int64) * ROW + column)[:, None] + dim
    low, high = tl.load(at, live[:, None], 0.0), tl.load(at + D // 2, live[:, None], 0.0)
    if BIASED:
        at = bias + column[:, None] + dim
        low += tl.load(at, live[:, None], 0.0).to(tl.float32)
        high += tl.load(at + D // 2, live[:, None], 0.0).to(tl.float32)
    return low, high


@triton.jit
def normed(low, high, weight, eps, D: tl.constexpr):
    """x * rsqrt(mean(x**2) + eps) * weight of vectors given as halves; weight [D]."""
    dim = tl.arange(0, D // 2)
    factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    low = low * factor * tl.load(weight + dim).to(tl.float32)[None, :]
    return low, high * factor * tl.load(weight + D // 2 + dim).to(tl.float32)[None, :]


@triton.jit
def roped(low, high, cos, sin, token, live, D: tl.constexpr):
    """Half-split rotary embedding of vectors given as halves; cos, sin [T, D/2] fp32."""
    at = token.to(tl.int64)[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos + at, live[:, None], 0.0), tl.load(sin + at, live[:, None], 0.0)
    return low * c - high * s, high * c + low * s


@triton.jit
def rotate_queries(
    program, qkv, bias, weight, eps, cos, sin, tokens, queries, rotated, gains, rotation, largest,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, LEARNED: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr,
    TYPE: tl.constexpr, UNROTATED: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of ROWS rotated queries: program n makes part n % (W / WIDTH) of tile n / (W / WIDTH).

    With UNROTATED the first part's program also stores the queries as they were before, in `queries`.
    """
    token, head, matrix = vectors_of(program // (W // WIDTH), tokens, HEADS, MATRICES, ROWS)
    live, vector = token < tokens, (token * HEADS + head)[:, None].to(tl.int64)
    low, high = projected(qkv, bias, token, head * D, live, ROW, D, BIASED)
    if NORMED:
        low, high = normed(low, high, weight, eps, D)
    low, high = roped(low, high, cos, sin, token, live, D)
    first = (program % (W // WIDTH)) * WIDTH
    low, high = rounded(low, ROUNDED), rounded(high, ROUNDED)
    columns = rotate_columns(low, high, rotation + matrix * (D * W), first, ROWS, D, W, WIDTH, TYPE, False)
    if LEARNED:
        gain = gains_of(low, high, largest + matrix * D, D)
        columns = columns / gain[:, None]
        if first == 0:
            tl.store(gains + token * HEADS + head, gain, live)
    if UNROTATED:  # noqa: SIM102
        if first == 0:
            at = queries + vector * D + tl.arange(0, D // 2)[None, :]
            tl.store(at, low, live[:, None])
            tl.store(at + D // 2, high, live[:, None])
    at = rotated + vector * W + first + tl.arange(0, WIDTH)[None, :]
    tl.store(at, rounded(columns, rotated.dtype.element_ty), live[:, None])


@triton.jit
def store_projected(
    tile, side: tl.constexpr, qkv, bias, weight, eps, cos, sin, tokens, codes, scales, codes_stride, scales_stride, slots,
    forward, mean, numbers, centroids, boundaries, fault, layer, window, rows, positions, query_start_loc, sequences,
    FIRST: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
    ROUNDS_UNIT: tl.constexpr, SMALLEST: tl.constexpr, SATURATES: tl.constexpr, LEARNED: tl.constexpr, TYPE: tl.constexpr,
    SINK: tl.constexpr, RING: tl.constexpr, SEQUENCE_BITS: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """A tile of K or V from the projections to its slots; `side` is 0 of K, which is normed and roped, and 1 of V.

    Args:
        FIRST: head of qkv that is the first of this side.
    """
    token, head, matrix = vectors_of(tile, tokens, HEADS, HEADS if LEARNED else 1, ROWS)
    live = token < tokens
    low, high = projected(qkv, bias, token, (FIRST + head) * D, live, ROW, D, BIASED)
    if side == 0:
        if NORMED:
            low, high = normed(low, high, weight, eps, D)
        low, high = roped(low, high, cos, sin, token, live, D)
    kept_first: tl.constexpr = LEARNED and SATURATES  # as in `quantize.store_side`
    if kept_first and SINK + RING > 0:
        keep(
            low, high, token, head, finite_with_slot(low, high, token, slots, live), window, rows, positions,
            query_start_loc, sequences, HEADS, D, SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip
    live = append(
        low, high, token, head, matrix, live, side,
        codes, scales, codes_stride, scales_stride, slots, forward, mean, numbers, centroids, boundaries, fault, layer,
        D, BITS, N, W, BLOCK, ROWS, ROUNDS_UNIT, SMALLEST, SATURATES, LEARNED, TYPE, True,
    )  # fmt: skip
    if not kept_first and SINK + RING > 0:
        keep(
            low, high, token, head, live, window, rows, positions, query_start_loc, sequences,
            HEADS, D, SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip


# As in `quantize_kernel`: layers and batches are no reason to compile anew.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences"])
def prologue_kernel(
    qkv, bias, q_norm, k_norm, eps, cos, sin, tokens, queries, rotated, gains,
    k_codes, v_codes, k_scales, v_scales, k_codes_stride, v_codes_stride, k_scales_stride, v_scales_stride, slots,
    rotation, largest, k_forward, v_forward, k_mean, v_mean, k_numbers, v_numbers,
    k_centroids, v_centroids, k_boundaries, v_boundaries, fault, layer,
    k_window, v_window, rows, positions, query_start_loc, sequences,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    K_N: tl.constexpr, V_N: tl.constexpr, K_W: tl.constexpr, V_W: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
    K_ROUNDS: tl.constexpr, V_ROUNDS: tl.constexpr, K_SMALLEST: tl.constexpr, V_SMALLEST: tl.constexpr,
    K_SATURATES: tl.constexpr, V_SATURATES: tl.constexpr, K_LEARNED: tl.constexpr, V_LEARNED: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, ROUNDED: tl.constexpr, Q_TYPE: tl.constexpr,
    SINK: tl.constexpr, RING: tl.constexpr, SEQUENCE_BITS: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """From qkv [tokens, (HEADS + 2 * KV_HEADS) * D] fp32 to rotated queries [tokens, HEADS, K_W] and to codes and scales.

    Where SINK or RING says that tokens are kept in BF16, it stores those, as `window.keep`, and the queries unrotated as well.

    Grid: [tiles of K + tiles of V + tiles of queries * K_W / WIDTH], each of `vectors_of`. The programs of K and V come first,
    since each of them makes a vector's whole row of codes; those of Q make WIDTH columns.

    Args:
        bias, q_norm, k_norm: not read without BIASED and NORMED.
        gains, rotation, largest: of the queries, as in `rotate.rotate_kernel`; rotation and largest are K's.
        ROUNDED: the model's dtype, to which queries are rounded before they are rotated.
        Q_TYPE: operand type of their rotation.
        The others: as in `quantize_kernel`.
    """
    program = tl.program_id(0)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    together, apart = tl.cdiv(tokens * KV_HEADS, ROWS), KV_HEADS * tl.cdiv(tokens, ROWS)
    of_k, of_v = apart if K_LEARNED else together, apart if V_LEARNED else together
    if program < of_k:
        store_projected(
            program, 0, qkv, bias, k_norm, eps, cos, sin, tokens, k_codes, k_scales, k_codes_stride, k_scales_stride, slots,
            k_forward, k_mean, k_numbers, k_centroids, k_boundaries, fault, layer,
            k_window, rows, positions, query_start_loc, sequences,
            HEADS, KV_HEADS, width, D, K_BITS, K_N, K_W, BLOCK, ROWS, BIASED, NORMED,
            K_ROUNDS, K_SMALLEST, K_SATURATES, K_LEARNED, K_TYPE, SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip
    elif program < of_k + of_v:
        store_projected(
            program - of_k, 1, qkv, bias, k_norm, eps, cos, sin, tokens, v_codes, v_scales, v_codes_stride, v_scales_stride,
            slots, v_forward, v_mean, v_numbers, v_centroids, v_boundaries, fault, layer,
            v_window, rows, positions, query_start_loc, sequences,
            HEADS + KV_HEADS, KV_HEADS, width, D, V_BITS, V_N, V_W, BLOCK, ROWS, BIASED, NORMED,
            V_ROUNDS, V_SMALLEST, V_SATURATES, V_LEARNED, V_TYPE, SINK, RING, SEQUENCE_BITS, ONE_EACH,
        )  # fmt: skip
    else:
        rotate_queries(
            program - of_k - of_v, qkv, bias, q_norm, eps, cos, sin, tokens, queries, rotated, gains, rotation, largest,
            HEADS, KV_HEADS if K_LEARNED else 1, K_LEARNED, width, D, K_W, ROWS, WIDTH, BIASED, NORMED, ROUNDED, Q_TYPE,
            SINK + RING > 0,
        )  # fmt: skip
