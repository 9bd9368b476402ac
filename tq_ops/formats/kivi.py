"""KIVI: asymmetric levels of groups of G; keys per channel over tokens, values per token over channels; nothing is rotated.

Source: KIVI (arXiv 2402.02750), in the arithmetic of the public SYCL kernels. The original differs: no 1e-10, ties to even,
int32 words, and other rules of when the recent tokens are quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, round_half_away
from haarkv.tq_ops.formats.base import Field, LevelChoice, bytes_of, lengths_of, require_finite, stored_bytes
from haarkv.tq_ops.formats.exact import Exact
from haarkv.tq_ops.formats.numbers import Kind, Numbers
from haarkv.tq_ops.formats.packing import groups_of, pack_stream, unpack_stream
from haarkv.tq_ops.formats.rotated import Description

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


class _Kivi:
    """What both sides share: levels of the last axis, taken in groups.

        scale = (max - min) / (2**bits - 1) + 1e-10;  level = clamp(round((x - min) / scale), 0, 2**bits - 1)
        restored: level * scale + min

    Ties round away from zero, so to the upper level. A constant group comes back exactly. A group whose range overflows is
    refused. Levels are packed least significant bit first; scale and zero (the minimum) are FP32, as their origin keeps them:
    64 bits a group.
    Rounding points: each FP32 operation of the formula.
    """

    lossy = True
    _code_axes: int  # of one vector's or one group's codes

    def __init__(self, bits: int, group: int, name: str, purpose: str) -> None:
        self.name, self.purpose = name, purpose
        self.bits, self.group = bits, group

    def description(self, head_dim: int) -> Description | None:
        return None  # not one of rotated levels

    def _numbers(self, kind: Kind, group: int) -> Numbers:
        """A range overflows from half of the largest number on."""
        table = tuple(map(float, range(2**self.bits)))
        exact = Exact(torch.finfo(torch.float32).max / 2)
        return Numbers(kind, scale="scale", zero="zero", bits=self.bits, group=group, table=table, exact=exact)

    def _ranges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero [...] of groups [..., G]."""
        zero = x.amin(-1)
        return divide(x.amax(-1) - zero, 2**self.bits - 1) + EPS, zero

    def _level(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        value = (x - zero.unsqueeze(-1)) / scale.unsqueeze(-1)
        return round_half_away(value).clamp(0, 2**self.bits - 1).to(torch.uint8)

    def _restore(self, level: Tensor, fields: dict[str, Tensor]) -> Tensor:
        """Levels [..., G] back to numbers."""
        return level.float() * fields["scale"].unsqueeze(-1) + fields["zero"].unsqueeze(-1)

    def _choice(self, x: Tensor, length: Tensor, noise: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Value, reach and boundaries of groups [..., G] of vectors so long that noise is a fraction of `length`."""
        scale, zero = self._ranges(x)
        value = (x - zero.unsqueeze(-1)) / scale.unsqueeze(-1)
        # The number itself, the minimum, and twice through the range.
        reach = 4 * noise * length / scale.unsqueeze(-1)
        boundaries = torch.arange(0.5, 2**self.bits - 1, device=x.device)
        return value, reach.expand_as(value), boundaries

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Packed levels, then scales, then zeros as FP32 little-endian, of one vector or one group of keys."""
        codes = bytes_of(fields["codes"], self._code_axes)
        return torch.cat([codes, bytes_of(fields["scale"], 1), bytes_of(fields["zero"], 1)], dim=-1)


class KiviKeys(_Kivi):
    """Keys: G tokens at a time, each channel with a range of its own. x is [..., G, D].

    Fields of one group: `codes` [D, G * bits / 8] uint8, `scale` and `zero` [D] fp32.
    """

    _code_axes = 2

    def __init__(self, bits: int, group: int, name: str, purpose: str) -> None:
        super().__init__(bits, group, name, purpose)
        self.group_tokens = group

    def fields(self, head_dim: int) -> dict[str, Field]:
        numbers = Field(torch.float32, (head_dim,))
        codes = Field(torch.uint8, (head_dim, self.group * self.bits // 8))
        return {"codes": codes, "scale": numbers, "zero": numbers}

    def numbers(self, head_dim: int) -> Numbers:
        return self._numbers(Kind.CHANNELS, self.group)

    def bytes_per_vector(self, head_dim: int) -> float:
        return stored_bytes(self.fields(head_dim)) / self.group

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Store groups of keys.

        Args:
            x: [..., G, D] fp32 or bf16, the G tokens of a group in order.
            layer: without effect.
        Raises:
            NonFiniteError: with the index [..., token] of a vector, or [...] of a group whose range overflows.
            InputError: not G tokens.
        """
        if x.ndim < 2 or x.shape[-2] != self.group:
            raise InputError(f"{self.name} takes keys in groups of {self.group} tokens, not {list(x.shape)}")
        x = x.float()
        require_finite(x)
        channels = x.transpose(-1, -2)
        scale, zero = self._ranges(channels)
        require_finite(scale)
        codes = pack_stream(self._level(channels, scale, zero), self.bits)
        return {"codes": codes, "scale": scale, "zero": zero}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        """[..., G, D] fp32."""
        return self._restore(unpack_stream(fields["codes"], self.bits), fields).transpose(-1, -2)

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return lengths_of(self.dequantize(fields, layer))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """[..., G, D] uint8."""
        return unpack_stream(fields["codes"], self.bits).transpose(-1, -2)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        x = x.float()
        longest = torch.linalg.vector_norm(x, dim=-1).amax(-1)[..., None, None]
        if isinstance(noise, Tensor):
            noise = noise.amax(-2, keepdim=True)
        value, reach, boundaries = self._choice(x.transpose(-1, -2), longest, noise)
        return LevelChoice(value.transpose(-1, -2), reach.transpose(-1, -2), boundaries)


class KiviValues(_Kivi):
    """Values: each token alone, in groups of G neighbouring channels. x is [..., D].

    Fields: `codes` [D * bits / 8] uint8, `scale` and `zero` [D / G] fp32.
    """

    group_tokens = 1
    _code_axes = 1

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim < 1 or head_dim % self.group:
            raise InputError(f"{self.name} groups {self.group} channels of V and cannot hold head_dim {head_dim}")
        numbers = Field(torch.float32, (head_dim // self.group,))
        return {"codes": Field(torch.uint8, (head_dim * self.bits // 8,)), "scale": numbers, "zero": numbers}

    def numbers(self, head_dim: int) -> Numbers:
        self.fields(head_dim)
        return self._numbers(Kind.STREAM, 1)

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(stored_bytes(self.fields(head_dim)))

    def _grouped(self, x: Tensor) -> Tensor:
        self.fields(x.shape[-1])
        return groups_of(x.float(), self.group)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        channels = self._grouped(x)
        scale, zero = self._ranges(channels)
        require_finite(scale)
        codes = pack_stream(self._level(channels, scale, zero), self.bits)
        return {"codes": codes.flatten(-2), "scale": scale, "zero": zero}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = groups_of(self.levels(fields), self.group)
        return self._restore(level, fields).flatten(-2)

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return lengths_of(self.dequantize(fields, layer))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_stream(fields["codes"], self.bits)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        length = torch.linalg.vector_norm(x.float(), dim=-1)[..., None, None]
        if isinstance(noise, Tensor):
            noise = noise.unsqueeze(-1)
        value, reach, boundaries = self._choice(self._grouped(x), length, noise)
        return LevelChoice(value.flatten(-2), reach.flatten(-2), boundaries)


def kivi_pair(bits: int, group: int) -> tuple[KiviKeys, KiviValues]:
    """K's and V's format of so many bits; groups of 32 need not be named."""
    name = f"kivi{bits}" if group == 32 else f"kivi{bits}_g{group}"
    purpose = f"KIVI, {bits} bits by groups of {group}: K per channel, V per token"
    return KiviKeys(bits, group, name, purpose), KiviValues(bits, group, name, purpose)
