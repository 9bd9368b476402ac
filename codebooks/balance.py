"""Balance: a power of two for each channel of K and of V, from the weights alone, so that a rotation loses less.

A rotation spreads a vector's error evenly over its channels. If some channels are large where nobody looks, all others pay for
them. So each channel is scaled by s before it is stored, and whatever meets it is divided by s. The expected squared error is

    (sum of use / s**2) * (sum of size * s**2) / D * error,       least at s = (use / size) ** (1/4)

with `size` a channel's mean square as it is stored and `use` that of what meets it. With s a power of two nothing is rounded:
a model that is scaled so, and back, computes the same bits, unless its cache loses something. s**2 is then off by a
factor of 2 at most, either way. That costs at most ((1/2 + 2) / 2)**2 = 1.56 times the error of the best s (Kantorovich's
inequality), and (sinh(ln 2) / ln 2)**2 = 1.17 times on average over many channels whose exponents lie anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FURTHEST = 12
"""Powers of two by which channels may lie apart, up or down."""


def channel_scales(use: Tensor, size: Tensor) -> Tensor:
    """What each channel is multiplied with before it is stored.

        s = 2 ** round(log2((use / size) ** (1/4) / its median))

    Args:
        use: [..., D] mean square of what meets the channel: of queries for K, of the output projection's columns for V.
        size: [..., D] mean square of the channel itself.
    Returns:
        [..., D] fp32, powers of two; 1 for a channel that is always 0. Nobody looks at a channel of use 0, or hardly: it
        becomes as small as channels may become.
    """
    nonzero = size > 0
    quarter = torch.log2(use.double() / size.double()) / 4
    middle = torch.nanmedian(quarter.where(nonzero & (use > 0), torch.nan), dim=-1, keepdim=True).values.nan_to_num()
    exponent = (quarter - middle).clamp(-_FURTHEST, _FURTHEST).round()
    return torch.exp2(exponent.where(nonzero, torch.zeros(()))).float()


def error_ratio(use: Tensor, size: Tensor, scales: Tensor) -> Tensor:
    """How many times less squared error the scales let a rotation make: [...] fp64, of vectors [..., D]; 1 changes nothing.

    Args:
        use, size: as in `channel_scales`.
        scales: [..., D], that function's or others.
    """
    use, size, squares = use.double(), size.double(), scales.double().square()
    before, after = use.sum(-1) * size.sum(-1), (use / squares).sum(-1) * (size * squares).sum(-1)
    return torch.where(after > 0, before / after, torch.ones(()))
