"""Which program attends to which stored tokens, of sequences whose lengths only the device knows; merging the parts.

All work stands in one line: for each sequence, for each of its column tiles (a few query columns that one program holds), its
tiles of stored tokens. A fixed number of programs cut that line into equal pieces, whatever the lengths are and however wide
the block table is:

    stored_s  = ceil((seq_lens_s - TAIL) / TOKENS)       tiles of packed tokens; the tail is not read packed
                - origin_s / TOKENS                      less the tiles before the sliding window (`window_origin`)
    columns_s = ceil(new_s * GROUP / COLUMNS)            column tiles; 1 where each sequence has one new token
    unit      = ceil(sum of stored * columns / programs) tiles of a program
    program i takes the places i * unit … (i + 1) * unit - 1 of the line

A *piece* is one program's share of one column tile. Along the line, each next piece has the next program, or the next column
tile, or both. So `program + column tile` is a number that no other piece has, and the pieces of one column tile have numbers
in a row. That number is the place of a partial result, among `programs + column tiles` places. All KV heads share the line.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from haarkv.tq_ops.cuda.available import processors
from haarkv.tq_ops.cuda.layout import Layout
from haarkv.tq_ops.cuda.rotate import rotate_columns, round_to, vector_ids
from haarkv.tq_ops.kv.batch import Batch

if TYPE_CHECKING:
    from haarkv.tq_ops.cuda.in_bf16 import Windows

Tokens = namedtuple("Tokens", "positions query_start_loc seq_lens TAIL SINK WINDOW ONE_EACH SIZE")
"""The new tokens of a batch: newest and first ones that are seen in BF16 (TAIL, SINK), those that a query sees (WINDOW, 0 for
all), whether each sequence has one (ONE_EACH), and a power of two that is no less than the sequences (SIZE)."""


def token_arguments(batch: Batch, windows: Windows | None, window: int | None) -> Tokens:
    """A placed batch's `Tokens`."""
    sequences, tail_and_sink = len(batch.seq_lens), (windows[0].tail, windows[0].sink) if windows else (0, 0)
    one_each, size = len(batch.positions) == sequences, triton.next_power_of_2(sequences)
    constants = map(tl.constexpr, (*tail_and_sink, window or 0, one_each, size))
    return Tokens(batch.positions, batch.query_start_loc, batch.seq_lens, *constants)


def sequence_bits(batch: Batch) -> int:
    """Loads that find a token's sequence by `token_sequence`; 0 where every sequence has one new token."""
    sequences = len(batch.seq_lens)
    return 0 if len(batch.positions) == sequences else max(1, (sequences - 1).bit_length())


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
def window_origin(length, new, WINDOW: tl.constexpr, TOKENS: tl.constexpr):
    """Where the first tile begins that a new token sees some of; `length` counts the new tokens."""
    return tl.maximum(length - new + 1 - WINDOW, 0) // TOKENS * TOKENS


