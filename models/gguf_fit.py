"""Numbers to the blocks of a GGUF file: the scales and levels that lose least, each number counted by its importance.

    symmetric   x ~ s q            Q4_0, Q5_0, Q6_K
    affine      x ~ s q + m        Q4_1, Q5_1; with s >= 0 and m <= 0 Q4_K

Plain rounding takes a block's scale from its largest number or its range. Here scales around that one are tried: numbers are
rounded to levels, the scale (and the minimum) that suit those levels best follow by least squares, and numbers are rounded
again. The best of all by sum w (x - x')^2 is kept; plain rounding is among those that are tried. What the w are is the
caller's: the mean square of what a column is multiplied with makes the sum the error of the product.
Source of the idea: llama.cpp's quantisers (ggml-quants.c); nothing of them is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TRIES = (0.85, 0.91, 0.96, 1.0, 1.05)
"""Scales that are tried, of plain rounding's."""
_TINY = 1e-30


def symmetric(x: Tensor, w: Tensor, low: int, high: int) -> Tensor:
    """Scales of blocks by which rounding loses least.

    Args:
        x, w: [N, n] fp32, numbers of each block and what their errors count.
        low, high: the least and the largest level; `low` has the larger magnitude, and the largest number may get it.
    Returns:
        [N] fp32; negative where the largest number is positive and takes level `low`.
    """
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    plain = largest / low
    best, least = plain, _loss(x, w, plain, torch.zeros_like(plain), low, high)
    # The largest number may also take the other end, where scales are of the other sign.
    for start in (plain, -largest / high if high == -low - 1 else plain):
        for part in _TRIES:
            scale = start * part
            levels = _levels(x, scale, torch.zeros_like(scale), low, high)
            scale = (w * x * levels).sum(1) / (w * levels * levels).sum(1).clamp_min(_TINY)
            best, least = _better(x, w, best, least, scale, low, high)
        if start is plain and high != -low - 1:
            break
    return best


def affine(x: Tensor, w: Tensor, high: int, *, below: bool) -> tuple[Tensor, Tensor]:
    """Scales and minima of blocks by which rounding to levels 0 … `high` loses least.

    Args:
        x, w: as of `symmetric`.
        below: the minimum is at most 0, as Q4_K stores it.
    Returns:
        [N] fp32 each: scales, at least 0; minima.
    """
    minimum, maximum = x.amin(1), x.amax(1)
    minimum = minimum.clamp_max(0.0) if below else minimum
    plain = ((maximum - minimum) / high).clamp_min(0.0)
    best, at, least = plain, minimum, _loss(x, w, plain, minimum, 0, high)
    for part in _TRIES:
        scale, offset = plain * part, minimum
        for _ in range(2):
            scale, offset = _line(x, w, _levels(x, scale, offset, 0, high), below)
        found = _loss(x, w, scale, offset, 0, high)
        take = found < least
        best, at, least = torch.where(take, scale, best), torch.where(take, offset, at), torch.where(take, found, least)
    return best, at


def _line(x: Tensor, w: Tensor, levels: Tensor, below: bool) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of least squares for given levels."""
    total, of_q, of_x = w.sum(1), (w * levels).sum(1), (w * x).sum(1)
    of_qq, of_qx = (w * levels * levels).sum(1), (w * levels * x).sum(1)
    free = (total * of_qx - of_q * of_x) / (total * of_qq - of_q * of_q).clamp_min(_TINY)
    offset = (of_x - free * of_q) / total.clamp_min(_TINY)
    if not below:
        return free.clamp_min(0.0), offset
    # A minimum above 0 cannot be stored: then the line goes through 0.
    through = of_qx / of_qq.clamp_min(_TINY)
    return torch.where(offset > 0, through, free).clamp_min(0.0), offset.clamp_max(0.0)


def _levels(x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))
    return ((x - offset[:, None]) * inverse[:, None]).round_().clamp_(low, high)


def _loss(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    """[N], sum w (x - x')^2."""
    restored = _levels(x, scale, offset, low, high).mul_(scale[:, None]).add_(offset[:, None])
    return restored.sub_(x).square_().mul_(w).sum(1)


def _better(
    x: Tensor, w: Tensor, best: Tensor, least: Tensor, scale: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found = _loss(x, w, scale, torch.zeros_like(scale), low, high)
    take = found < least
    return torch.where(take, scale, best), torch.where(take, found, least)


def rounded(x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """(levels, what they restore to) of numbers [N, n] by scales [N, n or 1] as they are stored."""
    inverse = torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))
    levels = ((x - offset) * inverse).round_().clamp_(low, high)
    return levels, levels * scale + offset
