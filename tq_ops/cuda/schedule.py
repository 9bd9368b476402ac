"""Which program attends to which stored tokens, of sequences whose lengths only the device knows.

All work stands in one line: for each sequence, for each of its column tiles (a few query columns that one program holds), its
tiles of stored tokens. A fixed number of programs cut that line into equal pieces, so that none has more to do than another,
whatever the lengths are and however wide the block table is:

    stored_s  = ceil((seq_lens_s - TAIL) / TOKENS)       tiles of stored tokens, those in BF16 apart
                - origin_s / TOKENS                      and those before the first new token's sliding window
    columns_s = ceil(new_s * GROUP / COLUMNS)            column tiles; 1 where each sequence has one new token
    unit      = ceil(sum of stored * columns / programs) tiles of a program
    program i takes the places i * unit … (i + 1) * unit - 1 of the line

A *piece* is what one program has of one column tile. Along the line, each next piece has the next program, or the next column
tile, or both. So `program + column tile` is a number that no other piece has, and the pieces of one column tile have numbers
in a row. That number is the place of a partial result, among `programs + column tiles` places. All KV heads share the line.

The partial results are added up, normalized and brought back into the model's own domain by `merge_kernel`.
"""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.rotate import rotate_columns, round_to, vector_ids


@triton.jit
def window_origin(length, new, WINDOW: tl.constexpr, TOKENS: tl.constexpr):
    """Where the first tile begins of which any of a sequence's new tokens sees something, `length` with all of them."""
    return tl.maximum(length - new + 1 - WINDOW, 0) // TOKENS * TOKENS


@triton.jit
def sequence_tiles(tokens, sequences, TOKENS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """stored and columns [SIZE] int32 of all sequences; 0 past the last.

    Of the newest TAIL tokens, which the last query sees in BF16, no query sees a packed one.

    Args:
        tokens: of `arguments.Tokens`.
    """
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
    """The sequence of a column tile among all, and which one of its own this is; `SIZE` past the last."""
    before = tl.cumsum(columns, 0) <= column_tile
    return tl.sum(before.to(tl.int32), 0), column_tile - tl.sum(tl.where(before, columns, 0), 0)


@triton.jit
def program_share(stored_tiles, columns, program, programs):
    """The unit, and the first place of a program and the one behind its last."""
    total = tl.sum(stored_tiles * columns, 0)
    unit = tl.maximum(tl.cdiv(total, programs), 1)
    begin = program * unit
    return unit, begin, tl.minimum(begin + unit, total)


@triton.jit
def find_piece(stored_tiles, columns, place):
    """What stands at a place of the line.

    Returns:
        sequence; its column tile among all, and among its own; its tiles of stored tokens, and which of them this is.
    """
    tiles = stored_tiles * columns
    before = tl.cumsum(tiles, 0) <= place
    sequence = tl.sum(before.to(tl.int32), 0)
    length = tl.sum(tl.where(tl.arange(0, stored_tiles.shape[0]) == sequence, stored_tiles, 0), 0)
    offset = place - tl.sum(tl.where(before, tiles, 0), 0)
    tile = offset // length
    return sequence, tl.sum(tl.where(before, columns, 0), 0) + tile, tile, length, offset % length


@triton.jit
def count_pieces(stored_tiles, columns, unit, sequence, tile):
    """The number of the first piece of a sequence's column tile `tile`, and how many there are: 0 where nothing is stored."""
    index = tl.arange(0, stored_tiles.shape[0])
    length = tl.sum(tl.where(index == sequence, stored_tiles, 0), 0)
    place = tl.sum(tl.where(index < sequence, stored_tiles * columns, 0), 0) + tile * length
    column_tile = tl.sum(tl.where(index < sequence, columns, 0), 0) + tile
    first = place // unit
    return first + column_tile, tl.where(length > 0, (place + length - 1) // unit - first + 1, 0)


@triton.jit(do_not_specialize=["count", "sequences", "programs"])
def merge_kernel(
    parts, maxima, sums, out, rotation, count, tokens, sequences, programs, in_bf16, in_bf16_maxima, in_bf16_sums,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out [count, HEADS * GROUP, D] of the parts of `attention.attend_kernel`, rotated back.

    Grid: [tiles of `vector_ids`, D / (WIDTH * PIECES)]; a program merges ROWS whole vectors, AT_ONCE parts of each at a time,
    and writes PIECES times WIDTH of their columns. ROWS is 1 unless WHOLE.

    Args:
        rotation: [D, D].
        tokens: of `arguments.Tokens`.
        in_bf16, in_bf16_maxima, in_bf16_sums: each vector's part by `in_bf16.kept_kernel`; None where nothing is kept.
    """
    HAS_WINDOW: tl.constexpr = in_bf16 is not None
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
    if HAS_WINDOW:
        peak, total = tl.load(in_bf16_maxima + row, live, -float("inf")), tl.load(in_bf16_sums + row, live, 0.0)
        window_part = in_bf16 + row[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
        low, high = tl.load(window_part, live[:, None], 0.0), tl.load(window_part + D // 2, live[:, None], 0.0)
    for first in range(0, pieces, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)[None, :]
        valid = live[:, None] & (split < pieces)
        part = base[:, None] + split * (HEADS * COLUMNS)
        peaks = tl.load(maxima + part, valid, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink, grow = tl.exp2(peak - finite), tl.exp2(peaks - finite[:, None])
        total = total * shrink + tl.sum(tl.load(sums + part, valid, 0.0) * grow, 1)
        # A part without tokens left its sums of v unset.
        at, nonempty, grow = parts + part[:, :, None] * D + dims, (peaks > -float("inf"))[:, :, None], grow[:, :, None]
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
