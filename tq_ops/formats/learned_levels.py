"""Levels of learned coordinates, tried at several sizes and judged where rounding decides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.formats.base import LevelChoice
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

    def nearest(self, value: Tensor) -> Tensor:
        """The boundary [..., D] that is nearest to each value."""
        parts = zip(value.chunk(EIGHTHS, -1), self.boundaries, strict=True)
        return torch.cat([boundaries[_nearest(boundaries, part)] for part, boundaries in parts], -1)

    def in_levels(self, value: Tensor, reach: Tensor) -> LevelChoice:
        """Values warped so that boundary n of every eighth lies at n + 1, and their reaches by the cell at hand."""
        warped, reaches = [], []
        both = zip(value.chunk(EIGHTHS, -1), reach.chunk(EIGHTHS, -1), strict=True)
        for (part, far), boundaries, table in zip(both, self.boundaries, self.tables, strict=True):
            cells = boundaries.diff() if len(boundaries) > 1 else table.diff()
            near = _nearest(boundaries, part)
            above = part >= boundaries[near]
            cell = cells[torch.where(above, near, near - 1).clamp(0, len(cells) - 1)]
            # A value lies within a cell of the nearest boundary; beyond the last ones, and by rounding, it may not.
            off = ((part - boundaries[near]) / cell).clamp(-0.999, 0.999)
            warped.append(near + 1 + torch.where(above, off, off.clamp(max=-1e-5)))
            reaches.append(far / torch.minimum(cell, cells[(near - 1).clamp(min=0, max=len(cells) - 1)]))
        most = 2 ** max(self.widths)
        return LevelChoice(torch.cat(warped, -1), torch.cat(reaches, -1), torch.arange(1.0, most, device=value.device))


def _nearest(boundaries: Tensor, value: Tensor) -> Tensor:
    above = torch.bucketize(value.contiguous(), boundaries).clamp(max=len(boundaries) - 1)
    below = (above - 1).clamp(min=0)
    return torch.where((value - boundaries[below]).abs() <= (boundaries[above] - value).abs(), below, above)


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

    def judged(self, t: Tensor, reach: Tensor, levels: Tensor) -> Tensor:
        """Gains [..., 1] by which to judge levels that somebody chose.

        Levels fit well enough if no gain fits better by more than rounding may move. Then they are judged by the gain to whose
        levels they are nearest, else by the gain that fits best.

        Args:
            t: coordinates of deviation 1.
            reach: [..., D], how far rounding may move each.
            levels: [..., D] uint8.
        """
        tried = [self._at(t, gain) for gain in self.of.gains]
        theirs = self._fitted(t, levels, self.eighths.centroids(levels))
        off = torch.stack([(one.levels != levels).sum(-1) for one in tried])
        best = torch.stack([one.fit for one in tried]).argmax(0)
        enough = [
            theirs.fit > self._least(t, reach, one, gain, theirs) for one, gain in zip(tried, self.of.gains, strict=True)
        ]
        at = torch.where(torch.stack(enough).all(0), off.argmin(0), best)
        return torch.tensor(self.of.gains, device=t.device)[at].unsqueeze(-1)

    def _least(self, t: Tensor, reach: Tensor, tried: Try, gain: float, theirs: Try) -> Tensor:
        """Fit [...] that theirs have at least if, of coordinates moved by up to `reach`, this gain does not fit better."""
        # Beside a boundary a coordinate may have fallen to the level that serves it worse.
        value = gain * t
        nearest = self.eighths.nearest(value)
        tied = (value - nearest).abs() <= gain * reach
        level = self.eighths.levels(torch.where(tied, 2 * nearest - value, value))
        other = self._fitted(t, level, self.eighths.centroids(level))
        worse = (t - other.nearest).abs() > (t - tried.nearest).abs()
        fit = self._fitted(t, tried.levels, torch.where(worse, other.restored, tried.restored)).fit
        # Coordinates move each for itself, and a fit with them by 2 * weights * nearest.
        moved = (self.of.weights.unsqueeze(-2) * reach * (theirs.nearest - tried.nearest)).square().sum(-1).sqrt()
        return fit - 2 * moved - _FIT_NOISE * fit - 1e-30

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
