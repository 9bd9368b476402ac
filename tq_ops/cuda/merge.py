"""The partial results of attention added up, normalized and brought back into the model's own domain."""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.rotate import rotate_columns, rounded, vectors_of
from haarkv.tq_ops.cuda.schedule import pieces_of, share_of, tiles_of


@triton.jit(do_not_specialize=["count", "sequences", "programs"])
def merge_kernel(
    parts, maxima, sums, out, rotation, count, tokens, sequences, programs, in_bf16, in_bf16_maxima, in_bf16_sums,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out [count, HEADS * GROUP, D] of the parts of `attention.attend_kernel`, rotated back.

    Grid: [tiles of `vectors_of`, D / (WIDTH * PIECES)]; a program merges ROWS whole vectors, AT_ONCE parts of each at a time,
    and writes PIECES times WIDTH of their columns. ROWS is 1 unless WHOLE.

    Args:
        rotation: [D, D].
        tokens: of `arguments.Tokens`.
        in_bf16, in_bf16_maxima, in_bf16_sums: each vector's part by `in_bf16.kept_kernel`; None where nothing is kept.
    """
    KEPT: tl.constexpr = in_bf16 is not None
    begin = tl.program_id(1) * (WIDTH * PIECES)
    if WHOLE:
        token, head, _ = vectors_of(tl.program_id(0), count, HEADS * GROUP, 1, ROWS)
        row, live, pieces = token * (HEADS * GROUP) + head, token < count, 1
        base = row.to(tl.int64)
    else:
        vector = tl.program_id(0)
        row = vector + tl.arange(0, ROWS)
        live = row < count * (HEADS * GROUP)
        token, head = vector // (HEADS * GROUP), vector % (HEADS * GROUP)
        sequence, column = token, head % GROUP
        if not tokens.ONE_EACH:
            index = tl.arange(0, tokens.SIZE)
            ends = tl.load(tokens.query_start_loc + index + 1, index < sequences, 2147483647)
            sequence = tl.sum((ends <= token).to(tl.int32), 0)
            column += (token - tl.load(tokens.query_start_loc + sequence)) * GROUP
        stored, columns = tiles_of(tokens, sequences, TOKENS, GROUP, COLUMNS)
        unit, _, _ = share_of(stored, columns, 0, programs)
        first, pieces = pieces_of(stored, columns, unit, sequence, column // COLUMNS)
        base = ((first * HEADS + head // GROUP).to(tl.int64) * COLUMNS + column % COLUMNS) + tl.zeros((ROWS,), tl.int64)
    dims = tl.arange(0, D // 2)[None, None, :]
    peak, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    low, high = tl.zeros((ROWS, D // 2), tl.float32), tl.zeros((ROWS, D // 2), tl.float32)
    if KEPT:
        peak, total = tl.load(in_bf16_maxima + row, live, -float("inf")), tl.load(in_bf16_sums + row, live, 0.0)
        of_kept = in_bf16 + row[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
        low, high = tl.load(of_kept, live[:, None], 0.0), tl.load(of_kept + D // 2, live[:, None], 0.0)
    for first in range(0, pieces, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)[None, :]
        there = live[:, None] & (split < pieces)
        part = base[:, None] + split * (HEADS * COLUMNS)
        peaks = tl.load(maxima + part, there, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink, grow = tl.exp2(peak - finite), tl.exp2(peaks - finite[:, None])
        total = total * shrink + tl.sum(tl.load(sums + part, there, 0.0) * grow, 1)
        # A part without tokens left its sums of v unset.
        at, filled, grow = parts + part[:, :, None] * D + dims, (peaks > -float("inf"))[:, :, None], grow[:, :, None]
        low = low * shrink[:, None] + tl.sum(tl.load(at, filled, 0.0) * grow, 1)
        high = high * shrink[:, None] + tl.sum(tl.load(at + D // 2, filled, 0.0) * grow, 1)
        peak = new_peak
    # A row that saw no token is padding.
    total = tl.where(total == 0, 1.0, total)[:, None]
    low, high = low / total, high / total
    at = out + row[:, None].to(tl.int64) * D
    for piece in tl.static_range(PIECES):
        column = begin + piece * WIDTH
        back = rotate_columns(low, high, rotation, column, ROWS, D, WIDTH, tl.float32, True)
        column += tl.arange(0, WIDTH)[None, :]
        tl.store(at + column, rounded(back, out.dtype.element_ty), live[:, None])
