"""Rotary position embedding: cos and sin of every position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from haarkv.models.base import DecoderConfig


class RopeTable:
    """cos and sin of every position, FP32: computed once on the host and handed to every executor.

        inv_freq_i = theta ** (-2i/D);   angle = position * inv_freq

    Args:
        config: theta, head_dim and the number of positions.
        device: where the tables live.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / (config.rope_theta**exponent)
        angle = torch.arange(config.max_position_embeddings, dtype=torch.float32).unsqueeze(1) * inv_freq
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D/2] fp32 of positions [T]."""
        return self.cos[positions], self.sin[positions]
