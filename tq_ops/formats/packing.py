"""Packing levels into bytes: as a bit stream, in parts that unpack without shuffling, or in columns.

Columns hold levels of different widths, one width for each eighth of a vector. A column has D / 8 units of one or two bytes,
little-endian. Unit j holds the level of coordinate j of each eighth in the column, the first eighth in the lowest bits. Codes
are one column after the other. So a kernel extracts a level with one shift and one mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.codebooks.learned import EIGHTHS


def split_groups(x: Tensor, count: int) -> Tensor:
    """[..., n * count] -> [..., n, count]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // count, count)


def pack_stream(level: Tensor, bits: int) -> Tensor:
    """A bit stream, least significant bit first: [..., n] uint8 -> [..., n * bits / 8] uint8; 8 divides n * bits.

    Level i begins at bit `i * bits` (1 to 7). Levels 0 to 7 of three bits: 88 C6 FA.
    """
    together, nbytes, word_type = _word(bits)
    word = torch.zeros((*level.shape[:-1], level.shape[-1] // together), dtype=word_type, device=level.device)
    for place in range(together):
        word |= level[..., place::together].to(word_type) << (bits * place)
    return word.unsqueeze(-1).view(torch.uint8)[..., :nbytes].flatten(-2)


def unpack_stream(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_stream`."""
    together, nbytes, word_type = _word(bits)
    octets = torch.nn.functional.pad(split_groups(codes, nbytes), (0, word_type.itemsize - nbytes))
    word = octets.contiguous().view(word_type).squeeze(-1)
    parts = [((word >> (bits * place)) & (2**bits - 1)).to(torch.uint8) for place in range(together)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """The fewest levels that end on a byte, their bytes, and an integer dtype that holds them."""
    together = 8 // math.gcd(8, bits)
    nbytes = together * bits // 8
    return together, nbytes, torch.uint8 if nbytes == 1 else torch.int32 if nbytes == 3 else torch.int64


def pack_parts(level: Tensor, bits: int) -> Tensor:
    """8/bits parts of a vector over one another: `byte[j] = sum over parts p of level[p * n + j] << (p * bits)`.

    [..., D] uint8 -> [..., n = D * bits / 8] uint8, bits 1, 2, 4 or 8. A part unpacks by one shift and one mask.
    """
    first, *others = level.chunk(8 // bits, dim=-1)
    for part, other in enumerate(others, start=1):
        first = first | (other << (part * bits))
    return first.contiguous()


def unpack_parts(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_parts`."""
    if bits == 8:
        return codes
    return torch.cat([(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)


def planes(bits: int) -> list[int]:
    """Widths that a level is cut into for `pack_parts`, low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack_planes(level: Tensor, bits: int) -> Tensor:
    """Each plane of bits packed in parts: [..., D] uint8 -> [..., D * bits / 8] uint8."""
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
    """Levels of one eighth (0 to 7) in the units of a column, from bit `shift` on."""

    eighth: int
    bits: int
    shift: int


@dataclass(frozen=True)
class Column:
    """Eighths that share units of `nbytes`; `parts` from the lowest bits on."""

    nbytes: int
    parts: tuple[Part, ...]


def column(*eighths: tuple[int, int]) -> Column:
    """A column of eighths, `(eighth, bits)` each, from the lowest bits on; a ValueError if they do not fill a byte or two."""
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
    """Levels [..., D] uint8 -> codes [..., D * B / 8] uint8, B bits on average."""
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
