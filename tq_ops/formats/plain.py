"""Formats that rotate nothing: `bf16`, `fp32` as the yardstick of tests, `fp8_e4m3`, what serving engines call an fp8 cache,
and `manthan3`, three bits a coordinate and an FP32 length.

Sources: OCP 8-bit floating point, E4M3; the public ManthanQuant codec (numpy).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import square_root, sum_pairwise
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import pack_stream, unpack_stream
from haarkv.tq_ops.formats.rotated import centroids_at, numbers_on
from haarkv.tq_ops.formats.stretches import Turns

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


class ByStretches(Plain):
    """Plain numbers of keys that are stored by stretches, for the reference to read."""

    to_compare = True

    def __init__(self, turns: Turns) -> None:
        super().__init__("fp32", torch.float32, "keys by stretches")
        self._turns = turns

    def turns(self, layer: int) -> Turns:
        return self._turns


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


BITS = 3
CENTROIDS = (-2.151946, -1.343910, -0.756006, -0.245094, 0.245094, 0.756006, 1.343910, 2.151946)
BOUNDARIES = (-1.747928, -1.049958, -0.500550, 0.0, 0.500550, 1.049958, 1.747928)
EPS = 1e-8


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
        return {"codes": Field(torch.uint8, (head_dim * BITS // 8,)), "radius": Field(torch.float32, ())}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        radius, scaled = _scaled(x)
        require_finite(radius)
        level = torch.bucketize(scaled, numbers_on(BOUNDARIES, x.device), out_int32=True).to(torch.uint8)
        return {"codes": pack_stream(level, BITS), "radius": radius.squeeze(-1)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = self.levels(fields)
        return centroids_at(level, _centroids_on(level.shape[-1], level.device)) * fields["radius"].unsqueeze(-1)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """The radius as FP32 little-endian, then the bit stream."""
        return torch.cat([bytes_of(fields["radius"], 0), fields["codes"]], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_stream(fields["codes"], BITS)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Radius [..., 1] and the vector [..., D] as multiples of a coordinate's root mean square."""
    radius = square_root(sum_pairwise(x * x)).unsqueeze(-1)
    return radius, x.contiguous() / (radius + EPS) * math.sqrt(x.shape[-1])
