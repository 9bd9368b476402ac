"""The line of tiles of `tq_ops.cuda.schedule`, spelled out for lengths that are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """What one program has of one column tile.

    Attributes:
        program: of 0 … programs - 1.
        sequence: of the batch.
        column_tile: of all sequences' column tiles, one after the other.
        begin, end: its tiles of stored tokens: begin … end - 1 of the sequence.
        number: where its partial result goes.
    """

    program: int
    sequence: int
    column_tile: int
    begin: int
    end: int
    number: int


def unit_of(stored: Sequence[int], columns: Sequence[int], programs: int) -> int:
    """Tiles of a program, at least 1: what `schedule.share_of` computes on the device."""
    return max(1, -(-sum(n * m for n, m in zip(stored, columns, strict=True)) // programs))


def pieces(stored: Sequence[int], columns: Sequence[int], programs: int) -> Iterator[Piece]:
    """Every piece, in the order of the line.

    Args:
        stored: of each sequence, its tiles of stored tokens; 0 of a sequence that is not there.
        columns: of each sequence, its column tiles.
        programs: of one KV head.
    """
    unit, place, column_tile = unit_of(stored, columns, programs), 0, 0
    for sequence, (length, count) in enumerate(zip(stored, columns, strict=True)):
        for _ in range(count):
            begin = 0
            while begin < length:
                program = place // unit
                end = min(length, begin + (program + 1) * unit - place)
                yield Piece(program, sequence, column_tile, begin, end, program + column_tile)
                place, begin = place + end - begin, end
            column_tile += 1
