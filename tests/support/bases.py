"""Made-up learned coordinates: of every head another, far from a rotation, with outlier channels."""

import torch

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.formats.learned import Calibration


def basis(heads, dim, seed, *, spread=2.0):
    """A basis whose coordinates' weights fall by `10**spread` from first to last, for vectors of two large channels."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(gaussian).Q
    weights = torch.logspace(0, -spread, dim, dtype=torch.float64).repeat(heads, 1)
    weights = weights / weights.sum(1, keepdim=True) * dim
    channels = torch.ones(dim, dtype=torch.float64)
    channels[:2] = 30.0
    # x = (y * sqrt(weights)) @ rotation.T * channels, so that y are about equal and errors count by weight.
    back = (weights.sqrt().unsqueeze(-1) * rotation.mT * channels).to(torch.bfloat16)
    forward = torch.linalg.inv(back.double()).to(torch.bfloat16)
    mean = channels * torch.randn(heads, dim, generator=generator, dtype=torch.float64) / 4
    return Basis(mean.float(), forward.float(), back.float(), weights.float())


def calibration(layers=2, heads=2, dim=128, seed=0):
    """Of a model of so many layers and KV heads."""
    sides = [tuple(basis(heads, dim, seed + 2 * layer + side) for layer in range(layers)) for side in (0, 1)]
    return Calibration(*sides, digest=f"made up {seed}")


def vectors_of(of, layer, side, tokens, seed=0):
    """Vectors [H, tokens, D] as a basis expects them."""
    learned = getattr(of, side)[layer]
    heads, dim = learned.mean.shape
    y = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return (y @ learned.back) / dim**0.5 + learned.mean.unsqueeze(1)
