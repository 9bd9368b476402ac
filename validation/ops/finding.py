"""What came of one case of one op, and how results are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes:
        error: the largest distance of a result from what it should be, relative to its length.
        bound: what it may be.
        fault: what else is wrong: a dtype, a shape, an input or a slot that was changed.
    """

    error: float
    bound: float
    fault: str | None = None

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.error <= self.bound and self.fault is None


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of a vector, relative to its length."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def worse(a: float, b: float) -> float:
    """The larger of two errors; NaN, which `max` may drop, is larger than any."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def misshapen(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with a result's dtype or shape, in words; None if nothing is."""
    if ours.dtype == dtype and ours.shape == expected.shape:
        return None
    return f"it returns {ours.dtype} {tuple(ours.shape)}, not {dtype} {tuple(expected.shape)}"


def changed(now: tuple[Any, ...], before: tuple[Any, ...]) -> str | None:
    """What is wrong if an op changed what it was given, in words."""
    pairs = [(a, b) for a, b in zip(now, before, strict=True) if isinstance(a, Tensor)]
    return None if all(same(a, b) for a, b in pairs) else "it changed its input"


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
