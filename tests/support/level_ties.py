"""Levels and numbers that two computations stored of the same K or V: which of them differ, and which no rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token


@dataclass(frozen=True)
class LevelComparison:
    """How levels differ.

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
    ours: Tensor, theirs: Tensor, rotated: Tensor, boundaries: Tensor, atol: float | Tensor, rtol: float = 0.0
) -> LevelComparison:
    """A level may differ by one, and only where the rotated value lies within `atol + rtol * |boundary|` of the boundary.

    Args:
        ours, theirs: [..., D] integer levels.
        rotated: [..., D] fp32, the value that `ours` was chosen from.
        boundaries: [levels - 1] fp32, ascending.
    """
    gap = ours.int() - theirs.int()
    different = gap != 0
    # Between levels n and n + 1 lies boundary n. Where the levels are equal or far apart the index means nothing.
    between = boundaries[ours.int().minimum(theirs.int()).clamp(max=len(boundaries) - 1)]
    near = (rotated - between).abs() <= atol + rtol * between.abs()
    unexplained = different & ~((gap.abs() == 1) & near)
    return LevelComparison(different.numel(), int(different.sum()), int(unexplained.sum()))


def compare_numbers(ours: Tensor, theirs: Tensor, x: Tensor, noise: float | Tensor) -> LevelComparison:
    """A stored number may differ where it is x [..., D], off by at most `noise` of its vector's length, rounded."""
    different = ours != theirs
    half_step = torch.finfo(ours.dtype).eps / 2 * torch.maximum(x.abs(), theirs.float().abs())
    near = (theirs.float() - x).abs() <= half_step + noise * x.norm(dim=-1, keepdim=True)
    return LevelComparison(different.numel(), int(different.sum()), int((different & ~near).sum()))


def compare_stored(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], x: Tensor, noise: float | Tensor
) -> tuple[LevelComparison, float]:
    """Fields of vectors x [..., D] fp32: levels where the format has levels, else numbers.

    Returns:
        the comparison, and the largest relative difference of a vector's length beyond `KVFormat.length_reach`.
    """
    levels, other = kv_format.levels(ours), kv_format.levels(theirs)
    choice = kv_format.choice(x, layer, noise, other)
    if levels is None or other is None or choice is None:
        parts = [compare_numbers(ours[name], theirs[name], x, noise) for name in ours]
        sums = (sum(getattr(part, name) for part in parts) for name in ("total", "different", "unexplained"))
        compared = LevelComparison(*sums)
    else:
        # A level that refines another follows from the one that they chose there, which may be a tie.
        expected = torch.bucketize(choice.value.contiguous(), choice.boundaries, right=True)
        found = compare_levels(expected, other, choice.value, choice.boundaries, choice.reach)
        compared = LevelComparison(levels.numel(), int((levels != other).sum()), found.unexplained)
    lengths = [kv_format.lengths(fields, layer) for fields in (ours, theirs)]
    off = torch.where(lengths[0] == lengths[1], 0.0, (lengths[1] - lengths[0]).abs() / lengths[0])
    return compared, float((off - kv_format.length_reach(x, layer, noise)).clamp(min=0.0).max())


def compare_tokens(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], x: Tensor, noise: float | Tensor
) -> tuple[LevelComparison, float]:
    """`compare_stored` of vectors [T, Hkv, D] and their fields, tokens first, as a forward has them."""
    return compare_stored(kv_format, layer, by_token(ours), by_token(theirs), x.transpose(0, 1), noise)
