"""All that stands between the packed projections and attention, in one launch.

Bias, norms of Q and K, RoPE; queries are rotated into the domain of the codes, K and V are quantized and stored.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.quantize import append_and_keep
from haarkv.tq_ops.cuda.rotate import round_to, store_rotated, vector_ids


@triton.jit
def load_projection(qkv, bias, token, column, live, ROW: tl.constexpr, D: tl.constexpr):
    """Halves [ROWS, D/2] fp32 of the vectors that begin at `column` [ROWS] of the rows `token` [ROWS] of qkv [T, ROW]."""
    dim = tl.arange(0, D // 2)[None, :]
    at = qkv + (token.to(tl.int64) * ROW + column)[:, None] + dim
    low, high = tl.load(at, live[:, None], 0.0), tl.load(at + D // 2, live[:, None], 0.0)
    if bias is not None:
        at = bias + column[:, None] + dim
        low += tl.load(at, live[:, None], 0.0).to(tl.float32)
        high += tl.load(at + D // 2, live[:, None], 0.0).to(tl.float32)
    return low, high


@triton.jit
def norm_halves(low, high, weight, eps, D: tl.constexpr):
    """x * rsqrt(mean(x**2) + eps) * weight of vectors given as halves; weight [D]."""
    dim = tl.arange(0, D // 2)
    factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    low = low * factor * tl.load(weight + dim).to(tl.float32)[None, :]
    return low, high * factor * tl.load(weight + D // 2 + dim).to(tl.float32)[None, :]


@triton.jit
def rope_halves(low, high, cos, sin, token, live, D: tl.constexpr):
    """Half-split rotary embedding of vectors given as halves; cos, sin [T, D/2] fp32."""
    at = token.to(tl.int64)[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos + at, live[:, None], 0.0), tl.load(sin + at, live[:, None], 0.0)
    return low * c - high * s, high * c + low * s


@triton.jit
def rotate_queries(
    program, qkv, bias, weight, eps, cos, sin, tokens, queries, rotated, gains, lacks, rotation, turning, shares,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of ROWS rotated queries: D / WIDTH times `shares` programs have the same tile.

    The first of them also stores the queries as they were before, where there is room in `queries`; without `rotated`, that
    is all.
    """
    tile_programs = shares * (D // WIDTH)
    token, head, matrix = vector_ids(program // tile_programs, tokens, HEADS, MATRICES, ROWS)
    part = program % tile_programs
    live, vector = token < tokens, (token * HEADS + head)[:, None].to(tl.int64)
    low, high = load_projection(qkv, bias, token, head * D, live, ROW, D)
    if weight is not None:
        low, high = norm_halves(low, high, weight, eps, D)
    low, high = rope_halves(low, high, cos, sin, token, live, D)
    low, high = round_to(low, ROUNDED), round_to(high, ROUNDED)
    if queries is not None:  # noqa: SIM102
        if part == 0:
            at = queries + vector * D + tl.arange(0, D // 2)[None, :]
            tl.store(at, low, live[:, None])
            tl.store(at + D // 2, high, live[:, None])
    if rotated is not None:
        store_rotated(
            low, high, token, head, matrix, tokens, part % (D // WIDTH) * WIDTH, part // (D // WIDTH), shares, rotation,
            rotated, gains, lacks, turning, HEADS, D, TYPE, ROWS, WIDTH,
        )  # fmt: skip


@triton.jit
def store_projected(
    tile, side: tl.constexpr, qkv, bias, weight, eps, cos, sin, tokens, into, keeping, sequences, positions, slots, fault,
    layer,
    FIRST: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of K or V from the projections to its slots; `side` is 0 of K, which is normed and roped, and 1 of V.

    Args:
        FIRST: head of qkv that is the first of this side.
    """
    token, head, matrix = vector_ids(tile, tokens, HEADS, HEADS if into.LEARNED else 1, ROWS)
    live = token < tokens
    low, high = load_projection(qkv, bias, token, (FIRST + head) * D, live, ROW, D)
    if side == 0:
        if weight is not None:
            low, high = norm_halves(low, high, weight, eps, D)
        low, high = rope_halves(low, high, cos, sin, token, live, D)
    append_and_keep(
        low, high, token, head, matrix, live, side, into, keeping, sequences, positions, slots, fault, layer,
        HEADS, D, BLOCK, ROWS, True, False,
    )  # fmt: skip


# As in `quantize_kernel`: layers and batches are no reason to compile anew.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences", "shares"])
def prologue_kernel(
    qkv, bias, q_norm, k_norm, eps, cos, sin, tokens, queries, rotated, gains, lacks, rotation, turning, shares,
    k, v, keeping, sequences, positions, slots, fault, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROUNDED: tl.constexpr, Q_TYPE: tl.constexpr,
):  # fmt: skip
    """From qkv [tokens, (HEADS + 2 * KV_HEADS) * D] fp32 to rotated queries [tokens, HEADS, D] and to codes and scales.

    Grid: [tiles of K + tiles of V + tiles of queries * D / WIDTH * shares], each of `vector_ids`. The programs of K and V come
    first, since each of them makes a vector's whole row of codes; those of Q make WIDTH columns.

    Args:
        bias, q_norm, k_norm: None without.
        queries: where they are stored unrotated as well; None where nothing asks for them.
        rotated, gains, lacks: as in `rotate.store_rotated`; rotated is None where attention rotates queries itself.
        rotation, turning: K's.
        shares: programs that share the stretches of learned keys, else 1.
        ROUNDED: the model's dtype, to which queries are rounded before they are rotated.
        Q_TYPE: operand type of their rotation.
        The others: as in `quantize_kernel`.
    """
    program = tl.program_id(0)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    n_v = tl.cdiv(tokens * KV_HEADS, ROWS)
    n_k = KV_HEADS * tl.cdiv(tokens, ROWS) if k.LEARNED else n_v
    if program < n_k:
        store_projected(
            program, 0, qkv, bias, k_norm, eps, cos, sin, tokens, k, keeping, sequences, positions, slots, fault, layer,
            HEADS, KV_HEADS, width, D, BLOCK, ROWS,
        )  # fmt: skip
    elif program < n_k + n_v:
        store_projected(
            program - n_k, 1, qkv, bias, None, eps, cos, sin, tokens, v, keeping, sequences, positions, slots, fault, layer,
            HEADS + KV_HEADS, KV_HEADS, width, D, BLOCK, ROWS,
        )  # fmt: skip
    else:
        rotate_queries(
            program - n_k - n_v, qkv, bias, q_norm, eps, cos, sin, tokens, queries, rotated, gains, lacks, rotation,
            turning, shares, HEADS, KV_HEADS if k.LEARNED else 1, width, D, ROWS, WIDTH, ROUNDED, Q_TYPE,
        )  # fmt: skip
