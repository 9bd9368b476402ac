"""Lloyd-Max quantizers of a Gaussian coordinate N(0, 1/sqrt(head_dim)): the published table and the converged one.

A rotated unit vector has coordinates that are close to N(0, 1/sqrt(D)), so one scalar codebook serves
every coordinate of every head. `published` repeats the solver of the public Qwen3-14B TurboQuant kernels, which stops
after 200 FP32 iterations short of the fixed point; caches written with its table can only be read with it. `converged`
is the true optimum.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_BITS = 8
Solver = Literal["published", "converged"]


class Codebook(NamedTuple):
    """A scalar quantizer of 2**bits levels.

    Attributes:
        centroids: [2**bits] fp32, ascending; in units of a unit vector's coordinate.
        boundaries: [2**bits - 1] fp32, ascending; level = #{b : y >= b}.
    """

    centroids: Tensor
    boundaries: Tensor


def solve(bits: int, head_dim: int, solver: Solver = "published") -> Codebook:
    """Compute a codebook from scratch; `codebooks.lloyd_max` reads the shipped one.

    Args:
        bits: bits a coordinate, 1 to 8.
        head_dim: D; the source's standard deviation is 1/sqrt(D).
        solver: "published" (200 FP32 iterations) or "converged" (the fixed point, in float64).
    Raises:
        ValueError: bits or head_dim out of range, or an unknown solver.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"a codebook has 1 to {MAX_BITS} bits, not {bits}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, not {head_dim}")
    if solver == "published":
        return _published(2**bits, 1.0 / math.sqrt(head_dim))
    if solver == "converged":
        centroids = converged_unit_centroids(2**bits) / math.sqrt(head_dim)
        return Codebook(centroids.float(), ((centroids[:-1] + centroids[1:]) / 2).float())
    raise ValueError(f"unknown solver {solver!r}; choose published or converged")


def _published(levels: int, sigma: float) -> Codebook:
    """The published FP32 iteration, operation for operation.

    200 iterations amplify the last bit of `exp` and `erf`, so another math library ends up to 2e-6 away (in units of
    sigma: 2e-5). The shipped table carries the published bits; `make tables` regenerates them.
    """
    reach = 3.5 * sigma
    centroids = torch.linspace(-reach, reach, levels + 2, dtype=torch.float32)[1:-1]
    outer = torch.tensor([-reach * 3, reach * 3], dtype=torch.float32)
    for _ in range(200):
        midpoints = (centroids[:-1] + centroids[1:]) / 2
        z = torch.cat([outer[:1], midpoints, outer[1:]]) / sigma
        density = (-0.5 * z * z).exp() * (1 / math.sqrt(2 * math.pi))
        cumulative = 0.5 * (1 + torch.erf(z * (1 / math.sqrt(2))))
        mass = cumulative[1:] - cumulative[:-1]
        # In FP32 the cells of 7 and 8 bits that lie far out can have no mass at all; they keep their place.
        mean = sigma * (density[:-1] - density[1:]) / mass.clamp(min=1e-15)
        moved = torch.where(mass > 1e-15, mean, centroids)
        shift = (moved - centroids).abs().max().item()
        centroids = moved
        if shift < 1e-10:
            break
    return Codebook(centroids, (centroids[:-1] + centroids[1:]) / 2)


def converged_unit_centroids(levels: int) -> Tensor:
    """Fixed point of Lloyd-Max for N(0, 1): [levels] float64, odd about zero, to about 1e-14.

    Newton's method on `c_i - E[X | cell i] = 0`; Lloyd's own iteration would take thousands of rounds at 8 bits.
    By symmetry only the positive half is solved; its first cell starts at the fixed boundary 0.
    """
    if levels < 2 or levels % 2:
        raise ValueError(f"levels must be even and at least 2, not {levels}")
    half = levels // 2
    # Panter-Dite companding: quantiles of the density's cube root, which is a Gaussian of sigma sqrt(3).
    points = (torch.arange(half, dtype=torch.float64) + 0.5) / levels + 0.5
    c = math.sqrt(6.0) * torch.erfinv(2 * points - 1)
    identity = torch.eye(half, dtype=torch.float64)
    for _ in range(100):
        low = torch.cat([c.new_zeros(1), (c[:-1] + c[1:]) / 2])
        high = torch.cat([(c[:-1] + c[1:]) / 2, c.new_full((1,), math.inf)])
        mass = (torch.erfc(low / math.sqrt(2)) - torch.erfc(high / math.sqrt(2))) / 2
        pdf_low, pdf_high = (torch.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in (low, high))
        mean = (pdf_low - pdf_high) / mass
        # d mean / d edge = pdf(edge) * (edge - mean) / mass, with the sign of the side; each edge is half of two centroids.
        d_low = pdf_low * (mean - low) / mass
        d_high = torch.where(high.isinf(), c.new_zeros(()), pdf_high * (high.clamp(max=1e9) - mean) / mass)
        d_low[0] = 0.0  # the boundary at zero does not move
        jacobian = identity - torch.diag((d_low + d_high) / 2)
        jacobian -= torch.diag(d_high[:-1] / 2, 1) + torch.diag(d_low[1:] / 2, -1)
        step = torch.linalg.solve(jacobian, c - mean)
        c = c - step
        if step.abs().max().item() < 1e-15 * levels:
            break
    return torch.cat([-c.flip(0), c])
