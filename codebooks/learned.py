"""Learned coordinates of keys: the matrix per KV head, sorted by what an error of a coordinate costs.

A fixed rotation makes all coordinates alike. Here the matrix is learned from two moments of a head: the *metric* M, what an
error costs (E[q q^T]), and the *spread* C of the centred keys. An error e costs e^T M e. With S = M^(1/2) and the eigenvectors
of

    S C S = U diag(weight) U^T,      forward = S U diag(weight)^(-1/2),      back = diag(weight)^(1/2) U^T S^(-1)

the coordinates y = x @ forward are uncorrelated and of equal spread, and an error of y_i costs weight_i times its square. So
tables made for one spread serve all coordinates, and those that weigh more get more bits: docs/learned.md derives it.

Two things differ from that closed form. A few thousand tokens do not show M well enough to be trusted in full, so its
correlations are tempered (`learn`). And coordinates whose levels are equally wide are turned among each other at random, which
makes them alike, and more like a Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from haarkv.codebooks.cubic import ERRORS
from haarkv.codebooks.haar import draw_gaussian, orthogonal_factor

EIGHTHS = 8
"""Equal parts of a vector's coordinates, from those that weigh most: in each, levels are equally wide."""
POWER = 0.4
"""Of the metric's correlations: 1 trusts them as they were seen, 0 not at all."""
_DAMPING = 1e-3
_FLOOR = 1e-9
_DEAD = 1e-18


@dataclass(frozen=True, eq=False)
class Basis:
    """Learned coordinates of one layer's keys, for each KV head; the most important first.

    `x - mean = y @ back`, and `y = (x - mean) @ forward`. Entries of both matrices are BF16 numbers, so no device rounds them;
    `back` is the inverse of the rounded `forward`, up to its own rounding.

    Attributes:
        mean: [H, D] fp32, in units of x.
        forward: [H, D, D] fp32; column i makes coordinate i.
        back: [H, D, D] fp32; row i is one unit of coordinate i. A channel whose errors cost nothing has a column of 0 and
            comes back as the mean.
        weights: [H, D] fp32, cost of a coordinate's squared error; descending by eighths, with the sum D.
        inv_freq: [R/2] fp64, RoPE's angles; the keys were rotated back to the begin of their stretch. Empty if unknown.
    """

    mean: Tensor
    forward: Tensor
    back: Tensor
    weights: Tensor
    inv_freq: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.mean.shape[0]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.mean.shape[1]

    def heads(self, part: slice | list[int]) -> Basis:
        """That of some KV heads."""
        return Basis(self.mean[part], self.forward[part], self.back[part], self.weights[part], self.inv_freq)


# -- The closed form -------------------------------------------------------------------------------------------------------


def learn(metric: Tensor, spread: Tensor, mean: Tensor, damping: float = _DAMPING, power: float = POWER) -> Basis:
    """The coordinates in which quantization costs least, for each KV head; computed in float64.

        metric = diag(channel) R diag(channel), R of diagonal 1;    S S = diag(channel) R**power diag(channel)

    Scaling a channel of x, and the metric inversely, changes the matrices only, not the levels and the cost of their errors.

    Args:
        metric: [H, D, D] fp64, symmetric and positive semi-definite: an error e costs e^T metric e, in any unit.
        spread: [H, D, D] fp64, second moment of the centred vectors, in any unit.
        mean: [H, D] in units of x.
        damping: share of each matrix's diagonal that is added, so that what the text did not show stays possible.
        power: of the metric's correlations R.
    Raises:
        ValueError: shapes do not fit, a number is not finite, or 8 does not divide D.
    Rounding points: forward and back to BF16, back from the rounded forward; weights and mean to fp32.
    """
    heads, dim = mean.shape
    if metric.shape != (heads, dim, dim) or spread.shape != metric.shape or dim % EIGHTHS:
        raise ValueError(f"moments of {list(metric.shape)} and {list(spread.shape)} do not fit a mean of {list(mean.shape)}")
    if not all(torch.isfinite(x).all() for x in (metric, spread, mean)):
        raise ValueError("a moment is not finite")
    moments = zip(_add_damping(metric, damping), _add_damping(spread, damping), strict=True)
    parts = [_head_basis(*both, power) for both in moments]
    forward, back, weights = (torch.stack(part) for part in zip(*parts, strict=True))
    # The inverse has numbers of 1e7 there. No query reads them, but whatever stores the vector in another format would.
    diagonal = metric.diagonal(dim1=-2, dim2=-1)
    unread = diagonal <= _DEAD * diagonal.amax(-1, keepdim=True)
    back = back.masked_fill(unread.unsqueeze(1), 0.0)
    return Basis(mean.float(), forward.float(), back.float(), weights.float())


def _root(metric: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """channel [D] and R**(power / 2) [D, D] of a metric."""
    channel = metric.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(metric / torch.outer(channel, channel))
    return channel, (vectors * values.clamp(min=_FLOOR).pow(power / 2)) @ vectors.T


def _add_damping(matrices: Tensor, damping: float) -> list[Tensor]:
    """Each of [H, D, D] plus a share of its diagonal, float64; a diagonal number of 0 counts as a tiny one."""
    damped = []
    for matrix in matrices.double():
        diagonal = matrix.diagonal().clamp(min=0.0)
        least = _DEAD * (diagonal.max() or torch.ones((), dtype=torch.float64))
        damped.append(matrix + torch.diag(damping * diagonal + least.where(diagonal <= least, torch.zeros(()))))
    return damped


def _head_basis(metric: Tensor, spread: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """forward, back and weights of one head."""
    channel, root = _root(metric, power)
    weights, eigenvectors = torch.linalg.eigh(root @ (spread * torch.outer(channel, channel)) @ root)
    weights, eigenvectors = weights.flip(-1), eigenvectors.flip(-1)
    weights = weights.clamp(min=_FLOOR * float(weights[0]))
    # Turned among each other, the coordinates of an eighth weigh alike.
    eighths = weights.view(EIGHTHS, -1)
    eighth_weights = eighths.mean(1, keepdim=True).expand_as(eighths).flatten()
    count = eighths.shape[1]
    eigenvectors = torch.cat([part @ _turn(i, count) for i, part in enumerate(eigenvectors.split(count, 1))], 1)
    forward = channel.unsqueeze(1) * (root @ eigenvectors) / eighth_weights.sqrt()
    forward = (forward / forward.square().mean().sqrt() / math.sqrt(len(forward))).to(torch.bfloat16).double()
    back = torch.linalg.inv(forward).to(torch.bfloat16)
    return forward, back.double(), eighth_weights / eighth_weights.mean()


@cache
def _turn(eighth: int, count: int) -> Tensor:
    """[n, n] float64, a rotation by chance, the same for all heads and layers."""
    gaussian = draw_gaussian(eighth, count * count).reshape(count, count)
    return torch.from_numpy(orthogonal_factor(gaussian.astype(np.float64)))


def expected_cost(weights: Tensor, widths: Sequence[int], base_cost: Tensor | None = None) -> Tensor:
    """Cost that levels leave, relative to storing only the mean, for Gaussian coordinates: [H] fp64, between 0 and 1.

    Args:
        weights: [H, D] fp32.
        widths: bits of a level in each eighth.
        base_cost: [H, D], cost of each coordinate without levels; the weights by default.
    """
    left = torch.tensor([ERRORS[bits] for bits in widths], dtype=torch.float64).repeat_interleave(weights.shape[1] // EIGHTHS)
    costs = weights.double() if base_cost is None else base_cost.double()
    return (costs * left).sum(1) / costs.sum(1)
