"""Keys in stretches: each is stored as RoPE would have rotated it had its stretch of the text come first.

RoPE rotates pairs of a key's numbers by angles that grow with its position; learned coordinates lose what keys have in common
as these angles spread. So a text is cut into stretches of 1,024 positions. A key is rotated back by the position where its
stretch begins, and a query by as much before it meets the keys of that stretch: their product stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

STRETCH = 1024
"""Positions of a stretch."""
MOST_POSITIONS = 2**22
"""Of a sequence: compiled kernels hold the angles of this many positions."""


@dataclass(frozen=True)
class RopeShift:
    """The rotation of one layer's keys by stretches.

    Attributes:
        inv_freq: R/2 angles of a position: numbers i and i + R/2 of a key are rotated by position * inv_freq[i].
    """

    inv_freq: tuple[float, ...]

    def table(self, stretches: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [n, R/2] fp32 of the angles at which stretches begin, n >= `stretches`; cached. Do not write to it."""
        return _table(self, 1 << max(0, stretches - 1).bit_length(), device)

    def undo(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys [..., T, D] at positions [T] int64 as their stretches store them, or queries as they meet keys of those
        stretches: [..., T, D] fp32. The first R numbers are rotated.
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
