"""Levels of unequal widths in bytes: a vector in eighths, each of its own width, and their levels side by side in columns.

Coordinate j of an eighth lies in unit j of the column that holds the eighth. A unit is one byte or two, little-endian, and
full: the levels of its eighths, the first in the lowest bits. A column is its D / 8 units one after the other, and a vector's
codes are its columns. So a kernel takes a level out by one shift and one mask, and a whole column is of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.codebooks.learned import EIGHTHS


@dataclass(frozen=True)
class Part:
    """The levels of one eighth in the units of a column.

    Attributes:
        eighth: which, 0 to 7.
        bits: of a level.
        shift: lowest bit in a unit.
    """

    eighth: int
    bits: int
    shift: int


@dataclass(frozen=True)
class Column:
    """Eighths whose levels lie in the same units.

    Attributes:
        nbytes: of a unit, 1 or 2.
        parts: from the lowest bits on; together they fill a unit.
    """

    nbytes: int
    parts: tuple[Part, ...]


def column(*eighths: tuple[int, int]) -> Column:
    """A column of eighths, `(eighth, bits)` each, from the lowest bits on.

    Raises:
        ValueError: they do not fill a byte or two.
    """
    parts, shift = [], 0
    for eighth, bits in eighths:
        parts.append(Part(eighth, bits, shift))
        shift += bits
    if shift not in (8, 16):
        raise ValueError(f"levels of {shift} bits fill no unit")
    return Column(shift // 8, tuple(parts))


def widths_of(columns: tuple[Column, ...]) -> tuple[int, ...]:
    """Bits of a level of each eighth."""
    by_eighth = {part.eighth: part.bits for of in columns for part in of.parts}
    return tuple(by_eighth[eighth] for eighth in range(EIGHTHS))


def pack_columns(level: Tensor, columns: tuple[Column, ...]) -> Tensor:
    """Levels [..., D] uint8, each below 2**bits of its eighth -> codes [..., D * B / 8] uint8, B bits on average."""
    eighths = level.to(torch.int32).chunk(EIGHTHS, dim=-1)
    packed = []
    for of in columns:
        unit = torch.zeros_like(eighths[0])
        for part in of.parts:
            unit |= eighths[part.eighth] << part.shift
        octets = [(unit >> (8 * i)) & 255 for i in range(of.nbytes)]
        packed.append(torch.stack(octets, -1).flatten(-2).to(torch.uint8))
    return torch.cat(packed, -1)


def unpack_columns(codes: Tensor, columns: tuple[Column, ...]) -> Tensor:
    """Inverse of `pack_columns`."""
    units = codes.shape[-1] // sum(of.nbytes for of in columns)
    eighths: dict[int, Tensor] = {}
    for of, octets in zip(columns, torch.split(codes.to(torch.int32), [units * of.nbytes for of in columns], -1), strict=True):
        unit = octets[..., :: of.nbytes]
        for i in range(1, of.nbytes):
            unit = unit | (octets[..., i :: of.nbytes] << (8 * i))
        eighths |= {part.eighth: (unit >> part.shift) & (2**part.bits - 1) for part in of.parts}
    return torch.cat([eighths[eighth] for eighth in range(EIGHTHS)], -1).to(torch.uint8)
