"""Learned coordinates of K and V: what a format of learned nibbles takes in place of a fixed rotation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks.tables import lloyd_max

STAGES = 3
"""Nibbles that one coordinate may own: each refines what those before it left."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Learned coordinates of K or V of one layer, for each KV head; the most important coordinate first.

        y = (x - mean) @ forward;   x = y @ back + mean

    Attributes:
        mean: [H, D] fp32, in units of x.
        forward: [H, D, D] fp32, a coordinate a column; BF16 numbers, so that no device rounds them. Of a unit vector the
            coordinates are about N(0, 1/sqrt(D)), as those of a rotation are.
        back: [H, D, D] fp32, its inverse, a coordinate a row; BF16 numbers.
        weights: [H, D] fp32, what an error of a coordinate counts, squared; descending.
    """

    mean: Tensor
    forward: Tensor
    back: Tensor
    weights: Tensor

    def heads(self, part: slice) -> Basis:
        """That of some KV heads."""
        return Basis(*(tensor[part] for tensor in (self.mean, self.forward, self.back, self.weights)))


@cache
def refinements() -> tuple[float, ...]:
    """Steps (1, s2, s3) by which the second and third nibble of a coordinate scale the table of 16 levels.

    Each is the one that leaves the least squared error of a Gaussian coordinate, to the nearest multiple of 2**-12, which
    every machine finds the same: about 0.184 and 0.048.
    """
    (y, density), table = _gaussian(), lloyd_max(4, 1).centroids.double()
    steps, left = [1.0], _left(y, table, 1.0)
    for _ in range(1, STAGES):
        low, high = 0.0, steps[-1]
        while high - low > 2.0**-20:  # the error has one minimum: cut the bracket by thirds
            third = (high - low) / 3
            errors = [float((_left(left, table, s).square() * density).sum()) for s in (low + third, high - third)]
            low, high = (low, high - third) if errors[0] < errors[1] else (low + third, high)
        steps.append(round((low + high) / 2 * 2**12) / 2**12)
        left = _left(left, table, steps[-1])
    return tuple(steps)


def _gaussian() -> tuple[Tensor, Tensor]:
    """Numbers, and how likely a unit Gaussian is near each."""
    y = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    density = torch.exp(-y.square() / 2)
    return y, density / density.sum()


def _left(y: Tensor, table: Tensor, step: float) -> Tensor:
    """What the nearest of the scaled levels leaves of each number."""
    boundaries = (table[1:] + table[:-1]) / 2
    return y - step * table[torch.bucketize(y / step, boundaries)]


@cache
def errors() -> tuple[float, ...]:
    """Squared error of a unit Gaussian coordinate that owns 0, 1, 2 and 3 nibbles."""
    (y, density), table = _gaussian(), lloyd_max(4, 1).centroids.double()
    left, found = y, [1.0]
    for step in refinements():
        left = _left(left, table, step)
        found.append(float((left.square() * density).sum()))
    return tuple(found)


def stages(weights: Tensor, nibbles: int) -> Tensor:
    """How many coordinates own a first, a second and a third nibble, so that the weighted error is least.

    A nibble goes to the coordinate where it saves most; savings fall with each nibble of a coordinate, so taking the largest
    ones is optimal. Weights descend, so the owners of each stage are the first coordinates.

    Args:
        weights: [H, D] fp32, descending.
        nibbles: N, of a vector; at most STAGES * D.
    Returns:
        [H, STAGES] int64, descending; each row adds up to N.
    """
    saved = -torch.tensor(errors(), dtype=torch.float64).diff()
    gain = (saved[:, None] * weights.double().cpu()[:, None]).flatten(1)  # [H, STAGES * D], the first nibbles first
    # A stable sort: of equal gains the lower stage and coordinate comes first, on every machine.
    chosen = torch.sort(gain, dim=1, descending=True, stable=True).indices[:, :nibbles]
    return torch.stack([(chosen // weights.shape[1] == stage).sum(1) for stage in range(STAGES)], dim=1)
