"""The line of tiles that programs share, and how many thread blocks do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
import triton
import triton.language as tl

from haarkv.tq_ops.cuda import decode
from haarkv.tq_ops.cuda.schedule import Tokens, count_pieces, find_piece, program_share, sequence_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES = [
    ([5], [1], 3), ([256] * 8, [1] * 8, 11), ([256, *[4] * 31], [1] * 32, 11), ([0, 3, 0, 0, 1, 0], [1] * 6, 4),
    ([0, 0], [1, 1], 4), ([7], [1], 12), ([3, 9, 1], [4, 1, 2], 5), ([1] * 33, [1] * 33, 6), ([2, 5], [3, 0], 4),
]  # fmt: skip


@triton.jit
def line_kernel(tokens, sequences, piece_rows, merge_rows, programs):
    """What the functions say: six numbers of each piece by its number, and of each own column tile its first and its count."""
    tiles, columns = sequence_tiles(tokens, sequences, 128, 1, 16)
    program = tl.program_id(0)
    unit, place, end = program_share(tiles, columns, program, programs)
    while place < end:
        sequence, column_tile, own_columns, length, begin = find_piece(tiles, columns, place)
        count = tl.minimum(length - begin, end - place)
        at = piece_rows + (program + column_tile) * 6
        tl.store(at, program)
        tl.store(at + 1, sequence)
        tl.store(at + 2, column_tile)
        tl.store(at + 3, begin)
        tl.store(at + 4, begin + count)
        tl.store(at + 5, program + column_tile)
        first, many = count_pieces(tiles, columns, unit, sequence, own_columns)
        tl.store(merge_rows + 2 * column_tile, first)
        tl.store(merge_rows + 2 * column_tile + 1, many)
        place += count


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("tile_counts", "columns", "programs"), BATCHES)
def test_programs_share_all_tiles_equally_and_each_piece_has_a_place_of_its_own(tile_counts, columns, programs, window):
    lengths, one_each = [max(0, 128 * n - 5) for n in tile_counts], set(columns) == {1}
    if window:  # whole tiles before the one in which the first new token's window begins are left out
        new = [1 if one_each else 16 * n for n in columns]
        tile_counts = [
            n - max(0, length - m + 1 - window) // 128 for n, length, m in zip(tile_counts, lengths, new, strict=True)
        ]
    starts = torch.tensor([0, *columns], dtype=torch.int32).cumsum(0).int().to(DEVICE) * 16
    piece_rows = torch.full((programs + sum(columns), 6), -1, dtype=torch.int32, device=DEVICE)
    merge_rows = torch.zeros(sum(columns), 2, dtype=torch.int32, device=DEVICE)
    constants = map(tl.constexpr, (0, 0, window, one_each, triton.next_power_of_2(len(tile_counts))))
    tokens = Tokens(starts, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), *constants)
    line_kernel[(programs,)](tokens, len(tile_counts), piece_rows, merge_rows, programs)
    # Every tile of every column tile is taken once, in order.
    pieces = [row for row in piece_rows.tolist() if row[0] >= 0]
    owners = [sequence for sequence, count in enumerate(columns) for _ in range(count)]
    assert all(owners[column_tile] == sequence for _, sequence, column_tile, *_ in pieces)
    assert [(piece[2], tile) for piece in pieces for tile in range(piece[3], piece[4])] == [
        (column_tile, tile) for column_tile, sequence in enumerate(owners) for tile in range(tile_counts[sequence])
    ]
    # No program has more than its share; a piece's number is its place, and those of a column tile are in a row.
    load = [sum(end - begin for program, *_, begin, end, _ in pieces if program == one) for one in range(programs)]
    assert max(load) == triton.cdiv(sum(load), programs)
    assert [piece[5] for piece in pieces] == [row for row in range(len(piece_rows)) if piece_rows[row, 0] >= 0]
    for column_tile, (first, count) in enumerate(merge_rows.tolist()):
        numbers = [piece[5] for piece in pieces if piece[2] == column_tile]
        assert numbers == list(range(first, first + count))


@pytest.mark.parametrize(
    ("group", "memory", "at_once"),
    [(5, 228, 2), (5, 164, 2), (5, 100, 1), (16, 228, 1)],
    ids=["sm_90", "sm_80", "sm_86, sm_89 and sm_120", "a group whose sums take all registers"],
)
def test_no_more_thread_blocks_share_the_work_than_processors_hold(group, memory, at_once):
    assert decode.blocks_a_processor(group, 128, memory * 1024) == at_once
    processors, device = 4, torch.device("cpu")
    assert decode.count_blocks(1, 1, 2**20, at_once, device) == at_once * processors
