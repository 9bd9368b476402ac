"""Rotary position embedding: frequencies, their scaling for longer contexts, tables of cos and sin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Rope
from haarkv.tq_ops.memory import require_memory


@dataclass(frozen=True)
class LinearScaling:
    """`inv_freq / factor`."""

    factor: float
    rope_type: str = "linear"
    attention_factor: float = 1.0

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Waves longer than original_positions / low_freq_factor divide by `factor`, those shorter than original_positions /
    high_freq_factor stay, those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    rope_type: str = "llama3"
    attention_factor: float = 1.0

    @property
    def declared_fields(self) -> dict[str, Any]:
        """The two wavelengths, which is all that a GGUF file tells of the numbers."""
        waves = {
            "low": self.original_positions / self.low_freq_factor,
            "high": self.original_positions / self.high_freq_factor,
        }
        return {"rope_type": self.rope_type, "factor": self.factor} | {name: float(f"{at:.5g}") for name, at in waves.items()}

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        low, high = self.low_freq_factor, self.high_freq_factor
        wave = 2 * math.pi / inv_freq
        is_long, is_short = wave > self.original_positions / low, wave < self.original_positions / high
        blend = (self.original_positions / wave - low) / (high - low)
        between = (1 - blend) * inv_freq / self.factor + blend * inv_freq
        return torch.where(is_long, inv_freq / self.factor, torch.where(is_short, inv_freq, between))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions from `inv_freq` to `inv_freq / factor`, and a factor of cos and sin.

    Attributes:
        beta_fast, beta_slow: rotations within original_positions at which the ramp begins and ends.
        truncate: the ramp begins and ends at whole dimensions.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rope_type: str = "yarn"

    def scaled(self, inv_freq: Tensor, theta: float) -> Tensor:
        half = inv_freq.shape[0]
        # The dimensions that make these numbers of rotations within `original_positions`.
        begin, end = (
            half * math.log(self.original_positions / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, 2 * half - 1)
        ramp = ((torch.arange(half, dtype=torch.float32) - begin) / (end - begin or 0.001)).clamp(0, 1)
        return inv_freq / self.factor * ramp + inv_freq * (1 - ramp)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """YaRN's multiplier of cos and sin: `0.1 ln(factor) + 1`, or with both mscales the quotient of two such."""

    def mscale_factor(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return mscale_factor(mscale) / mscale_factor(mscale_all_dim) if mscale and mscale_all_dim else mscale_factor(1.0)


def inverse_frequencies(rope: Rope) -> Tensor:
    """Angle per position, scaling included: [dims / 2] fp32."""
    exponent = torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims
    inv_freq: Tensor = 1.0 / (rope.theta**exponent)
    return rope.scaling.scaled(inv_freq, rope.theta) if rope.scaling else inv_freq


_SPAN = 1024
"""Positions whose cos and sin are computed together, so that bits do not depend on the batch."""


class RopeTable:
    """cos and sin FP32 of positions 0 … positions - 1, with scaling and attention factor, computed on the host.

        inv_freq_i = theta ** (-2i/dims);   angle = position * inv_freq

    On the host it reaches as far as the largest position that was asked for; on a device it is whole.
    """

    def __init__(self, rope: Rope, positions: int, device: torch.device | str = "cpu") -> None:
        self.positions, self.device = positions, torch.device(device)
        self._inv_freq = inverse_frequencies(rope)
        self._factor = rope.scaling.attention_factor if rope.scaling else 1.0
        self._rows = self._compute(0, 0) if self.device.type == "cpu" else self.whole()

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, dims/2] fp32 of positions [T]; on the host, an IndexError beyond the last."""
        rows = self._rows  # threads may share a table
        if self.device.type == "cpu" and len(positions):
            first, last = (int(end) for end in positions.aminmax())
            if not 0 <= first <= last < self.positions:
                raise IndexError(f"positions must lie in 0 … {self.positions - 1}")
            if last >= len(rows[0]):
                more = self._compute(len(rows[0]), last + 1)
                with torch.inference_mode(False):
                    self._rows = rows = torch.cat([rows[0], more[0]]), torch.cat([rows[1], more[1]])
        cos, sin = rows
        return cos[positions], sin[positions]

    def whole(self) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, dims/2] fp32 on the device."""
        cos, sin = (table[: self.positions] for table in self._compute(0, self.positions))
        return cos.to(self.device), sin.to(self.device)

    @torch.inference_mode(False)
    def _compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions from `begin` on, in whole spans up to `end`; an InputError without memory for them."""
        spans, half = range(begin, end, _SPAN), len(self._inv_freq)
        require_memory(
            2 * 4 * len(spans) * _SPAN * half, f"cos and sin of {end:,} positions",
            "lower max_position_embeddings in config.json",
        )  # fmt: skip
        cos, sin = torch.empty(2, len(spans), _SPAN, half)
        for number, start in enumerate(spans):
            angle = torch.arange(start, start + _SPAN, dtype=torch.float32).unsqueeze(1) * self._inv_freq
            cos[number], sin[number] = angle.cos() * self._factor, angle.sin() * self._factor
        return cos.flatten(0, 1), sin.flatten(0, 1)
