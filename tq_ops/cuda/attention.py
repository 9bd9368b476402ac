"""Attention over packed codes in the rotated domain: prompts, and decode where `decode` does not take it.

A program holds one KV head and, as columns of one tile, some new tokens of a sequence with all query heads of the group; it
attends to the stored tokens that `schedule` gives it. Parts are not normalized: `schedule.merge_kernel` adds them up and
rotates them back. Tokens in BF16 are one more part, of `in_bf16.window_kernel`.

Learned keys have a query for each stretch of 1,024 positions, which `prologue` left in memory: made here, they would take
registers that the loops need. What a stretch's logits lack, the query's product with K's mean, is added to the maximum.
"""

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda import schedule
from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.in_bf16 import Part, layer_windows
from haarkv.tq_ops.cuda.layout import Layout
from haarkv.tq_ops.cuda.lookup import load_words, tile_centroids
from haarkv.tq_ops.cuda.planes import load_codes
from haarkv.tq_ops.cuda.rotate import STRETCH, Rotated, dot, num_tiles
from haarkv.tq_ops.cuda.schedule import (
    find_column_tile,
    find_piece,
    merge_kernel,
    program_share,
    sequence_tiles,
    token_arguments,
    window_origin,
)
from haarkv.tq_ops.kv.cache import LayerView

Read = namedtuple("Read", "codes scales codes_stride scales_stride centroids words BITS COLUMNS UNITS PARTS PERMUTE")
"""K or V of one layer, as attention reads it: fields in blocks of [Hkv, tokens, …], their strides in bytes and in scales,
and tables of `layout.Layout`. Names in capitals are constants of the kernel.

Attributes:
    COLUMNS, UNITS, PARTS: how many columns learned keys lie in, 0 of planes, and `layout.Columns`.
    PERMUTE: whether centroids are looked up, or made two at a time, in registers.
"""


def read_arguments(fields: dict[str, Tensor], layout: Layout, permutes: bool) -> Read:
    """One side of a layer."""
    codes, scales, columns = fields["codes"], fields["scale"], layout.columns
    return Read(
        codes, scales, codes.stride(0), scales.stride(0), layout.centroids, layout.words,
        *map(tl.constexpr, (layout.bits, len(columns.units), *columns, permutes)),
    )  # fmt: skip


