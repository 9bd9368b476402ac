"""Which program attends to which stored tokens, of sequences whose lengths only the device knows.

All work stands in one line: for each sequence, for each of its column tiles (a few query columns that one program holds), its
tiles of stored tokens. A fixed number of programs cut that line into equal pieces, so that none has more to do than another,
whatever the lengths are and however wide the block table is:

    stored_s  = ceil((seq_lens_s - TAIL) / TOKENS)       tiles of stored tokens, those in BF16 apart
    columns_s = ceil(new_s * GROUP / COLUMNS)            column tiles; 1 where each sequence has one new token
    unit      = ceil(sum of stored * columns / programs) tiles of a program
    program i takes the places i * unit … (i + 1) * unit - 1 of the line

A *piece* is what one program has of one column tile. Along the line, each next piece has the next program, or the next column
tile, or both. So `program + column tile` is a number that no other piece has, and the pieces of one column tile have numbers
in a row. That number is the place of a partial result, among `programs + column tiles` places. All KV heads share the line.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(
    seq_lens, query_start_loc, sequences,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, ONE_EACH: tl.constexpr,
    TAIL: tl.constexpr = 0,
):  # fmt: skip
    """stored and columns [SIZE] int32 of all sequences; 0 past the last. SIZE: a power of two, at least `sequences`.

    Of the newest TAIL tokens, which the last query sees in BF16, no query sees a packed one.
    """
    sequence = tl.arange(0, SIZE)
    there = sequence < sequences
    length = tl.load(seq_lens + sequence, there, 0)
    if TAIL > 0:
        length = tl.maximum(length - TAIL, 0)
    stored = tl.cdiv(length, TOKENS)
    if ONE_EACH:
        columns = there.to(tl.int32)
    else:
        new = tl.load(query_start_loc + sequence + 1, there, 0) - tl.load(query_start_loc + sequence, there, 0)
        columns = tl.cdiv(new * GROUP, COLUMNS)
    return stored, columns


@triton.jit
def find_column_tile(columns, column_tile):
    """The sequence of a column tile among all, and which one of its own this is; `SIZE` past the last."""
    before = tl.cumsum(columns, 0) <= column_tile
    return tl.sum(before.to(tl.int32), 0), column_tile - tl.sum(tl.where(before, columns, 0), 0)


@triton.jit
def share_of(stored, columns, program, programs):
    """The unit, and the first place of a program and the one behind its last."""
    total = tl.sum(stored * columns, 0)
    unit = tl.maximum(tl.cdiv(total, programs), 1)
    begin = program * unit
    return unit, begin, tl.minimum(begin + unit, total)


@triton.jit
def find_piece(stored, columns, place):
    """What stands at a place of the line.

    Returns:
        sequence; its column tile among all, and among its own; its tiles of stored tokens, and which of them this is.
    """
    tiles = stored * columns
    before = tl.cumsum(tiles, 0) <= place
    sequence = tl.sum(before.to(tl.int32), 0)
    length = tl.sum(tl.where(tl.arange(0, stored.shape[0]) == sequence, stored, 0), 0)
    within = place - tl.sum(tl.where(before, tiles, 0), 0)
    own = within // length
    return sequence, tl.sum(tl.where(before, columns, 0), 0) + own, own, length, within % length


@triton.jit
def pieces_of(stored, columns, unit, sequence, own):
    """The number of the first piece of a sequence's column tile `own`, and how many there are: 0 where nothing is stored."""
    index = tl.arange(0, stored.shape[0])
    length = tl.sum(tl.where(index == sequence, stored, 0), 0)
    place = tl.sum(tl.where(index < sequence, stored * columns, 0), 0) + own * length
    column_tile = tl.sum(tl.where(index < sequence, columns, 0), 0) + own
    first = place // unit
    return first + column_tile, tl.where(length > 0, (place + length - 1) // unit - first + 1, 0)
