"""Synthetic learned coordinates, different for every KV head, with outlier channels: for tests and timing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from haarkv.codebooks.learned import EIGHTHS, Basis
from haarkv.tq_ops.formats.learned import Calibration

_LARGE, _CHANNELS, _THETA = 30.0, 2, 1e4


def basis(heads: int, dim: int, seed: int) -> Basis:
    """Coordinates whose weights fall to a hundredth from the first eighth to the last, for vectors with two large channels.

    Args:
        heads, dim: H, D.
    """
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(gaussian).Q
    eighths = torch.logspace(0, -2, EIGHTHS, dtype=torch.float64).repeat_interleave(dim // EIGHTHS)
    weights = (eighths / eighths.mean()).repeat(heads, 1)
    channels = torch.ones(dim, dtype=torch.float64)
    channels[:_CHANNELS] = _LARGE
    # x = (y * sqrt(weights)) @ rotation.T * channels, so that y are about equal and errors count by weight.
    back = (weights.sqrt().unsqueeze(-1) * rotation.mT * channels).to(torch.bfloat16)
    forward = torch.linalg.inv(back.double()).to(torch.bfloat16)
    mean = channels * torch.randn(heads, dim, generator=generator, dtype=torch.float64) / 4
    inv_freq = _THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return Basis(mean.float(), forward.float(), back.float(), weights.float(), inv_freq)


@cache
def calibration(layers: int = 2, heads: int = 2, dim: int = 128, seed: int = 0, *, turning: bool = True) -> Calibration:
    """Of a model with these numbers of layers and KV heads, cached. Do not write to it.

    Args:
        turning: whether RoPE's angles are known, so that keys are stored by stretches.
    """
    bases = (basis(heads, dim, seed + 2 * layer) for layer in range(layers))
    if not turning:
        bases = (replace(each, inv_freq=each.inv_freq[:0]) for each in bases)
    return Calibration(tuple(bases), digest=f"made up {seed}")