@triton.jit
def sequence_tiles(tokens, sequences, TOKENS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """stored and columns [SIZE] int32 of all sequences; 0 past the last. No query sees the newest TAIL tokens packed."""
    sequence = tl.arange(0, tokens.SIZE)
    valid = sequence < sequences
    length = tl.load(tokens.seq_lens + sequence, valid, 0)
    stored_tiles = tl.cdiv(tl.maximum(length - tokens.TAIL, 0) if tokens.TAIL > 0 else length, TOKENS)
    if tokens.ONE_EACH:
        new, columns = valid.to(tl.int32), valid.to(tl.int32)
    else:
        starts = tokens.query_start_loc + sequence
        new = tl.load(starts + 1, valid, 0) - tl.load(starts, valid, 0)
        columns = tl.cdiv(new * GROUP, COLUMNS)
    if tokens.WINDOW > 0:
        stored_tiles = tl.maximum(stored_tiles - window_origin(length, new, tokens.WINDOW, TOKENS) // TOKENS, 0)
    return stored_tiles, columns


@triton.jit
def find_column_tile(columns, column_tile):
    """The sequence of a column tile, `SIZE` past the last, and the tile's number among those of its sequence."""
    before = tl.cumsum(columns, 0) <= column_tile
    return tl.sum(before.to(tl.int32), 0), column_tile - tl.sum(tl.where(before, columns, 0), 0)


@triton.jit
def program_share(stored_tiles, columns, program, programs):
    """The unit, and a program's first place and the one behind its last."""
    total = tl.sum(stored_tiles * columns, 0)
    unit = tl.maximum(tl.cdiv(total, programs), 1)
    begin = program * unit
    return unit, begin, tl.minimum(begin + unit, total)


@triton.jit
def find_piece(stored_tiles, columns, place):
    """At a place of the line: sequence, column tile among all and among its own, its stored tiles, and which of them."""
    tiles = stored_tiles * columns
    before = tl.cumsum(tiles, 0) <= place
    sequence = tl.sum(before.to(tl.int32), 0)
    length = tl.sum(tl.where(tl.arange(0, stored_tiles.shape[0]) == sequence, stored_tiles, 0), 0)
    offset = place - tl.sum(tl.where(before, tiles, 0), 0)
    tile = offset // length
    return sequence, tl.sum(tl.where(before, columns, 0), 0) + tile, tile, length, offset % length


@triton.jit
def count_pieces(stored_tiles, columns, unit, sequence, tile):
    """The number of the first piece of a sequence's column tile, and how many pieces there are: 0 where nothing is stored."""
    index = tl.arange(0, stored_tiles.shape[0])
    length = tl.sum(tl.where(index == sequence, stored_tiles, 0), 0)
    place = tl.sum(tl.where(index < sequence, stored_tiles * columns, 0), 0) + tile * length
    column_tile = tl.sum(tl.where(index < sequence, columns, 0), 0) + tile
    first = place // unit
    return first + column_tile, tl.where(length > 0, (place + length - 1) // unit - first + 1, 0)


@triton.jit(do_not_specialize=["count", "sequences", "programs"])
def merge_kernel(
    parts, out, rotation, count, tokens, sequences, programs, in_bf16,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out [count, HEADS * GROUP, D] of the parts of `attention.attend_kernel`, rotated back.

    Grid: [tiles of `vector_ids`, D / (WIDTH * PIECES)]; a program merges ROWS whole vectors, AT_ONCE parts of each at a time,
    and writes PIECES times WIDTH of their columns. ROWS is 1 unless WHOLE.

    Args:
        rotation: [D, D].
        in_bf16: each vector's part by `in_bf16.window_kernel`, or None.
    """
    begin = tl.program_id(1) * (WIDTH * PIECES)
    if WHOLE:
        token, head, _ = vector_ids(tl.program_id(0), count, HEADS * GROUP, 1, ROWS)
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
        stored_tiles, columns = sequence_tiles(tokens, sequences, TOKENS, GROUP, COLUMNS)
        unit, _, _ = program_share(stored_tiles, columns, 0, programs)
        first, pieces = count_pieces(stored_tiles, columns, unit, sequence, column // COLUMNS)
        base = ((first * HEADS + head // GROUP).to(tl.int64) * COLUMNS + column % COLUMNS) + tl.zeros((ROWS,), tl.int64)
    dims = tl.arange(0, D // 2)[None, None, :]
    peak, total = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    low, high = tl.zeros((ROWS, D // 2), tl.float32), tl.zeros((ROWS, D // 2), tl.float32)
    if in_bf16 is not None:
        peak, total = tl.load(in_bf16.maxima + row, live, -float("inf")), tl.load(in_bf16.sums + row, live, 0.0)
        window_part = in_bf16.vectors + row[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
        low, high = tl.load(window_part, live[:, None], 0.0), tl.load(window_part + D // 2, live[:, None], 0.0)
    for first in range(0, pieces, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)[None, :]
        valid = live[:, None] & (split < pieces)
        part = base[:, None] + split * (HEADS * COLUMNS)
        peaks = tl.load(parts.maxima + part, valid, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink, grow = tl.exp2(peak - finite), tl.exp2(peaks - finite[:, None])
        total = total * shrink + tl.sum(tl.load(parts.sums + part, valid, 0.0) * grow, 1)
        # A part without tokens left its sums of v unset.
        at, nonempty, grow = parts.vectors + part[:, :, None] * D + dims, (peaks > -float("inf"))[:, :, None], grow[:, :, None]
        low = low * shrink[:, None] + tl.sum(tl.load(at, nonempty, 0.0) * grow, 1)
        high = high * shrink[:, None] + tl.sum(tl.load(at + D // 2, nonempty, 0.0) * grow, 1)
        peak = new_peak
    # A row that saw no token is padding.
    total = tl.where(total == 0, 1.0, total)[:, None]
    low, high = low / total, high / total
    at = out + row[:, None].to(tl.int64) * D
    for piece in tl.static_range(PIECES):
        column = begin + piece * WIDTH
        vectors = rotate_columns(low, high, rotation, column, ROWS, D, WIDTH, tl.float32, True)
        column += tl.arange(0, WIDTH)[None, :]
        tl.store(at + column, round_to(vectors, out.dtype.element_ty), live[:, None])


# -- Sizes of a launch -------------------------------------------------------------------------------------------------
_WIDE_FROM = 64  # columns of a sequence
NARROW = 4
"""Bits of a level whose centroids are looked up in registers."""


def attention_tile(most: int, group: int, width: int, operand: tl.dtype, layouts: Iterable[Layout]) -> dict[str, int]:
    """Sizes of an attention launch, with which no loop of a BF16 model spills on sm_90: COLUMNS of queries, TOKENS a step.

    Args:
        most: new tokens of a sequence, on average; 1 is decode.
        group: query heads of a KV head.
        width: head_dim.
    """

    def sizes(columns: int, tokens: int, wide: bool = False, stages: int = 2) -> dict[str, int]:
        return {"COLUMNS": columns, "TOKENS": tokens, "WIDE": wide, "num_stages": stages}

    columns = max(16, 1 << (group - 1).bit_length()) if most == 1 else 16
    if operand == tl.float32:
        return sizes(columns, 16 if width > 128 else 32)
    if any(one.bits > NARROW and not one.learned for one in layouts):  # more bytes a token, and centroids by loads
        return sizes(columns, 32)
    if width > 128:
        return sizes(columns, 64)
    if most * group >= _WIDE_FROM:
        # So that three programs of 128 threads share a processor: while one looks up, others multiply.
        return sizes(64, 32, wide=True)
    if most > 1:
        return sizes(32, 64)
    # A wider tile of queries shares the lookup of a tile of codes. Decode has no more queries than a group.
    # With three stages, the codes of two tiles are on their way while a third is worked on.
    return sizes(columns, 128, stages=3)


def most_visible(capacity: int, window: int | None, new: int, tokens: int) -> int:
    """The most stored tokens in tiles of `tokens` that `new` tokens of a sequence see any of; at most `capacity`."""
    return capacity if window is None else min(capacity, window + new - 1 + tokens - 1)


def count_programs(heads: int, most_tiles: int, device: torch.device, at_once: int = 3) -> int:
    """Programs that share a KV head's work: as many as run at once, `at_once` on a processor, and no more than there are tiles
    at most. One number for any lengths, so that a graph can hold the launch.
    """
    return max(1, min(at_once * processors(device) // heads, most_tiles))
