"""KIVI: asymmetric levels of groups of G; keys per channel over tokens, values per token over channels; nothing is rotated.

Source: KIVI (arXiv 2402.02750), in the arithmetic of the public SYCL kernels. The original differs: no 1e-10, ties to even,
int32 words, and other rules of when the recent tokens are quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, round_half_away
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import groups_of, pack_stream, unpack_stream

EPS = 1e-10


def groups_to_flush(recent: int, window: int, group: int) -> int:
    """How many groups of the oldest full-precision tokens to quantize, so that at most `window - 1` and, once any was, at
    least `window - group` stay.

        while recent >= window: quantize the oldest `group`, recent -= group

    Args:
        recent: tokens in full precision now, the new ones included.
        window: R, at least `group`.
        group: G tokens.
    Raises:
        ValueError: a window shorter than a group, which would have to quantize tokens that are not there.
    """
    if not 0 < group <= window:
        raise ValueError(f"a group has 1 to {window} tokens, the window, not {group}")
    return max(0, (recent - window) // group + 1)


class Kivi(KVFormat):
    """One side: levels of G numbers that share a range.

        scale = (max - min) / (2**bits - 1) + 1e-10;  level = clamp(round((x - min) / scale), 0, 2**bits - 1)
        restored: level * scale + min

    Keys go G tokens at a time, each channel with a range of its own: x is [..., G, D], and the fields of one group are `codes`
    [D, G * bits / 8] uint8, `scale` and `zero` [D] fp32. Values go each token alone, in groups of G neighbouring channels: x
    is [..., D], and the fields are `codes` [D * bits / 8] uint8, `scale` and `zero` [D / G] fp32.

    Ties round away from zero, so to the upper level. A constant group comes back exactly. A group whose range overflows is
    refused. Levels are packed least significant bit first; scale and zero (the minimum) are FP32, as their origin keeps them:
    64 bits a group.
    Rounding points: each FP32 operation of the formula.
    """

    to_compare = True

    def __init__(self, bits: int, group: int, *, keys: bool) -> None:
        self.name = f"kivi{bits}" if group == 32 else f"kivi{bits}_g{group}"  # groups of 32 need not be named
        self.purpose = f"KIVI, groups of {group}"
        self.bits, self.group, self.keys = bits, group, keys
        self.group_tokens = group if keys else 1

    def fields(self, head_dim: int) -> dict[str, Field]:
        if not self.keys and (head_dim < 1 or head_dim % self.group):
            raise InputError(f"{self.name} groups {self.group} channels of V and cannot hold head_dim {head_dim}")
        numbers = Field(torch.float32, (head_dim if self.keys else head_dim // self.group,))
        codes = (head_dim, self.group * self.bits // 8) if self.keys else (head_dim * self.bits // 8,)
        return {"codes": Field(torch.uint8, codes), "scale": numbers, "zero": numbers}

    def _grouped(self, x: Tensor) -> Tensor:
        """Numbers that share a range, side by side: [..., D, G] of keys, [..., D / G, G] of values."""
        if self.keys:
            return x.transpose(-1, -2)
        self.fields(x.shape[-1])
        return groups_of(x, self.group)

    def _as_vectors(self, grouped: Tensor) -> Tensor:
        """The inverse of `_grouped`."""
        return grouped.transpose(-1, -2) if self.keys else grouped.flatten(-2)

    def _measure(self, grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value [..., G] that is rounded; scale and zero [...]."""
        zero = grouped.amin(-1)
        scale = divide(grouped.amax(-1) - zero, 2**self.bits - 1) + EPS
        return (grouped - zero.unsqueeze(-1)) / scale.unsqueeze(-1), scale, zero

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Store groups of keys [..., G, D], or values [..., D].

        Raises:
            NonFiniteError: with the index of a vector, or [...] of a group of keys whose range overflows.
            InputError: keys that are not G tokens, or values that groups do not fill.
        """
        if self.keys and (x.ndim < 2 or x.shape[-2] != self.group):
            raise InputError(f"{self.name} takes keys in groups of {self.group} tokens, not {list(x.shape)}")
        x = x.float()
        require_finite(x)
        value, scale, zero = self._measure(self._grouped(x))
        require_finite(scale)
        codes = pack_stream(round_half_away(value).clamp(0, 2**self.bits - 1).to(torch.uint8), self.bits)
        return {"codes": codes if self.keys else codes.flatten(-2), "scale": scale, "zero": zero}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = self._grouped(self.levels(fields)).float()
        return self._as_vectors(level * fields["scale"].unsqueeze(-1) + fields["zero"].unsqueeze(-1))

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Packed levels, then scales, then zeros as FP32 little-endian, of one vector or one group of keys."""
        codes = bytes_of(fields["codes"], 1 + self.keys)
        return torch.cat([codes, bytes_of(fields["scale"], 1), bytes_of(fields["zero"], 1)], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """[..., G, D] or [..., D] uint8."""
        level = unpack_stream(fields["codes"], self.bits)
        return level.transpose(-1, -2) if self.keys else level


def kivi_pair(bits: int, group: int) -> tuple[Kivi, Kivi]:
    """K's and V's format of so many bits."""
    return Kivi(bits, group, keys=True), Kivi(bits, group, keys=False)
