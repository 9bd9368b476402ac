"""Levels of learned coordinates, tried at several sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.formats.columns import Column, widths_of
from haarkv.tq_ops.formats.rotated import Coordinates

_FIT_NOISE = 1e-6


@dataclass(frozen=True, eq=False)
class Eighths:
    """Tables of the widths of a vector's eighths, on a device.

    Attributes:
        widths: bits of each eighth.
        tables, boundaries: of each eighth, [2**bits] and [2**bits - 1] fp32.
    """

    widths: tuple[int, ...]
    tables: tuple[Tensor, ...]
    boundaries: tuple[Tensor, ...]

    def levels(self, value: Tensor) -> Tensor:
        """[..., D] fp32 -> [..., D] uint8."""
        parts = zip(value.chunk(EIGHTHS, -1), self.boundaries, strict=True)
        return torch.cat([torch.bucketize(v.contiguous(), b, right=True, out_int32=True) for v, b in parts], -1).to(
            torch.uint8
        )

    def centroids(self, level: Tensor) -> Tensor:
        """[..., D] uint8 -> [..., D] fp32."""
        parts = zip(level.int().chunk(EIGHTHS, -1), self.tables, strict=True)
        return torch.cat([table.index_select(0, part.flatten()).view(part.shape) for part, table in parts], -1)


@dataclass(frozen=True)
class Try:
    """Vectors quantized at one size.

    Attributes:
        levels: [..., D] uint8.
        restored: [..., D] fp32, what they stand for before the scale.
        kept: [...], weighted square of the length of that.
        fit: [...], the more, the nearer is that to the vector's direction.
        nearest: [..., D], `restored` of the length that comes nearest to the vector.
    """

    levels: Tensor
    restored: Tensor
    kept: Tensor
    fit: Tensor
    nearest: Tensor


@dataclass(frozen=True, eq=False)
class Levels:
    """How coordinates t [..., H, n, D] of one layer become levels of the same shape.

    Attributes:
        of: the coordinates, on the device of `eighths`.
    """

    of: Coordinates
    eighths: Eighths

    def best(self, t: Tensor) -> Try:
        """Of each vector the size that fits best; of equals, the first."""
        tried = [self._at(t, gain) for gain in self.of.gains]
        best = torch.stack([one.fit for one in tried]).argmax(0)
        return Try(*(_picked([getattr(one, name) for one in tried], best) for name in Try.__annotations__))

    def _at(self, t: Tensor, gain: float) -> Try:
        levels = self.eighths.levels(gain * t)
        return self._fitted(t, levels, self.eighths.centroids(levels))

    def _fitted(self, t: Tensor, levels: Tensor, restored: Tensor) -> Try:
        """How what levels restore, [..., D], fits coordinates."""
        weighted = restored * self.of.weights.unsqueeze(-2)
        along, kept = (weighted * t).sum(-1), (weighted * restored).sum(-1)
        return Try(levels, restored, kept, along.square() / kept, (along / kept).unsqueeze(-1) * restored)


def _picked(tensors: list[Tensor], which: Tensor) -> Tensor:
    """Of tensors [...] or [..., n] that which [...] names."""
    found = tensors[0]
    for number, other in enumerate(tensors[1:], 1):
        chosen = which == number
        found = torch.where(chosen.unsqueeze(-1) if other.ndim > which.ndim else chosen, other, found)
    return found


@cache
def eighths_of(columns: tuple[Column, ...], device: torch.device) -> Eighths:
    """The tables of columns on a device, the same object each time."""
    widths = widths_of(columns)
    tables = tuple(cubic.centroids(bits).to(device) for bits in widths)
    return Eighths(widths, tables, tuple(cubic.boundaries(bits).to(device) for bits in widths))
