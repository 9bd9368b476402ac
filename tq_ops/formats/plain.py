"""Formats that rotate nothing: `bf16`, `fp32` as the yardstick of tests, and others to compare with.

`fp8_e4m3` is what serving engines call an fp8 cache; source: OCP 8-bit floating point, E4M3. `manthan3` has three bits a
coordinate and an FP32 length; source: the public ManthanQuant codec (numpy). KIVI has asymmetric levels of groups of G: keys
per channel over tokens, values per token over channels; source: KIVI (arXiv 2402.02750), in the arithmetic of the public SYCL
kernels. The original differs: no 1e-10, ties to even, int32 words, and other rules of when the recent tokens are quantized.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, round_half_away, square_root, sum_pairwise
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import groups_of, pack_stream, unpack_stream
from haarkv.tq_ops.formats.rotated import centroids_at, numbers_on

LARGEST_FP8 = 448.0


class Plain(KVFormat):
    """Vectors stored as one tensor `data` of a floating dtype; not finite values pass through."""

    lossy = False
    plain: torch.dtype

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name, self.purpose, self.plain = name, purpose, dtype

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"data": Field(self.plain, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self.plain)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return bytes_of(fields["data"], 1)


class FP8E4M3(KVFormat):
    """Each coordinate rounded to four exponent and three mantissa bits, ties to even, saturating at 448; no scale.

    The smallest number is 2**-9: half of it and less comes back as zero.
    """

    name = "fp8_e4m3"
    purpose = "8-bit floats, no scale"
    to_compare = True

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"codes": Field(torch.uint8, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        return {"codes": x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["codes"].view(torch.float8_e4m3fn).float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return fields["codes"]


MANTHAN_BITS = 3
CENTROIDS = (-2.151946, -1.343910, -0.756006, -0.245094, 0.245094, 0.756006, 1.343910, 2.151946)
BOUNDARIES = (-1.747928, -1.049958, -0.500550, 0.0, 0.500550, 1.049958, 1.747928)
_RADIUS_EPS = 1e-8


@cache
def _centroids_on(head_dim: int, device: torch.device) -> Tensor:
    """c / sqrt(D), [8] fp32, divided on the host."""
    return (torch.tensor(CENTROIDS) / torch.tensor(math.sqrt(head_dim))).to(device)


class Manthan3(KVFormat):
    """Lloyd-Max levels of a Gaussian, taken of the vector as it is.

        r = ||x||;  s = x / (r + 1e-8) * sqrt(D);  level = #{b : b < s};  restored: c[level] / sqrt(D) * r

    A tie goes to the lower level, so a zero gets level 3. A zero vector comes back as zeros, and one shorter than about
    1e-8 as a fraction of itself. A vector whose squares overflow (from |x| ~ 1e19 on) is refused.
    Without a rotation a coordinate larger than 2.15 r / sqrt(D) is cut to that: an outlier channel costs nearly all of its
    direction. Level i begins at bit 3i of a stream, least significant bit first; the FP32 radius is kept apart.
    Rounding points: squares summed in numpy's pairwise order; each FP32 operation of the formula, from left to right.
    """

    name = "manthan3"
    purpose = "ManthanQuant, not rotated"
    to_compare = True

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim < 8 or head_dim % 8:
            raise InputError(f"manthan3 packs 8 coordinates in 3 bytes and cannot hold head_dim {head_dim}")
        return {"codes": Field(torch.uint8, (head_dim * MANTHAN_BITS // 8,)), "radius": Field(torch.float32, ())}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        radius, scaled = _scaled(x)
        require_finite(radius)
        level = torch.bucketize(scaled, numbers_on(BOUNDARIES, x.device), out_int32=True).to(torch.uint8)
        return {"codes": pack_stream(level, MANTHAN_BITS), "radius": radius.squeeze(-1)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = self.levels(fields)
        return centroids_at(level, _centroids_on(level.shape[-1], level.device)) * fields["radius"].unsqueeze(-1)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """The radius as FP32 little-endian, then the bit stream."""
        return torch.cat([bytes_of(fields["radius"], 0), fields["codes"]], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_stream(fields["codes"], MANTHAN_BITS)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Radius [..., 1] and the vector [..., D] as multiples of a coordinate's root mean square."""
    radius = square_root(sum_pairwise(x * x)).unsqueeze(-1)
    return radius, x.contiguous() / (radius + _RADIUS_EPS) * math.sqrt(x.shape[-1])


EPS = 1e-10


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