@triton.jit
def table_entries(table, begin, first, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr, LOWER: tl.constexpr):
    """The blocks of stored tokens begin … begin + TOKENS - 1: one where a block holds them all, else one of each token."""
    if BLOCK % TOKENS == 0:
        block = tl.load(table + begin // BLOCK, begin < end, 0)
    else:
        token = begin + tl.arange(0, TOKENS)
        valid = (token >= first) & (token < end) if LOWER else token < end
        block = tl.load(table + token // BLOCK, valid, 0)
    return block


@triton.jit
def token_rows(begin, first, end, kv_head, BLOCK: tl.constexpr, TOKENS: tl.constexpr, LOWER: tl.constexpr):
    """Which of stored tokens begin … begin + TOKENS - 1 count, and their rows. Without LOWER none lies before `first`."""
    token = begin + tl.arange(0, TOKENS)
    # A tile within one block is so for the compiler to see, too: it then copies 16 bytes at a time.
    row = begin % BLOCK + tl.arange(0, TOKENS) if BLOCK % TOKENS == 0 else token % BLOCK
    live = token < end
    if LOWER:
        live = live & (token >= first)
    return token, live, kv_head * BLOCK + row


@triton.jit
def load_row_codes(side, block, row, D: tl.constexpr):
    """Tiles of codes of the rows of some blocks, of K or of V."""
    return load_codes(side, block * side.codes_stride + row * (D * side.BITS // 8), D)


@triton.jit
def across_tokens(x, WIDE: tl.constexpr):
    """A number of each token beside a tile of logits: [tokens, columns], or with WIDE [columns, tokens]."""
    return x[None, :] if WIDE else x[:, None]


@triton.jit
def attend_tile(
    q_low, q_high, gain, position, state, begin, first, end, table, k, v, k_words, v_words, kv_head, scale,
    GAINS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr,
    CAUSAL: tl.constexpr, LOWER: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: stored tokens begin … begin + TOKENS - 1, of which those in first … end - 1 count.

    Codes are the left operand of both products, so the few query heads of a group fill 8 columns, and centroids reach the
    tensor cores from registers. With WIDE, for columns that fill them as rows, it is the other way round: each code is looked
    up once for all, and probabilities never leave their registers.

    Args:
        q_low, q_high: [D/2, columns], rotated queries; with WIDE transposed, as are low and high.
        gain: [columns], by which logits are multiplied with GAINS.
        position: [columns], the last packed token that a query may see.
        state: maximum [columns] in units of log2, sum of probabilities [columns], the largest V scale so far, sums of
            probabilities times centroids in its units (low, high), and the blocks of this tile.
        scale: softmax_scale * log2(e).
        CAUSAL: whether `position` and SPAN hide tokens. Without it and with WIDE all tokens must be less than `end`.
        LOWER: whether tokens may lie before `first`.
        SPAN: packed tokens that a query sees at most, up to `position`; None for all.
    """
    peak, total, widest, out_low, out_high, ahead = state
    token, live, row = token_rows(begin, first, end, kv_head, BLOCK, TOKENS, LOWER)
    # The next tile's codes are asked for before this tile is through, so where they lie has to be known by then.
    block, ahead = ahead.to(tl.int64), table_entries(table, begin + TOKENS, first, end, BLOCK, TOKENS, LOWER)
    # Slots past the end, or before a window, hold leftovers. Any code means a finite number, but a scale may be NaN: mask it.
    k_scale, v_scale = k.scales + block * k.scales_stride + row, v.scales + block * v.scales_stride + row
    if CAUSAL or not WIDE:
        k_scale, v_scale = tl.load(k_scale, live, 0.0), tl.load(v_scale, live, 0.0)
    else:
        k_scale, v_scale = tl.load(k_scale), tl.load(v_scale)
    k_low, k_high = tile_centroids(load_row_codes(k, block, row, D), k, k_words, TYPE)
    k_scale = across_tokens(k_scale.to(tl.float32) * scale, WIDE)
    if WIDE:
        logits = dot(q_low, tl.trans(k_low), tl.zeros((q_low.shape[0], TOKENS), tl.float32), TYPE)
        logits = dot(q_high, tl.trans(k_high), logits, TYPE)
    else:
        logits = dot(k_low, q_low, tl.zeros((TOKENS, q_low.shape[1]), tl.float32), TYPE)
        logits = dot(k_high, q_high, logits, TYPE)
    if GAINS:
        logits = logits * across_tokens(gain, not WIDE)
    logits = logits * k_scale
    if not WIDE:  # the mask of a row and the scale become one instruction
        logits = logits + across_tokens(tl.where(live, 0.0, -float("inf")), WIDE)
    if CAUSAL:
        sees = across_tokens(token, WIDE) <= across_tokens(position, not WIDE)
        if WIDE:
            sees = sees & across_tokens(live, WIDE)
        if SPAN is not None:
            sees = sees & (across_tokens(token, WIDE) > across_tokens(position, not WIDE) - SPAN)
        logits = tl.where(sees, logits, -float("inf"))
    elif WIDE and LOWER:
        logits = tl.where(across_tokens(live, WIDE), logits, -float("inf"))
    AXIS: tl.constexpr = 1 if WIDE else 0
    new_peak = tl.maximum(peak, tl.max(logits, AXIS))
    finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    p = tl.exp2(logits - across_tokens(finite, not WIDE))
    shrink = tl.exp2(peak - finite)
    total = total * shrink + tl.sum(p, AXIS)
    # In units of the largest V scale, p * scale fits FP16 for any scales.
    v_scale = v_scale.to(tl.float32)
    new_widest = tl.maximum(widest, tl.max(v_scale, 0))
    unit = 1.0 / tl.maximum(new_widest, 5.9604644775390625e-08)
    p = (p * across_tokens(v_scale * unit, WIDE)).to(TYPE)
    shrink = across_tokens(shrink * (widest * unit), not WIDE)
    v_low, v_high = tile_centroids(load_row_codes(v, block, row, D), v, v_words, TYPE)
    if WIDE:
        out_low, out_high = dot(p, v_low, out_low * shrink, TYPE), dot(p, v_high, out_high * shrink, TYPE)
    else:
        out_low = dot(tl.trans(v_low), p, out_low * shrink, TYPE)
        out_high = dot(tl.trans(v_high), p, out_high * shrink, TYPE)
    return new_peak, total, new_widest, out_low, out_high, ahead


@triton.jit
def attend_tiles(
    q_low, q_high, gain, position, state, begin, masked, stop, first, end, table, k, v, k_words, v_words, kv_head, scale,
    GAINS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr,
    CAUSAL: tl.constexpr, LOWER: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All tiles from `begin` to `stop`; with WIDE, and neither SPAN nor GAINS, those before `masked` need no mask.

    Learned keys take one loop with a mask: two loops within a third would take registers.
    """
    peak, total, widest, low, high, ahead = state
    if WIDE and SPAN is None and not GAINS:
        for tile in tl.range(begin, masked, TOKENS):
            peak, total, widest, low, high, ahead = attend_tile(
                q_low, q_high, gain, position, (peak, total, widest, low, high, ahead), tile, first, end, table,
                k, v, k_words, v_words, kv_head, scale, GAINS, D, BLOCK, TOKENS, TYPE, False, LOWER, SPAN, WIDE,
            )  # fmt: skip
    for tile in tl.range(masked, stop, TOKENS):
        peak, total, widest, low, high, ahead = attend_tile(
            q_low, q_high, gain, position, (peak, total, widest, low, high, ahead), tile, first, end, table,
            k, v, k_words, v_words, kv_head, scale, GAINS, D, BLOCK, TOKENS, TYPE, CAUSAL or WIDE, LOWER, SPAN, WIDE,
        )  # fmt: skip
    return peak, total, widest, low, high, ahead


@triton.jit
def attend_piece(
    q, vectors, parts, tokens, table, k, v, k_words, v_words, scale, sequence, tile, begin, end,
    place, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Attend with column tile `tile` of a sequence to its stored tokens begin … end - 1, or as many of them as there are.

    Args:
        table: of this sequence.
        begin, end: counted from `schedule.window_origin`; with WHOLE all of the context.
        place: of the partial result among those of pieces; with WHOLE it goes by the vectors instead.
    """
    start, stop = tl.load(tokens.query_start_loc + sequence), tl.load(tokens.query_start_loc + sequence + 1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    token = start + column // GROUP
    live = token < stop
    position, length = tl.load(tokens.positions + token, live, -1).to(tl.int32), tl.load(tokens.seq_lens + sequence)
    LOWER: tl.constexpr = tokens.SINK + tokens.WINDOW > 0
    SPAN: tl.constexpr = tokens.WINDOW - tokens.TAIL if tokens.WINDOW > 0 else None
    if tokens.TAIL > 0:
        position -= tokens.TAIL
    first = tokens.SINK
    if tokens.WINDOW > 0:
        if not WHOLE:
            origin = window_origin(length, stop - start, tokens.WINDOW, TOKENS)
            begin, end = begin + origin, end + origin
        first = tl.maximum(tl.min(tl.where(live, position, 2147483646), 0) + 1 - SPAN, tokens.SINK)
        begin = tl.maximum(begin, first // TOKENS * TOKENS)
    end = tl.minimum(end, tl.minimum(length, tl.max(position, 0) + 1))
    vector = (token * (HEADS * GROUP) + kv_head * GROUP + column % GROUP).to(tl.int64)
    dims, lives = tl.arange(0, D // 2), live
    peak, total, widest = tl.full((COLUMNS,), -float("inf"), tl.float32), tl.zeros((COLUMNS,), tl.float32), 0.0
    part = vector if WHOLE else (place * HEADS + kv_head).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rows, part_row, lives = across_tokens(vector, not WIDE), across_tokens(part, not WIDE), across_tokens(live, not WIDE)
    dims, low = across_tokens(dims, WIDE), tl.zeros((COLUMNS, D // 2) if WIDE else (D // 2, COLUMNS), tl.float32)
    high = low
    masked, ahead = begin, table_entries(table, begin, first, end, BLOCK, TOKENS, LOWER)
    if WIDE and SPAN is None:
        # Tiles that the first new token of the columns sees whole need no mask. With a window most tiles need one.
        visible_end = tl.minimum(end, tl.min(tl.where(live, position, 2147483646), 0) + 1)
        masked = tl.maximum(begin, begin + (visible_end - begin) // TOKENS * TOKENS)
    CAUSAL: tl.constexpr = not tokens.ONE_EACH
    if k.COLUMNS > 0:
        previous_lack = tl.zeros((COLUMNS,), tl.float32)
        # Both begin and the begin of a stretch are multiples of TOKENS: no tile is cut.
        for stretch in tl.range(begin // STRETCH, tl.cdiv(end, STRETCH)):
            stretch_offset = stretch * vectors
            # Of a stretch that a query does not see, nothing is set.
            sees = live & (position >= stretch * STRETCH)
            if SPAN is not None:
                sees = sees & (position - SPAN + 1 < (stretch + 1) * STRETCH)
            at, valid = q.queries + (rows + stretch_offset) * D + dims, across_tokens(sees, not WIDE)
            q_low, q_high = tl.load(at, valid, 0.0), tl.load(at + D // 2, valid, 0.0)
            gain = tl.load(q.gains + stretch_offset + vector, sees, 1.0)
            lack = tl.load(q.lacks + stretch_offset + vector, sees, 0.0) * scale
            peak += previous_lack - lack
            previous_lack = lack
            start, stop = tl.maximum(begin, stretch * STRETCH), tl.minimum(end, (stretch + 1) * STRETCH)
            peak, total, widest, low, high, ahead = attend_tiles(
                q_low, q_high, gain, position, (peak, total, widest, low, high, ahead), start,
                start, stop, first, end, table, k, v, k_words, v_words, kv_head, scale,
                True, D, BLOCK, TOKENS, TYPE, CAUSAL, LOWER, SPAN, WIDE,
            )  # fmt: skip
        peak += previous_lack
    else:
        at = q.queries + rows * D + dims
        q_low, q_high = tl.load(at, lives, 0.0), tl.load(at + D // 2, lives, 0.0)
        peak, total, widest, low, high, ahead = attend_tiles(
            q_low, q_high, 1.0, position, (peak, total, widest, low, high, ahead), begin, masked, end, first, end, table,
            k, v, k_words, v_words, kv_head, scale, False, D, BLOCK, TOKENS, TYPE, CAUSAL, LOWER, SPAN, WIDE,
        )  # fmt: skip
    tl.store(parts.maxima + part, peak, live)
    tl.store(parts.sums + part, total, live)
    if begin < end:
        out = parts.vectors + part_row * D + dims
        tl.store(out, low * widest, lives)
        tl.store(out + D // 2, high * widest, lives)


# What changes from batch to batch is no reason to compile anew.
@triton.jit(do_not_specialize=["vectors", "sequences", "table_width", "programs"])
def attend_kernel(
    q, vectors, parts, tokens, sequences, block_table, table_width, k, v, scale, programs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Partial attention. Grid: [programs, HEADS]; with WHOLE, [column tiles, HEADS], and each takes its whole context.

    Args:
        q: `Rotated`; k, v: `Read`.
        vectors: T * HEADS * GROUP.
        parts: `Part`, at [places, HEADS, COLUMNS] by `schedule`, or with WHOLE at [T, HEADS * GROUP]. One without tokens has
            maximum -inf and sum 0; its vectors are unset.
    """
    program, kv_head = tl.program_id(0), tl.program_id(1)
    stored_tiles, columns = sequence_tiles(tokens, sequences, TOKENS, GROUP, COLUMNS)
    k_words, v_words = load_words(k), load_words(v)
    if WHOLE:
        # The last tiles of a prompt see most and begin first.
        sequence, tile = find_column_tile(columns, programs - 1 - program)
        if sequence < sequences:
            table = block_table + sequence.to(tl.int64) * table_width
            attend_piece(
                q, vectors, parts, tokens, table, k, v, k_words, v_words, scale, sequence, tile,
                0, 2147483647, 0, kv_head, HEADS, GROUP, D, BLOCK, COLUMNS, TOKENS, WIDE, WHOLE, TYPE,
            )  # fmt: skip
    else:
        _, place, stop = program_share(stored_tiles, columns, program, programs)
        while place < stop:
            sequence, column_tile, tile, length, first = find_piece(stored_tiles, columns, place)
            count = tl.minimum(length - first, stop - place)
            table = block_table + sequence.to(tl.int64) * table_width
            attend_piece(
                q, vectors, parts, tokens, table, k, v, k_words, v_words, scale, sequence, tile,
                first * TOKENS, (first + count) * TOKENS, program + column_tile, kv_head,
                HEADS, GROUP, D, BLOCK, COLUMNS, TOKENS, WIDE, WHOLE, TYPE,
            )  # fmt: skip
            place += count


# -- Launches ----------------------------------------------------------------------------------------------------------
_MATRIX_TILE = 16384  # numbers of the rotation that a program holds at once


def attend(
    q: Tensor, rotated: Rotated, at: LayerView, layouts: tuple[Layout, Layout], scale: float, in_bf16: Part | None
) -> Tensor:
    """Attention in two launches, parts and their sum, without waiting for the device; arguments as of `decode.attend`."""
    values, shape, batch = layouts[1], at.kv.shape, at.batch
    (tokens, q_heads, head_dim), heads, sequences = q.shape, shape.num_kv_heads, len(batch.seq_lens)
    group, one_each, table = q_heads // heads, tokens == sequences, batch.block_table.contiguous()
    # FP16 for a BF16 model: three bits finer, and wide enough.
    operand = tl.float16 if q.dtype == torch.bfloat16 else tl.float32
    tile = schedule.attention_tile(triton.cdiv(tokens, sequences), group, head_dim, operand, layouts)
    # Ragged column tiles: a sequence wastes less than one.
    column_tiles = sequences if one_each else triton.cdiv(tokens * group, tile["COLUMNS"]) + sequences
    visible = schedule.most_visible(table.shape[1] * at.kv.block_size, shape.window, tokens - sequences + 1, tile["TOKENS"])
    programs = schedule.count_programs(heads, column_tiles * triton.cdiv(visible, tile["TOKENS"]), q.device)
    # Column tiles enough for all programs are not cut.
    whole = not one_each and tokens * group >= programs * tile["COLUMNS"]
    programs = column_tiles if whole else programs
    shape_of_parts = (tokens, heads, group) if whole else (programs + column_tiles, heads, tile["COLUMNS"])
    parts = Part(*(torch.empty(*shape_of_parts, *size, device=q.device) for size in ((head_dim,), (), ())))
    new = token_arguments(batch, layer_windows(at.kv), shape.window)
    same = {
        "HEADS": heads, "GROUP": group, "D": head_dim, "COLUMNS": tile["COLUMNS"], "TOKENS": tile["TOKENS"], "WHOLE": whole
    }  # fmt: skip
    # In registers come FP16 centroids that fit words, or are learned; not in the interpreter, which has no PTX.
    permutes = ((one.words is not None or one.learned is not None) and q.is_cuda and operand == tl.float16 for one in layouts)
    sides = map(read_arguments, at.kv.fields, layouts, permutes)
    launch(attend_kernel, (programs, heads))(
        rotated, tokens * q_heads, parts, new, sequences, table, table.shape[1], *sides, scale, programs,
        BLOCK=at.kv.block_size, WIDE=tile["WIDE"], TYPE=operand, num_warps=4, num_stages=tile["num_stages"], **same,
    )  # fmt: skip
    # Of few vectors in many parts a program of the merge takes one, of many in one part each 16. Threads that add up the same
    # numbers begin with different ones: were a product fused into the sum, their results would differ in the last bit.
    width = 32 if whole else min(head_dim, _MATRIX_TILE // head_dim)
    pieces = 1 if whole else head_dim // width
    merging = {"ROWS": 16, "AT_ONCE": 1, "num_warps": 4} if whole else {"ROWS": 1, "AT_ONCE": 16, "num_warps": 8}
    out, tiles = torch.empty_like(q), num_tiles(tokens, q_heads, values) if whole else tokens * q_heads
    launch(merge_kernel, (tiles, head_dim // (width * pieces)))(
        parts, out, values.rotation, tokens, new, sequences, programs, in_bf16,
        WIDTH=width, PIECES=pieces, enable_fp_fusion=False, **merging, **same,
    )  # fmt: skip
    return out
