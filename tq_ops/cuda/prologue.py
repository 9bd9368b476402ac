"""All that stands between the packed projections and attention, in one launch.

Bias, norms of Q and K, RoPE; queries are rotated into the domain of the codes, K and V are quantized and stored.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.quantize import append
from haarkv.tq_ops.cuda.rotate import rotate_columns, rounded
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
    program, qkv, bias, weight, eps, cos, sin, tokens, queries, rotated, rotation,
    HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr, TYPE: tl.constexpr, UNROTATED: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of ROWS rotated queries: program n makes part n % (D / WIDTH) of tile n / (D / WIDTH).

    With UNROTATED the first part's program also stores the queries as they were before, in `queries`.
    """
    vector = (program // (D // WIDTH)) * ROWS + tl.arange(0, ROWS)
    token, head = vector // HEADS, vector % HEADS
    live = token < tokens
    low, high = projected(qkv, bias, token, head * D, live, ROW, D, BIASED)
    if NORMED:
        low, high = normed(low, high, weight, eps, D)
    low, high = roped(low, high, cos, sin, token, live, D)
    first = (program % (D // WIDTH)) * WIDTH
    low, high = rounded(low, ROUNDED), rounded(high, ROUNDED)
    columns = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
    if UNROTATED:  # noqa: SIM102
        if first == 0:
            at = queries + vector[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
            tl.store(at, low, live[:, None])
            tl.store(at + D // 2, high, live[:, None])
    at = rotated + vector[:, None].to(tl.int64) * D + first + tl.arange(0, WIDTH)[None, :]
    tl.store(at, rounded(columns, rotated.dtype.element_ty), live[:, None])


# As in `quantize_kernel`: layers and batches are no reason to compile anew.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences"])
def prologue_kernel(
    qkv, bias, q_norm, k_norm, eps, cos, sin, tokens, queries, rotated,
    k_codes, v_codes, k_scales, v_scales, k_codes_stride, v_codes_stride, k_scales_stride, v_scales_stride, slots,
    k_rotation, v_rotation, k_centroids, v_centroids, k_boundaries, v_boundaries, fault, layer,
    k_window, v_window, rows, positions, query_start_loc, sequences,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
    K_ROUNDS: tl.constexpr, V_ROUNDS: tl.constexpr, K_SMALLEST: tl.constexpr, V_SMALLEST: tl.constexpr,
    K_SATURATES: tl.constexpr, V_SATURATES: tl.constexpr, K_TYPE: tl.constexpr, V_TYPE: tl.constexpr,
    ROUNDED: tl.constexpr, Q_TYPE: tl.constexpr,
    SINK: tl.constexpr, RING: tl.constexpr, SEQUENCE_BITS: tl.constexpr, ONE_EACH: tl.constexpr,
):  # fmt: skip
    """From qkv [tokens, (HEADS + 2 * KV_HEADS) * D] fp32 to rotated queries [tokens, HEADS, D] and to codes and scales.

    Where SINK or RING says that tokens are kept in BF16, it stores those, as `window.keep`, and the queries unrotated as well.

    Grid: [2 * (vectors of K / ROWS) + vectors of Q / ROWS * D / WIDTH]. The programs of K and V come first, since each of them
    makes a vector's whole row of codes; those of Q make WIDTH columns.

    Args:
        bias, q_norm, k_norm: not read without BIASED and NORMED.
        ROUNDED: the model's dtype, to which queries are rounded before they are rotated.
        Q_TYPE: operand type of their rotation.
        The others: as in `quantize_kernel`.
    """
    program = tl.program_id(0)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    tiles = tl.cdiv(tokens * KV_HEADS, ROWS)
    if program < 2 * tiles:
        side = program // tiles
        vector = (program % tiles) * ROWS + tl.arange(0, ROWS)
        token, head = vector // KV_HEADS, vector % KV_HEADS
        live = token < tokens
        low, high = projected(qkv, bias, token, (HEADS + side * KV_HEADS + head) * D, live, width, D, BIASED)
        if side == 0:
            if NORMED:
                low, high = normed(low, high, k_norm, eps, D)
            low, high = roped(low, high, cos, sin, token, live, D)
            live = append(
                low, high, token, head, live, 0,
                k_codes, k_scales, k_codes_stride, k_scales_stride, slots, k_rotation, k_centroids, k_boundaries, fault, layer,
                D, K_BITS, BLOCK, ROWS, K_ROUNDS, K_SMALLEST, K_SATURATES, K_TYPE, True,
            )  # fmt: skip
            if SINK + RING > 0:
                keep(
                    low, high, token, head, live, k_window, rows, positions, query_start_loc, sequences,
                    KV_HEADS, D, SINK, RING, SEQUENCE_BITS, ONE_EACH,
                )  # fmt: skip
        else:
            live = append(
                low, high, token, head, live, 1,
                v_codes, v_scales, v_codes_stride, v_scales_stride, slots, v_rotation, v_centroids, v_boundaries, fault, layer,
                D, V_BITS, BLOCK, ROWS, V_ROUNDS, V_SMALLEST, V_SATURATES, V_TYPE, True,
            )  # fmt: skip
            if SINK + RING > 0:
                keep(
                    low, high, token, head, live, v_window, rows, positions, query_start_loc, sequences,
                    KV_HEADS, D, SINK, RING, SEQUENCE_BITS, ONE_EACH,
                )  # fmt: skip
    else:
        rotate_queries(
            program - 2 * tiles, qkv, bias, q_norm, eps, cos, sin, tokens, queries, rotated, k_rotation,
            HEADS, width, D, ROWS, WIDTH, BIASED, NORMED, ROUNDED, Q_TYPE, SINK + RING > 0,
        )  # fmt: skip
