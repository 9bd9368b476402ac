"""What came of one case of one op: its figures beside those of honest runs, and what else is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks
from haarkv.validation.layers.null import RUNS, Figure, Null, Shared, Sums, by_figure, collected, drawn, honest


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes:
        share: how many times what honest runs of the reference allow its worst figure is.
        figure: which one that is.
        fault: what else is wrong: a dtype, a shape, an input or a slot that was changed.
    """

    share: float
    figure: str = ""
    fault: str | None = None

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.share <= 1 and self.fault is None


def honest_runs(figures_of: Callable[[OpTable], Iterable[tuple[Figure, Tensor]]]) -> list[Sums]:
    """The figures of honest runs of the reference.

    Args:
        figures_of: of what a table makes of a case. Products with weights in blocks round their activations.
    """
    shared, ops = Shared(), cast(OpTable, reference)
    tables = (honest(ops, seed, shared, lambda weight: isinstance(weight, Blocks)) for seed in range(RUNS))
    return drawn([by_figure(figures_of(table)) for table in tables])


def beside(
    runs: list[Sums], figures: Iterable[tuple[Figure, Tensor]], dtype: torch.dtype, fault: str | None = None
) -> Finding:
    """A candidate's figures beside those of honest runs.

    Args:
        dtype: of what the op is given; in BF16 a device may round centroids to FP16.
    """
    excesses = Null(runs).excesses(collected(figures), dtype != torch.float32)
    worst = max(excesses, key=excesses.__getitem__)
    return Finding(excesses[worst], " ".join(str(part) for part in worst if part != -1), fault)


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
