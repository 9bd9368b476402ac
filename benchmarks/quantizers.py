"""How well vectors and numbers come back from a format and from levels, without a model: what `claims` computes with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from haarkv.tq_ops import formats

_VECTORS = 4096


# -- Vectors -----------------------------------------------------------------------------------------------------------------


def gaussian(head_dim: int) -> Tensor:
    """[4096, D] fp32 of independent Gaussian numbers: what every table of levels here is made for."""
    return torch.randn(_VECTORS, head_dim, generator=torch.Generator().manual_seed(0))


def with_outliers(head_dim: int) -> Tensor:
    """The same with two channels 50 and 30 times as large, as keys of real models have them."""
    x = gaussian(head_dim)
    x[:, 0] *= 50
    x[:, 1] *= -30
    return x


def round_trip(kv: str, x: Tensor) -> Tensor:
    """What a format makes of vectors, stored and read again."""
    kv_format = formats.get(kv)
    return kv_format.dequantize(kv_format.quantize(x, 0), 0)


def mean_cosine(kv: str, x: Tensor) -> float:
    """Of vectors with their own round trips."""
    return float(torch.cosine_similarity(x, round_trip(kv, x), dim=-1).mean())


# -- Codebooks ---------------------------------------------------------------------------------------------------------------


def distortion(centroids: Tensor) -> float:
    """Mean squared error of N(0, 1) rounded to the nearest of these numbers, ascending; exact, in float64.

    A cell from a to b has mass m, first moment f = pdf(a) - pdf(b) and second moment s = m + a pdf(a) - b pdf(b). With
    centroid c it adds s - 2 c f + c**2 m.
    """
    edges = torch.nn.functional.pad((centroids[:-1] + centroids[1:]) / 2, (1, 1), value=math.inf)
    edges[0] = -math.inf
    pdf = torch.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)
    moved = torch.where(edges.isinf(), 0.0, edges) * pdf
    mass, first = torch.erf(edges / math.sqrt(2)).diff() / 2, -pdf.diff()
    return float((mass - moved.diff() - 2 * centroids * first + centroids**2 * mass).sum())


def uniform(levels: int, reach: float) -> Tensor:
    """Midpoints of equal cells from -reach to reach."""
    step = 2 * reach / levels
    return (torch.arange(levels, dtype=torch.float64) + 0.5) * step - reach


def best_uniform(levels: int) -> float:
    """The least error of any uniform quantizer, by golden-section search over its reach."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = 0.5, 8.0
    while high - low > 1e-9:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if distortion(uniform(levels, a)) < distortion(uniform(levels, b)):
            high = b
        else:
            low = a
    return distortion(uniform(levels, low))


def reach_of(levels: int, error: float) -> float:
    """How far a uniform quantizer reaches that is too wide and has this error, by bisection."""
    low, high = 3.0, 8.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if distortion(uniform(levels, middle)) < error else (low, middle)
    return low
