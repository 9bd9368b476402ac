"""Levels in bytes: one after the other as a bit stream, in parts that unpack without shuffling, or in columns.

Columns are of levels of unequal widths: a vector in eighths, each of its own width. Coordinate j of an eighth lies in unit j
of the column that holds the eighth. A unit is one byte or two, little-endian, and full: the levels of its eighths, the first
in the lowest bits. A column is its D / 8 units one after the other, and a vector's codes are its columns. So a kernel takes a
level out by one shift and one mask, and a whole column is of one shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.codebooks.learned import EIGHTHS


def split_groups(x: Tensor, count: int) -> Tensor:
    """The last axis cut into groups of `count`: [..., n * count] -> [..., n, count]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // count, count)


def pack_stream(level: Tensor, bits: int) -> Tensor:
    """A bit stream, least significant bit first: level i begins at bit `i * bits`. Levels 0 to 7 of three bits: 88 C6 FA.

    Args:
        level: [..., n] uint8, each below 2**bits; n * bits is a multiple of 8.
        bits: 1 to 7.
    Returns:
        [..., n * bits / 8] uint8.
    """
    together, nbytes, word_type = _word(bits)
    word = torch.zeros((*level.shape[:-1], level.shape[-1] // together), dtype=word_type, device=level.device)
    for place in range(together):
        word |= level[..., place::together].to(word_type) << (bits * place)
    return word.unsqueeze(-1).view(torch.uint8)[..., :nbytes].flatten(-2)


def unpack_stream(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_stream`: [..., n * bits / 8] uint8 -> [..., n] uint8."""
    together, nbytes, word_type = _word(bits)
    octets = torch.nn.functional.pad(split_groups(codes, nbytes), (0, word_type.itemsize - nbytes))
    word = octets.contiguous().view(word_type).squeeze(-1)
    parts = [((word >> (bits * place)) & (2**bits - 1)).to(torch.uint8) for place in range(together)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """The fewest levels that end on a byte, the bytes they fill, and an integer with room for them."""
    together = 8 // math.gcd(8, bits)
    nbytes = together * bits // 8
    return together, nbytes, torch.uint8 if nbytes == 1 else torch.int32 if nbytes == 3 else torch.int64


def pack_parts(level: Tensor, bits: int) -> Tensor:
    """The vector in 8/bits parts laid over one another: `byte[j] = sum over parts p of level[p * n + j] << (p * bits)`.

    A part is read back whole, by one shift and one mask. Four bits are two halves, tq4's layout.

    Args:
        level: [..., D] uint8, each below 2**bits; D is a multiple of 8/bits.
        bits: 1, 2, 4 or 8.
    Returns:
        [..., n = D * bits / 8] uint8.
    """
    first, *others = level.chunk(8 // bits, dim=-1)
    for part, other in enumerate(others, start=1):
        first = first | (other << (part * bits))
    return first.contiguous()


def unpack_parts(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_parts`: [..., n] uint8 -> [..., n * 8 / bits] uint8."""
    if bits == 8:
        return codes
    return torch.cat([(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)


def planes(bits: int) -> list[int]:
    """How levels of any width are cut for `pack_parts`, low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack_planes(level: Tensor, bits: int) -> Tensor:
    """Each plane of a level's bits by itself, packed in parts: [..., D] uint8 -> [..., D * bits / 8] uint8."""
    packed, shift = [], 0
    for width in planes(bits):
        packed.append(pack_parts((level >> shift) & (2**width - 1), width))
        shift += width
    return torch.cat(packed, dim=-1)


def unpack_planes(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_planes`."""
    if len(planes(bits)) == 1:
        return unpack_parts(codes, bits)
    head_dim = codes.shape[-1] * 8 // bits
    level, shift, begin = torch.zeros((), dtype=torch.uint8, device=codes.device), 0, 0
    for width in planes(bits):
        end = begin + head_dim * width // 8
        level = level | (unpack_parts(codes[..., begin:end], width) << shift)
        shift, begin = shift + width, end
    return level


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


def eighth_widths(columns: tuple[Column, ...]) -> tuple[int, ...]:
    """Bits of a level of each eighth."""
    by_eighth = {part.eighth: part.bits for col in columns for part in col.parts}
    return tuple(by_eighth[eighth] for eighth in range(EIGHTHS))


def pack_columns(level: Tensor, columns: tuple[Column, ...]) -> Tensor:
    """Levels [..., D] uint8, each below 2**bits of its eighth -> codes [..., D * B / 8] uint8, B bits on average."""
    eighths = level.to(torch.int32).chunk(EIGHTHS, dim=-1)
    packed = []
    for col in columns:
        unit = torch.zeros_like(eighths[0])
        for part in col.parts:
            unit |= eighths[part.eighth] << part.shift
        octets = [(unit >> (8 * i)) & 255 for i in range(col.nbytes)]
        packed.append(torch.stack(octets, -1).flatten(-2).to(torch.uint8))
    return torch.cat(packed, -1)


def unpack_columns(codes: Tensor, columns: tuple[Column, ...]) -> Tensor:
    """Inverse of `pack_columns`."""
    units = codes.shape[-1] // sum(col.nbytes for col in columns)
    eighths: dict[int, Tensor] = {}
    for col, octets in zip(
        columns, torch.split(codes.to(torch.int32), [units * col.nbytes for col in columns], -1), strict=True
    ):
        unit = octets[..., :: col.nbytes]
        for i in range(1, col.nbytes):
            unit = unit | (octets[..., i :: col.nbytes] << (8 * i))
        eighths |= {part.eighth: (unit >> part.shift) & (2**part.bits - 1) for part in col.parts}
    return torch.cat([eighths[eighth] for eighth in range(EIGHTHS)], -1).to(torch.uint8)
