"""Learned coordinates of K or V: the matrix per KV head, and which coordinates own how many nibbles.

A fixed rotation makes all coordinates alike. Here the matrix is learned from two moments of a head: the *metric* M, what an
error costs (E[q q^T] for K, W_o^T W_o for V), and the *spread* C of the centred vectors. An error e costs e^T M e. With
S = M^(1/2) and the eigenvectors of

    S C S = U diag(weight) U^T,      forward = S U diag(weight)^(-1/2),      back = diag(weight)^(1/2) U^T S^(-1)

the coordinates y = x @ forward are uncorrelated and of equal spread, and an error of y_i costs weight_i times its square. So
one table of 16 levels serves all coordinates, and those that weigh more own more nibbles: docs/learned.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks.tables import lloyd_max

STAGES = 3
"""Nibbles that one coordinate may own: each refines what those before it left."""
_DAMPING = 1e-3
_FLOOR = 1e-9
_DEAD = 1e-18
_GRID = 1 << 14
_REACH = 8.0
_STEPS = 4096
_EXACT = 2.0**-30


@dataclass(frozen=True, eq=False)
class Basis:
    """Learned coordinates of K or V of one layer, for each KV head; the most important first.

    A vector is `x - mean = y @ back`, and its coordinates are `y = (x - mean) @ forward`. Entries of both matrices are BF16
    numbers, so no device rounds them; `back` is the inverse of the rounded `forward`, up to its own rounding.

    Attributes:
        mean: [H, D] fp32, in units of x.
        forward: [H, D, D] fp32; column i makes coordinate i.
        back: [H, D, D] fp32; row i is what one unit of coordinate i adds to the vector.
        weights: [H, D] fp32, what a squared error of a coordinate costs; descending, with the sum D.
    """

    mean: Tensor
    forward: Tensor
    back: Tensor
    weights: Tensor

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return self.mean.shape[0]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.mean.shape[1]

    def heads(self, part: slice) -> Basis:
        """That of some KV heads."""
        return Basis(*(tensor[part] for tensor in (self.mean, self.forward, self.back, self.weights)))


# -- The closed form -------------------------------------------------------------------------------------------------------


def learn(metric: Tensor, spread: Tensor, mean: Tensor, damping: float = _DAMPING) -> Basis:
    """The coordinates in which quantization costs least, for each KV head.

    Scaling a channel of x, with the metric scaled back, changes nothing but the matrices: the levels that are chosen, and
    what their errors cost, stay the same.

    Args:
        metric: [H, D, D] fp64, symmetric and positive semi-definite: an error e costs e^T metric e. Its unit does not count.
        spread: [H, D, D] fp64, the second moment of the centred vectors. Its unit does not count.
        mean: [H, D] in units of x.
        damping: share of each matrix's own diagonal that is added to it, so that what the text did not show is not taken for
            impossible.
    Raises:
        ValueError: shapes that do not fit together, or a number that is not finite.
    Rounding points: computed in float64; forward and back are rounded to BF16, back after it was made from the rounded
        forward; weights and mean to fp32.
    """
    heads, dim = mean.shape
    if metric.shape != (heads, dim, dim) or spread.shape != metric.shape:
        raise ValueError(f"moments of {list(metric.shape)} and {list(spread.shape)} do not fit a mean of {list(mean.shape)}")
    if not all(torch.isfinite(x).all() for x in (metric, spread, mean)):
        raise ValueError("a moment is not finite")
    parts = [_of_head(*_damped(metric[head].double(), spread[head].double(), damping)) for head in range(heads)]
    forward, back, weights = (torch.stack(part) for part in zip(*parts, strict=True))
    return Basis(mean.float(), forward.float(), back.float(), weights.float())


def _damped(metric: Tensor, spread: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Both matrices with a share of their own diagonals added; a channel that never moved counts as one that hardly did."""
    found = []
    for matrix in (metric, spread):
        diagonal = matrix.diagonal().clamp(min=0.0)
        least = _DEAD * (diagonal.max() or torch.ones((), dtype=torch.float64))
        found.append(matrix + torch.diag(damping * diagonal + least.where(diagonal <= least, torch.zeros(()))))
    return found[0], found[1]


