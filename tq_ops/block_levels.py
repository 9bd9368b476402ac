"""Blocks of GGUF files as integer levels with a scale and a minimum per group.

    number = scale * level + minimum

Levels and scales are exact: gguf restores the same products. Adding the minimum in FP32 rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.formats.packing import unpack_parts, unpack_stream

GROUP = 32
"""Numbers of a group that shares a scale; of Q6_K half as many."""

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the four bits of a number stand for."""


class Levels(NamedTuple):
    """Rows of blocks, by groups.

    Attributes:
        level: [R, groups, numbers of a group] int8, offset subtracted.
        scale: [R, groups] fp32.
        minimum: the same, where the type has one.
    """

    level: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    def numbers(self) -> Tensor:
        """[R, numbers of a row] fp32."""
        numbers = self.level.float() * self.scale.unsqueeze(-1)
        return (numbers if self.minimum is None else numbers + self.minimum.unsqueeze(-1)).flatten(1)


def unpack_levels(blocks: Tensor, name: str) -> Levels:
    """Levels of blocks [R, blocks, bytes of a block] uint8 of a type in `_READ`."""
    return _READ[name](blocks)


# -- Fields of a block -----------------------------------------------------------------------------------------------------


def q4_lower_bits(blocks: Tensor, at: int) -> Tensor:
    """Levels' lower bits [R, n, 8, 32] of 256 numbers, of which blocks 2 i and 2 i + 1 share 32 bytes."""
    return unpack_parts(blocks[..., at : at + 128].reshape(*blocks.shape[:2], 4, 32), 4).view(*blocks.shape[:2], 8, 32)


def q5_fifth_bits(blocks: Tensor) -> Tensor:
    """Levels' fifth bits [R, n, 8, 32] of Q5_K: bit J of byte i belongs to number i of block J."""
    return unpack_stream(blocks[..., 16:48], 1).view(*blocks.shape[:2], 32, 8).transpose(-1, -2)


def six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [R, n, 8] of Q4_K and Q5_K."""
    x, y, z = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([x & 63, z & 15 | x >> 2 & 48], -1)
    return scales, torch.cat([y & 63, z >> 4 | y >> 2 & 48], -1)


def q6_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Levels' lower four and upper two bits [R, n, 8, 32] of Q6_K."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)  # halves, quarters 0 and 1
    lower = torch.cat([low & 15, low >> 4], -2)  # four quarters of each half
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    upper = torch.cat([high >> 2 * quarter & 3 for quarter in range(4)], -2)
    return lower.flatten(-3, -2), upper.flatten(-3, -2)


# -- A type each -----------------------------------------------------------------------------------------------------------


def _half(blocks: Tensor, at: int) -> Tensor:
    """FP16 of each block at a byte: [R, n] fp32."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float().squeeze(-1)


def _block32_levels(blocks: Tensor, at: int, fifth: int | None = None, less: int = 0) -> Tensor:
    """Levels of blocks of 32 whose 16 bytes of codes lie at `at`, and fifth bits at `fifth`."""
    level = unpack_parts(blocks[..., at : at + 16], 4)
    if fifth is not None:
        level = level | unpack_stream(blocks[..., fifth : fifth + 4], 1) << 4
    return level.to(torch.int8) - less


def _table_values(blocks: Tensor, at: int, values: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.int8, device=blocks.device)
    return table[unpack_parts(blocks[..., at : at + 16], 4).long()]


def _q8_0(blocks: Tensor) -> Levels:
    return Levels(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q4_k(blocks: Tensor) -> Levels:
    return _superblock_levels(blocks, q4_lower_bits(blocks, 16))


def _q5_k(blocks: Tensor) -> Levels:
    return _superblock_levels(blocks, q4_lower_bits(blocks, 48) | q5_fifth_bits(blocks) << 4)


def _superblock_levels(blocks: Tensor, level: Tensor) -> Levels:
    scales, minima = (
        (_half(blocks, at).unsqueeze(-1) * each.float()).flatten(1) for at, each in zip((0, 2), six_bits(blocks), strict=True)
    )
    return Levels(level.flatten(1, 2).to(torch.int8), scales, -minima)


def _q6_k(blocks: Tensor) -> Levels:
    lower, upper = q6_bits(blocks)
    level = (lower | upper << 4).to(torch.int8) - 32
    block_scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scale = (_half(blocks, 208).unsqueeze(-1) * block_scales).flatten(1)
    return Levels(level.reshape(len(blocks), -1, 16), scale)


def _mxfp4(blocks: Tensor) -> Levels:
    # The byte is an exponent with 127 added, and the table's values are twice what they stand for.
    exponent = blocks[..., 0].to(torch.int32) - 128
    return Levels(_table_values(blocks, 1, _MXFP4), torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent))


_READ: dict[str, Callable[[Tensor], Levels]] = {
    "Q8_0": _q8_0,
    "Q4_0": lambda stored: Levels(_block32_levels(stored, 2, less=8), _half(stored, 0)),
    "Q4_1": lambda stored: Levels(_block32_levels(stored, 4), _half(stored, 0), _half(stored, 2)),
    "Q5_0": lambda stored: Levels(_block32_levels(stored, 6, 2, less=16), _half(stored, 0)),
    "Q5_1": lambda stored: Levels(_block32_levels(stored, 8, 4), _half(stored, 0), _half(stored, 2)),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda stored: Levels(_table_values(stored, 2, _IQ4_NL), _half(stored, 0)),
    "MXFP4": _mxfp4,
}
