"""Comparing levels: which differences are ties that rounding explains, and which are not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LevelComparison:
    """How two executors' levels differ.

    Attributes:
        total: coordinates compared.
        different: coordinates with another level.
        unexplained: those that differ by more than one, or whose rotated value is not near the boundary between.
    """

    total: int
    different: int
    unexplained: int

    @property
    def match(self) -> float:
        """Share of equal levels."""
        return 1 - self.different / self.total if self.total else 1.0


def compare_levels(
    ours: Tensor, theirs: Tensor, rotated: Tensor, boundaries: Tensor, atol: float, rtol: float = 0.0
) -> LevelComparison:
    """Count the levels that differ, and those whose difference a rounding does not explain.

    A level may differ by one, and only where the rotated value lies within `atol + rtol * |boundary|` of the boundary
    between the two levels.

    Args:
        ours, theirs: [..., D] integer levels.
        rotated: [..., D] fp32, the value that `ours` was chosen from.
        boundaries: [levels - 1] fp32, ascending.
        atol, rtol: how far rounding may move a rotated value, from `validation.bounds`.
    """
    gap = ours.int() - theirs.int()
    different = gap != 0
    # Between levels n and n + 1 lies boundary n. Where the levels are equal or far apart the index means nothing.
    between = boundaries[ours.int().minimum(theirs.int()).clamp(max=len(boundaries) - 1)]
    near = (rotated - between).abs() <= atol + rtol * between.abs()
    unexplained = different & ~((gap.abs() == 1) & near)
    return LevelComparison(different.numel(), int(different.sum()), int(unexplained.sum()))
