"""FP32 arithmetic whose every rounding is fixed, so that the bytes of a format do not depend on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.formats.packing import split_groups


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded. CUDA would multiply by a Python number's reciprocal, but not by a tensor's."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x; 0 where that exceeds FP32 (x is 0 or a denormal)."""
    inverse = 1 / x
    return torch.where(torch.isinf(inverse), torch.zeros_like(inverse), inverse)


def square_root(x: Tensor) -> Tensor:
    """The FP32 square root, correctly rounded, by way of float64. On a CPU `torch.sqrt` is one unit off in 0.6 % of cases."""
    return x.double().sqrt().float()


def round_half_away(x: Tensor) -> Tensor:
    """To the nearest integer, ties away from zero, as C's `roundf`. `floor(x + 0.5)` would round 0.49999997 up."""
    whole = x.trunc()
    return whole + ((x - whole).abs() >= 0.5) * x.sign()


def sum_in_order(x: Tensor) -> Tensor:
    """Sum over the last axis from first to last, rounded after each addition, as a plain C loop: [..., n] -> [...]."""
    columns = x.movedim(-1, 0).contiguous()
    total = columns[0].clone()
    for column in columns[1:]:
        total += column
    return total


def sum_pairwise(x: Tensor) -> Tensor:
    """Sum over the last axis in numpy's order: [..., n] -> [...].

    Up to 128 numbers go to eight running sums in turn, added as a tree; the rest of 8 follows one by one. More numbers are
    halved at a multiple of 8.
    """
    count = x.shape[-1]
    if count < 8:
        return sum_in_order(x)
    if count > 128:
        half = count // 2 - count // 2 % 8
        return sum_pairwise(x[..., :half]) + sum_pairwise(x[..., half:])
    whole = count - count % 8
    sums = sum_in_order(split_groups(x[..., :whole], 8).transpose(-1, -2))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    total = sums.squeeze(-1)
    for column in range(whole, count):
        total = total + x[..., column]
    return total


def fwht(x: Tensor) -> Tensor:
    """Fast Walsh-Hadamard transform of the last axis [..., n] fp32, n a power of two, not normalised.

    (a, b) -> (a + b, a - b). Its own inverse up to the factor n. Rounding points: each of the log2(n) stages.
    """
    count, stride = x.shape[-1], 1
    while stride < count:
        a, b = x.reshape(*x.shape[:-1], count // stride // 2, 2, stride).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return x
