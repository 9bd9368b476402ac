"""Keys by stretches: a stretch is 1,024 positions, and each key is stored as if its stretch were the first of the text.

RoPE rotates pairs of a key's numbers by angles that grow with the position. This blurs what keys have in common, and learned
coordinates need that. So a key is rotated back by the angles of its stretch's first position. A query is rotated back by the
same angles before it is multiplied with the keys of a stretch, so the product stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

STRETCH = 1024
"""Positions in one stretch."""
MOST_POSITIONS = 2**22
"""The longest sequence: compiled kernels hold the angles of this many positions."""


@dataclass(frozen=True)
class RopeShift:
    """The rotation of one layer's keys by stretches.

    Attributes:
        inv_freq: [R/2], RoPE's frequencies: numbers i and i + R/2 of a key are rotated by position * inv_freq[i].
    """

    inv_freq: tuple[float, ...]

    def table(self, stretches: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [n, R/2] fp32 of the angles at which stretches begin, n >= `stretches`; cached. Do not write to it."""
        return _table(self, 1 << max(0, stretches - 1).bit_length(), device)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate vectors back by their stretch: keys before storing, queries before a product with keys of this stretch.

        Args:
            x: [..., T, D] of a floating dtype.
            positions: [T] int64, any positions in the stretches.
        Returns:
            [..., T, D] fp32; the first R numbers are rotated.
        """
        return self._shift(x, positions, -1.0)

    def redo(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse of `undo`."""
        return self._shift(x, positions, 1.0)

    def _shift(self, x: Tensor, positions: Tensor, way: float) -> Tensor:
        stretch = (positions // STRETCH).to(x.device)
        cos, sin = (part[stretch] for part in self.table(int(stretch.max()) + 1 if len(stretch) else 1, x.device))
        half = len(self.inv_freq)
        low, high, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([low * cos - high * sin * way, high * cos + low * sin * way, rest], dim=-1)


@lru_cache(maxsize=64)
def _table(turns: RopeShift, stretches: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = STRETCH * torch.arange(stretches, dtype=torch.float64)
    angles = starts.unsqueeze(1) * torch.tensor(turns.inv_freq, dtype=torch.float64)
    return angles.cos().float().to(device), angles.sin().float().to(device)
