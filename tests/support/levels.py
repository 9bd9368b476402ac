"""Levels of two computations side by side: which differ, and which of those rounding does not explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import vector_lengths

DRAWS = 32


@dataclass(frozen=True)
class LevelComparison:
    """How many levels differ, and how many of them no rounding moved."""

    total: int
    different: int
    unexplained: int

    @property
    def match(self) -> float:
        """Share of equal levels."""
        return 1 - self.different / self.total


def compare_levels(
    ours: Tensor, theirs: Tensor, rotated: Tensor, boundaries: Tensor, atol: float, rtol: float = 0.0
) -> LevelComparison:
    """Levels [..., D] that may differ by one where the rotated coordinate lies beside the boundary between them."""
    different = ours.int() != theirs.int()
    lower = torch.minimum(ours.int(), theirs.int()).clamp(max=len(boundaries) - 1).long()
    near = (rotated - boundaries[lower]).abs() <= atol + rtol * rotated.abs()
    unexplained = different & ~(near & ((ours.int() - theirs.int()).abs() == 1))
    return LevelComparison(different.numel(), int(different.sum()), int(unexplained.sum()))


def compare_stored(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor], x: Tensor, noise: float
) -> tuple[LevelComparison, float]:
    """K or V as two computations stored them, fields of vectors [Hkv, n, D].

    A level is explained if it lies between those that the format gives for some of 32 vectors that are off by noise.

    Args:
        x: what `ours` was quantized from.
        noise: of each number, relative to its vector's length.
    Returns:
        the comparison, and the largest relative difference of a vector's length where all its levels are equal.
    """
    levels, other = kv_format.levels(ours), kv_format.levels(theirs)
    if levels is None or other is None:
        (levels,), (other,) = ours.values(), theirs.values()
    different = levels != other
    low, high = levels.clone(), levels.clone()
    generator, x = torch.Generator().manual_seed(0), x.float()
    for _ in range(DRAWS if different.any() else 0):
        noise_vectors = torch.randn(x.shape, generator=generator)
        fields = kv_format.quantize(x + (2 * noise * vector_lengths(x).unsqueeze(-1) * noise_vectors).float(), layer)
        moved_levels = kv_format.levels(fields)
        moved_levels = next(iter(fields.values())) if moved_levels is None else moved_levels
        low, high = torch.minimum(low, moved_levels), torch.maximum(high, moved_levels)
    unexplained = int((different & ((other < low) | (other > high))).sum())
    lengths = [vector_lengths(kv_format.dequantize(fields, layer)) for fields in (ours, theirs)]
    off = (lengths[1] - lengths[0]).abs() / lengths[0].clamp(min=1e-300)
    equal = ~different.any(-1)
    comparison = LevelComparison(different.numel(), int(different.sum()), unexplained)
    return comparison, float(off[equal].max()) if equal.any() else 0.0