def _of_head(metric: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """forward, back and weights of one head."""
    # Channels are scaled to a metric of diagonal 1 first: float64 then keeps its digits where channels differ by 1e6.
    channel = metric.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(metric / torch.outer(channel, channel))
    root = (vectors * values.clamp(min=_FLOOR).sqrt()) @ vectors.T
    weights, turned = torch.linalg.eigh(root @ (spread * torch.outer(channel, channel)) @ root)
    weights, turned = weights.flip(-1), turned.flip(-1)
    weights = weights.clamp(min=_FLOOR * float(weights[0]))
    forward = channel.unsqueeze(1) * (root @ turned) / weights.sqrt()
    forward = (forward / forward.square().mean().sqrt() / math.sqrt(len(forward))).to(torch.bfloat16).double()
    back = torch.linalg.inv(forward).to(torch.bfloat16)
    return forward, back.double(), weights / weights.mean()


# -- Nibbles ---------------------------------------------------------------------------------------------------------------


@cache
def refinements() -> tuple[float, ...]:
    """Steps (1, s2, s3) by which the second and third nibble of a coordinate scale the table of 16 levels.

    Each is the multiple of 2**-12 that leaves the least squared error of a Gaussian coordinate.
    """
    steps, _ = _refined()
    return steps


@cache
def errors() -> tuple[float, ...]:
    """What 0, 1, 2 and 3 nibbles leave of a Gaussian coordinate's variance: about 1, 0.0095, 0.0004 and 0.0001.

    They are multiples of 2**-30, so that every machine spends nibbles alike.
    """
    _, found = _refined()
    return found


@cache
def _refined() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Steps and errors, on a grid of a unit Gaussian."""
    centroids, boundaries = (table.double() for table in lloyd_max(4, 1))
    y = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * (2 * _REACH / _GRID) - _REACH
    density = torch.exp(-y.square() / 2)
    density /= density.sum()

    def left(rest: Tensor, step: float) -> Tensor:
        return rest - step * centroids[torch.bucketize(rest / step, boundaries, right=True)]

    def error(rest: Tensor) -> float:
        return float((density * rest.square()).sum())

    rest = left(y, 1.0)
    steps, found = [1.0], [1.0, error(rest)]
    for _ in range(1, STAGES):
        best, pace = _STEPS // 2, _STEPS // 8
        while pace:  # from coarse to fine: the error may have more than one minimum
            near = [best + k * pace for k in range(-4, 5) if 0 < best + k * pace < _STEPS]
            best = min(near, key=lambda k: error(left(rest, k / _STEPS)))
            pace //= 2
        steps.append(best / _STEPS)
        rest = left(rest, steps[-1])
        found.append(error(rest))
    return tuple(steps), tuple(round(e / _EXACT) * _EXACT for e in found)


def stages(weights: Tensor, nibbles: int) -> Tensor:
    """Spend the nibbles of a vector where they save most.

        cost = sum over coordinates i of weight_i * errors()[nibbles of i]

    Each nibble goes to the coordinate whose next one saves most. That is optimal, because a coordinate's next nibble always
    saves less than its last one. Weights descend, so those that own k nibbles or more are the first n_k.

    Args:
        weights: [H, D] fp32, descending.
        nibbles: N, the same for every head.
    Returns:
        [H, 3] int64: coordinates that own at least 1, 2 and 3 nibbles; each row sums to N.
    Raises:
        ValueError: more nibbles than the coordinates can own, or fewer than none.
    """
    dim = weights.shape[1]
    if not 0 <= nibbles <= STAGES * dim:
        raise ValueError(f"{dim} coordinates own 0 to {STAGES * dim} nibbles, not {nibbles}")
    saved = -torch.tensor(errors(), dtype=torch.float64).diff().unsqueeze(1) * weights.cpu().double().unsqueeze(1)  # [H, 3, D]
    chosen = saved.flatten(1).argsort(dim=1, descending=True, stable=True)[:, :nibbles]
    return torch.stack([(chosen // dim == stage).sum(1) for stage in range(STAGES)], dim=1)


def expected_cost(weights: Tensor, nibbles: int, spent: Tensor | None = None) -> Tensor:
    """What N nibbles leave of the cost of storing nothing but the mean, by the model of `stages`.

    Args:
        weights: [H, D] fp32, descending; they decide who owns nibbles.
        nibbles: N.
        spent: [H, D], what each coordinate costs without nibbles, on another text perhaps; the weights' own unless given.
    Returns:
        [H] fp64, between 0 and 1.
    """
    owners, left_by = stages(weights, nibbles), torch.tensor(errors(), dtype=torch.float64)
    owned = (torch.arange(weights.shape[1]) < owners.unsqueeze(-1)).sum(1)  # [H, D] nibbles of each
    costs = weights.double() if spent is None else spent.double()
    return (costs * left_by[owned]).sum(1) / costs.sum(1)
