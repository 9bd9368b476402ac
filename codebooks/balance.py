"""Balance: a power of two for each channel of K and V, from the weights alone, so that a rotation loses less.

A rotation spreads a vector's error evenly over its channels. If some channels are large but hardly matter, all others pay.
So each channel is scaled by s before it is stored, and what it is multiplied with is divided by s. The expected squared error

    (sum of use / s**2) * (sum of size * s**2) / D * error       is least at s = (use / size) ** (1/4)

with `size` a channel's mean square and `use` that of what it is multiplied with. Powers of two round nothing: scaling and
back computes the same bits, unless the cache loses something. Rounding s to them costs at most 1.56 times the error of the
best s (Kantorovich's inequality), 1.17 times on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FURTHEST = 12
"""Powers of two by which channels may lie apart, up or down."""


def channel_scales(use: Tensor, size: Tensor) -> Tensor:
    """Scales of the channels, [..., D] fp32, powers of two; 1 for a channel that is always 0.

        s = 2 ** round(log2((use / size) ** (1/4) / its median))

    Args:
        use: [..., D] mean square of what meets the channel: queries for K, columns of the output projection for V.
        size: [..., D] mean square of the channel itself.
    """
    nonzero = size > 0
    quarter = torch.log2(use.double() / size.double()) / 4
    middle = torch.nanmedian(quarter.where(nonzero & (use > 0), torch.nan), dim=-1, keepdim=True).values.nan_to_num()
    exponent = (quarter - middle).clamp(-_FURTHEST, _FURTHEST).round()
    return torch.exp2(exponent.where(nonzero, torch.zeros(()))).float()


def error_ratio(use: Tensor, size: Tensor, scales: Tensor) -> Tensor:
    """Factor by which the scales reduce a rotation's squared error: [...] fp64; arguments as of `channel_scales`."""
    use, size, squares = use.double(), size.double(), scales.double().square()
    before, after = use.sum(-1) * size.sum(-1), (use / squares).sum(-1) * (size * squares).sum(-1)
    return torch.where(after > 0, before / after, torch.ones(()))
