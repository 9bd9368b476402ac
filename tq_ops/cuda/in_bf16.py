"""Tokens that stay in BF16 beside the packed ones: storing them, and attention over them, whose result is one more part.

They lie in the model's own domain (`tq_ops.kv.residual_window`), so that every backend reads the same cache. Attention over
them is one launch before that over packed tokens: each query sees its sinks and its tail, as far as its sliding window
reaches, and nothing else. Its sums of V are brought into V's rotated domain, where `schedule.merge_kernel` and csrc/merge.cuh
add them to those of packed tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.arguments import Part, WindowPair, token_arguments
from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.layout import into_rotated
from haarkv.tq_ops.cuda.rotate import dot, places, round_to
from haarkv.tq_ops.cuda.schedule import find_column_tile, sequence_tiles
from haarkv.tq_ops.kv.cache import LayerView


@triton.jit
def token_sequence(token, query_start_loc, sequences, SEQUENCE_BITS: tl.constexpr):
    """The sequence of each new token [ROWS], bit by bit from the top: SEQUENCE_BITS loads a token."""
    sequence = tl.zeros(token.shape, tl.int32)
    for bit in tl.static_range(SEQUENCE_BITS):
        later = sequence + 2 ** (SEQUENCE_BITS - 1 - bit)
        start = tl.load(query_start_loc + later, later < sequences, 2147483647)
        sequence = tl.where(start <= token, later, sequence)
    return sequence


@triton.jit
def keep(low, high, token, head, live, window, into, sequences, HEADS: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr):
    """Keep vectors [ROWS, D], given as halves of `places`, in BF16: token j at `SINK + j % RING`, a sink at j as well.

    Args:
        live: [ROWS], which of them were stored packed.
        window: [num_rows, HEADS, SINK + RING, D] bf16, of K or of V.
        into: `arguments.Keeping`.
    """
    sequence = token_sequence(token, into.query_start_loc, sequences, into.SEQUENCE_BITS) if into.SEQUENCE_BITS > 0 else token
    row, position = tl.load(into.rows + sequence, live, 0), tl.load(into.positions + token, live, 0).to(tl.int32)
    at = window + ((row * HEADS + head) * ((into.SINK + into.RING) * D))[:, None]
    low_dims, high_dims = places(HALF, D)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    if into.RING > 0:
        newest = at + ((position % into.RING + into.SINK) * D)[:, None]
        tl.store(newest + low_dims[None, :], low, live[:, None])
        tl.store(newest + high_dims[None, :], high, live[:, None])
    if into.SINK > 0:
        first, live = at + (position * D)[:, None], live & (position < into.SINK)
        tl.store(first + low_dims[None, :], low, live[:, None])
        tl.store(first + high_dims[None, :], high, live[:, None])


@triton.jit(do_not_specialize=["sequences"])
def window_kernel(
    q, k_window, v_window, rows, parts, maxima, sums, tokens, sequences, matrix, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, RING: tl.constexpr,
    TYPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of new tokens over what they see in BF16. Grid: [column tiles, HEADS].

    It walks the sinks and then the tails of its queries, TOKENS at a time; what one of them does not see is masked.

    Args:
        q: [T, HEADS * GROUP, D] in the model's domain.
        parts: [T, HEADS * GROUP, D] fp32, sums of exp2(logit - maximum) * v, rotated.
        tokens: of `arguments.Tokens`.
        maxima, sums: [T, HEADS * GROUP] fp32; of a sequence without tokens the maximum is -inf and the sums are 0.
        matrix: [D, D] fp32 of `layout.into_rotated`.
        scale: softmax_scale * log2(e).
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, local_tile = tile, 0
    SINK: tl.constexpr = tokens.SINK
    # Of its tail a query sees what lies within its window.
    TAIL: tl.constexpr = tokens.TAIL if tokens.WINDOW == 0 else min(tokens.TAIL, tokens.WINDOW)
    if not tokens.ONE_EACH:
        _, columns = sequence_tiles(tokens, sequences, TOKENS, GROUP, COLUMNS)
        sequence, local_tile = find_column_tile(columns, tile)
    if sequence < sequences:
        column = local_tile * COLUMNS + tl.arange(0, COLUMNS)
        token = tl.load(tokens.query_start_loc + sequence) + column // GROUP
        live = token < tl.load(tokens.query_start_loc + sequence + 1)
        position = tl.load(tokens.positions + token, live, -1).to(tl.int32)
        vector = (token * (HEADS * GROUP) + kv_head * GROUP + column % GROUP).to(tl.int64)
        stop = tl.minimum(tl.load(tokens.seq_lens + sequence), tl.max(position, 0) + 1)
        begin, count = 0, SINK
        if TAIL > 0:
            begin = tl.maximum(tl.min(tl.where(live, position, 2147483646), 0) + 1 - TAIL, SINK)
            count = tl.maximum(stop - begin, 0) + SINK
        dims, halves = tl.arange(0, D)[None, :], tl.arange(0, D // 2)[None, :]
        queries = tl.load(q + vector[:, None] * D + dims, live[:, None], 0.0)
        row_at = (tl.load(rows + sequence) * HEADS + kv_head) * ((SINK + RING) * D)
        peak, total = tl.full((COLUMNS,), -float("inf"), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        low, high = tl.zeros((COLUMNS, D // 2), tl.float32), tl.zeros((COLUMNS, D // 2), tl.float32)
        for first in tl.range(0, count, TOKENS):
            index = first + tl.arange(0, TOKENS)
            key_position, place = index, index
            if TAIL > 0:
                key_position = tl.where(index < SINK, index, begin + index - SINK)
                place = tl.where(index < SINK, index, key_position % RING + SINK)
            # Places that no token of this sequence lies at hold leftovers, NaN perhaps.
            valid = (index < count) & (key_position < stop)
            at = row_at + (place * D)[:, None]
            k = tl.load(k_window + at + dims, valid[:, None], 0.0)
            logits = dot(queries, tl.trans(k), tl.zeros((COLUMNS, TOKENS), tl.float32), TYPE) * scale
            late, sees = position[:, None] - key_position[None, :], valid[None, :]
            sees = sees & (late >= 0) & ((late < TAIL) | (key_position[None, :] < SINK))
            if tokens.WINDOW > 0:
                sees = sees & (late < tokens.WINDOW)
            logits = tl.where(sees, logits, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            p, shrink = tl.exp2(logits - finite[:, None]), tl.exp2(peak - finite)
            # The sum is that of what is multiplied, which BF16 rounds.
            p = round_to(p, TYPE)
            total, peak = total * shrink + tl.sum(p.to(tl.float32), 1), new_peak
            v_at = v_window + at + halves
            low = dot(p, tl.load(v_at, valid[:, None], 0.0), low * shrink[:, None], TYPE)
            high = dot(p, tl.load(v_at + D // 2, valid[:, None], 0.0), high * shrink[:, None], TYPE)
        part = tl.where(live, vector, 0)
        tl.store(maxima + part, peak, live)
        tl.store(sums + part, total, live)
        width = tl.arange(0, WIDTH)[None, :]
        out, half_matrix = parts + part[:, None] * D + width, matrix + tl.arange(0, D // 2)[:, None] * D + width
        # TF32 keeps as many bits as the FP16 of the rotated queries.
        precision: tl.constexpr = "tf32x3" if tl.float32 == TYPE else "tf32"
        for piece in tl.static_range(D // WIDTH):
            rotated = tl.dot(low, tl.load(half_matrix + piece * WIDTH), input_precision=precision)
            high_matrix = tl.load(half_matrix + (D // 2) * D + piece * WIDTH)
            rotated = tl.dot(high, high_matrix, rotated, input_precision=precision)
            tl.store(out + piece * WIDTH, rotated, live[:, None])


def attend_windows(q: Tensor, windows: WindowPair, at: LayerView, scale: float) -> Part:
    """Attention over the tokens in BF16, one launch, without waiting for the device.

    Rounding points: in a BF16 model the probabilities are rounded to BF16 and summed rounded, and the sums of V are rotated
    in TF32; the rest is FP32.

    Args:
        q: [T, Hq, D] bf16 or fp32 in the model's domain.
        scale: softmax_scale * log2(e).
    """
    batch, shape = at.batch, at.kv.shape
    (tokens, q_heads, head_dim), heads, sequences = q.shape, shape.num_kv_heads, batch.seq_lens.shape[0]
    group, operand = q_heads // heads, choices.rotation_operand(q, q.dtype == torch.bfloat16)
    tile = choices.window_tile(triton.cdiv(tokens, sequences), group, head_dim, operand)
    column_tiles = sequences if tokens == sequences else triton.cdiv(tokens * group, tile.columns) + sequences
    matrix = into_rotated(at.kv.v.kv_format, at.layer, head_dim, q.device)
    parts = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    maxima, sums = (torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    new = token_arguments(batch, windows, shape.window, triton.next_power_of_2(sequences))
    launch(window_kernel, (column_tiles, heads))(
        q.contiguous(), windows.k, windows.v, batch.rows, parts, maxima, sums, new, sequences, matrix,
        scale,
        HEADS=heads, GROUP=group, D=head_dim, COLUMNS=tile.columns, TOKENS=tile.tokens, RING=windows.ring, TYPE=operand,
        WIDTH=choices.WINDOW_COLUMNS, num_warps=tile.warps, num_stages=tile.stages, **choices.OPTIONS,
    )  # fmt: skip
    return Part(parts, maxima, sums)
