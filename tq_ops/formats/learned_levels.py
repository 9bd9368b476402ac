"""Levels of learned coordinates: chosen at several sizes, refined stage by stage, and judged where rounding decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.formats.rotated import Coordinates, centroids_at

_FIT_NOISE = 1e-6


@dataclass(frozen=True)
class Try:
    """Vectors quantized at one size.

    Attributes:
        levels: [..., N] uint8.
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
class Refinement:
    """How coordinates y [..., H, n, D] of one layer become levels [..., H, n, N], and those what they restore.

    Attributes:
        of: the coordinates.
        centroids, boundaries: [16] and [15] fp32, on the device of `of`.
    """

    of: Coordinates
    centroids: Tensor
    boundaries: Tensor

    def tries(self, y: Tensor) -> list[Try]:
        """Coordinates quantized at each size."""
        return [self._at(y, gain) for gain in self.of.gains]

    def best(self, y: Tensor) -> Try:
        """Of each vector the size that fits best; of equals, the first."""
        tried = self.tries(y)
        best = torch.stack([t.fit for t in tried]).argmax(0)
        return Try(*(_picked([getattr(t, name) for t in tried], best) for name in Try.__annotations__))

    def judged(self, y: Tensor, reach: Tensor, levels: Tensor) -> Tensor:
        """Gains [..., 1] by which to judge levels that somebody chose.

        Levels fit well enough if no gain fits better by more than rounding may move. Then they are judged by the gain to whose
        levels they are nearest, else by the gain that fits best.

        Args:
            y: of the size that levels are made for.
            reach: [..., D], how far rounding may move each.
            levels: [..., N] uint8.
        """
        tried = self.tries(y)
        theirs = self._fitted(y, levels, self.restored(levels))
        off = torch.stack([(t.levels != levels).sum(-1) for t in tried])
        best = torch.stack([t.fit for t in tried]).argmax(0)
        enough = [theirs.fit > self._least(y, reach, t, gain, theirs) for t, gain in zip(tried, self.of.gains, strict=True)]
        at = torch.where(torch.stack(enough).all(0), off.argmin(0), best)
        return torch.tensor(self.of.gains, device=y.device)[at].unsqueeze(-1)

    def left(self, y: Tensor, levels: Tensor) -> Tensor:
        """What each level is chosen from, [..., N]: y less what the levels before it restore, over its step."""
        spread, left, values = self._by_stage(centroids_at(levels, self.centroids)), y, []
        for stage, step in enumerate(self.of.steps):
            values.append(left / step)
            left = left - step * spread[..., stage, :]
        return self._owned(torch.stack(values, -2))

    def over_steps(self, reach: Tensor) -> Tensor:
        """[..., D] of coordinates -> [..., N] of levels, in widths of their stages."""
        return self._owned(torch.stack([reach / step for step in self.of.steps], -2))

    def restored(self, levels: Tensor) -> Tensor:
        """What levels stand for before the scale, [..., D] fp32."""
        spread = self._by_stage(centroids_at(levels, self.centroids))
        return (spread * torch.tensor(self.of.steps, device=levels.device).unsqueeze(-1)).sum(-2)

    def _least(self, y: Tensor, reach: Tensor, tried: Try, gain: float, theirs: Try) -> Tensor:
        """Fit [...] that theirs have at least if, of coordinates moved by up to `reach`, this gain does not fit better."""
        # Beside a boundary a coordinate may have fallen to the level that serves it worse.
        other = self._at(y, gain, reach)
        worse = (y - other.nearest).abs() > (y - tried.nearest).abs()
        fit = self._fitted(y, tried.levels, torch.where(worse, other.restored, tried.restored)).fit
        # Coordinates move each for itself, and a fit with them by 2 * weights * nearest.
        moved = (self.of.weights.unsqueeze(-2) * reach * (theirs.nearest - tried.nearest)).square().sum(-1).sqrt()
        return fit - 2 * moved - _FIT_NOISE * fit - 1e-30

    def _at(self, y: Tensor, gain: float, ties: Tensor | None = None) -> Try:
        """Quantize coordinates at a size; those within `ties` [..., D] of a boundary as if beyond it."""
        owned = self._by_stage(torch.ones(self.of.owners.shape, device=y.device).unsqueeze(-2))  # [H, 1, stages, D]
        left, found, restored = gain * y, [], torch.zeros_like(y)
        for stage, step in enumerate(self.of.steps):
            value = left / step if ties is None else self._beyond(left / step, ties * gain / step)
            level = torch.bucketize(value, self.boundaries, right=True, out_int32=True).to(torch.uint8)
            restores = step * centroids_at(level, self.centroids) * owned[..., stage, :]
            found.append(level)
            restored, left = restored + restores, left - restores
        return self._fitted(y, self._owned(torch.stack(found, -2)), restored)

    def _beyond(self, value: Tensor, ties: Tensor) -> Tensor:
        """Values, those within `ties` of the nearest boundary mirrored at it."""
        above = torch.bucketize(value, self.boundaries).clamp(max=len(self.boundaries) - 1)
        both = torch.stack([self.boundaries[above], self.boundaries[(above - 1).clamp(min=0)]])
        near = both.gather(0, (value - both).abs().argmin(0, keepdim=True))[0]
        return torch.where((value - near).abs() <= ties, 2 * near - value, value)

    def _fitted(self, y: Tensor, levels: Tensor, restored: Tensor) -> Try:
        """How what levels restore, [..., D], fits coordinates."""
        weighted = restored * self.of.weights.unsqueeze(-2)
        along, kept = (weighted * y).sum(-1), (weighted * restored).sum(-1)
        return Try(levels, restored, kept, along.square() / kept, (along / kept).unsqueeze(-1) * restored)

    def _owned(self, by_stage: Tensor) -> Tensor:
        """[..., H, n, stages, D] -> [..., H, n, N], in the order of the levels."""
        flat = by_stage.flatten(-2)
        return flat.gather(-1, self.of.owners.unsqueeze(-2).expand(*flat.shape[:-1], -1))

    def _by_stage(self, of_levels: Tensor) -> Tensor:
        """The inverse of `_owned`, 0 where no level is: [..., H, n, N] -> [..., H, n, stages, D]."""
        stages, dim = len(self.of.steps), self.of.mean.shape[1]
        flat = of_levels.new_zeros(*of_levels.shape[:-1], stages * dim)
        flat.scatter_(-1, self.of.owners.unsqueeze(-2).expand(of_levels.shape), of_levels)
        return flat.view(*flat.shape[:-1], stages, dim)


def _picked(tensors: list[Tensor], which: Tensor) -> Tensor:
    """Of tensors [...] or [..., n] that which [...] names."""
    found = tensors[0]
    for number, other in enumerate(tensors[1:], 1):
        chosen = which == number
        found = torch.where(chosen.unsqueeze(-1) if other.ndim > which.ndim else chosen, other, found)
    return found
