"""Weights of `linear`: a dense tensor, or quantised weight blocks of a few bits a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

_CHUNK, _ROW = 2**22, 2**13
"""Numbers that are restored at a time, as FP32; and in a row, of which gguf takes 16 at a time: it is fastest with these."""


@dataclass(frozen=True)
class BlockType:
    """A type of weight blocks.

    Attributes:
        name: name in GGUF files, such as Q4_K.
        numbers, nbytes: count of numbers and of bytes in one block.
        restore: dequantizes whole rows, [R, bytes of a row] uint8 on the host -> [R, numbers of a row] fp32.
    """

    name: str
    numbers: int
    nbytes: int
    restore: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A weight [out, in] in quantised blocks; each block is a part of a row.

    Attributes:
        data: [out, bytes of a row] uint8.
        dtype: dtype to which restored numbers are rounded once.
        row_scales, column_scales: [out] and [in] of `dtype`, powers of two that multiply the numbers.
        x_bits: 16 or 8. With 8, the spec rounds activations to 8 bits (`activations`); with 16, a kernel may round them to 16.
    """

    data: Tensor
    type: BlockType
    dtype: torch.dtype
    row_scales: Tensor | None = None
    column_scales: Tensor | None = None
    x_bits: int = 16

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.data), self.data.shape[1] // self.type.nbytes * self.type.numbers))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return sum(tensor.nbytes for tensor in (self.data, self.row_scales, self.column_scales) if tensor is not None)

    def __len__(self) -> int:
        return len(self.data)

    def to(self, device: torch.device) -> Self:
        """The same blocks on another device."""
        rows, columns = (scales if scales is None else scales.to(device) for scales in (self.row_scales, self.column_scales))
        return replace(self, data=self.data.to(device), row_scales=rows, column_scales=columns)

    def __mul__(self, scales: Tensor) -> Blocks:
        """The blocks with rows times [out, 1], or columns times [in] or [1, in]: powers of two, so nothing is rounded."""
        flat = scales.flatten().to(self.dtype)
        if scales.ndim == 2 and scales.shape[1] == 1:
            return replace(self, row_scales=flat if self.row_scales is None else self.row_scales * flat)
        return replace(self, column_scales=flat if self.column_scales is None else self.column_scales * flat)

    def rows(self, index: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [R, in] at a slice or [R] int64, restored on the host and moved to the blocks' device; rounded to `dtype`."""
        dtype = dtype or self.dtype
        numbers = restore_rows(self.data[index].cpu(), self.type.restore, self.shape[1], dtype).to(self.device)
        if self.row_scales is not None:
            numbers = numbers * self.row_scales[index].unsqueeze(-1)
        return numbers if self.column_scales is None else numbers * self.column_scales


Weight = Tensor | Blocks
"""A matrix [out, in] of a model."""


def rounding_to(weight: Weight, bits: int) -> Weight:
    """The same weight with `x_bits` = `bits`; a dense weight stays as it is."""
    return replace(weight, x_bits=bits) if isinstance(weight, Blocks) and weight.x_bits != bits else weight


LARGEST = 127.0
"""The largest integer of activations with 8 bits."""
_NUMBERS, _SMALLEST = 32, 1e-35
"""Count of numbers that share a step, and the smallest step."""


def activations(x: Tensor, weight: Weight) -> Tensor:
    """The factor x [T, in] fp32 of a product with a weight: x itself, or rounded to 8 bits if `x_bits` is 8.

    To round, each 32 numbers times the column scales become integers times one step: their largest size / 127, to nearest,
    ties to even. If one of the 32 is not finite, all become NaN.
    """
    if not isinstance(weight, Blocks) or weight.x_bits == 16:
        return x
    columns = 1.0 if weight.column_scales is None else weight.column_scales.float()
    blocks = (x.float() * columns).view(len(x), -1, _NUMBERS)
    steps = blocks.abs().amax(-1, keepdim=True) / LARGEST
    steps = torch.where(steps < torch.inf, steps, torch.nan)
    inverses = torch.where(steps > _SMALLEST, 1.0 / steps, steps * 0.0)
    return ((blocks * inverses).round() * steps).view(x.shape) / columns


def dense(weight: Weight) -> Tensor:
    """A weight as a tensor: a dense weight itself, blocks restored into new memory."""
    return weight.rows(slice(None)) if isinstance(weight, Blocks) else weight


def weight_numbers(weight: Weight, index: slice = slice(None)) -> Tensor:
    """The numbers of a weight for `linear`: a dense weight's rows, or restored blocks in FP32, not rounded to their dtype."""
    return weight.rows(index, torch.float32) if isinstance(weight, Blocks) else weight[index]


def weight_rows(weight: Weight, index: slice | Tensor) -> Tensor:
    """Rows of a weight [R, in] at a slice or [R] int64, as `Blocks.rows`."""
    return weight.rows(index) if isinstance(weight, Blocks) else weight[index]


def backing_tensor(weight: Weight) -> Tensor:
    """The tensor that holds a weight's numbers or blocks."""
    return weight.data if isinstance(weight, Blocks) else weight


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor."""


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As torch allocates it."""
    return torch.empty(shape, dtype=dtype)


def restore_rows(
    block_rows: Tensor,
    restore: Callable[[Tensor], Tensor],
    width: int,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    columns: slice = slice(None),
    change: Callable[[Tensor], Tensor] | None = None,
    empty: Empty = empty_tensor,
) -> Tensor:
    """Restore rows piece by piece: [R, columns] of `dtype`, to which FP32 is rounded once.

    Args:
        block_rows: [N, bytes of a row] uint8 on the host.
        width: numbers of a row.
        rows: indices [R] int64; all by default.
        change: applied to the FP32 numbers before they are rounded.
        empty: allocates the result.
    """
    count = len(block_rows) if rows is None else len(rows)
    result = empty((count, len(range(width)[columns])), dtype)
    step = max(1, _CHUNK // width)
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        blocks = block_rows[part if rows is None else rows[part]]
        # Blocks follow each other whatever row they belong to: rows that are short go together.
        together = math.gcd(len(blocks), 2 ** max(0, (_ROW // width).bit_length() - 1))
        numbers = restore(blocks.reshape(-1, together * block_rows.shape[1])).view(-1, width)[:, columns]
        result[part] = change(numbers) if change else numbers
    return result
