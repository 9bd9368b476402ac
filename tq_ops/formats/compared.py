"""Formats of other projects, for comparison. They give the bytes of the original implementations. None rotates by a matrix.

`q4_0` and `q8_0` come from ggml (`quantize_row_q*_0_ref`). `tq3_0` and `tbq4_0` come from llama.cpp forks, which rotate blocks
by a signed Walsh-Hadamard transform. `fp8_e4m3` is OCP 8-bit floating point. `manthan3` is the public ManthanQuant codec
(numpy). KIVI is arXiv 2402.02750 in the arithmetic of the public SYCL kernels; the original differs: no 1e-10, ties to even,
int32 words, and other rules for when recent tokens are quantized.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch
from torch import Tensor

from haarkv.codebooks import hadamard_signs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import (
    divide,
    fwht,
    reciprocal,
    round_half_away,
    square_root,
    sum_in_order,
    sum_pairwise,
)
from haarkv.tq_ops.formats.base import Field, KVFormat, Part, require_finite
from haarkv.tq_ops.formats.packing import pack_parts, pack_stream, split_groups, unpack_parts, unpack_stream
from haarkv.tq_ops.formats.rotated import centroids_at, numbers_on


def to_fp16(scale: Tensor) -> Tensor:
    """Scales [..., blocks] to FP16, ties to even; a NonFiniteError if one is not finite or rounds to infinity."""
    half = scale.to(torch.float16)
    require_finite(half.float())
    return half


def _reached_levels(value: Tensor, boundaries: tuple[float, ...], *, ties_up: bool = True) -> Tensor:
    """Levels uint8: the number of boundaries that each number reaches; without `ties_up`, that it exceeds."""
    level = torch.bucketize(value, numbers_on(boundaries, value.device), right=ties_up, out_int32=True)
    return level.to(torch.uint8)


def _at(numbers: tuple[float, ...], level: Tensor) -> Tensor:
    return centroids_at(level, numbers_on(numbers, level.device))


# -- Blocks ------------------------------------------------------------------------------------------------------------------
class BlockFormat(KVFormat):
    """A format of independent blocks, each with an FP16 scale; the cache stores codes and scales apart."""

    to_compare = True
    block: int = 32
    multiple = 32
    cuts = "stores blocks of 32 values"

    def split(self, x: Tensor) -> Tensor:
        """[..., D] of any dtype -> [..., blocks, block] fp32."""
        self.fields(x.shape[-1])
        return split_groups(x.float(), self.block)


class BlockQ4(BlockFormat):
    """`q4_0`: 32 values, 16 even steps, the largest value (with its sign) at level 0.

        d = (the value of largest magnitude, the first of equals) / -8
        level = min(15, trunc(x * (1 / d) + 8.5));  restored: (level - 8) * fp16(d)

    A block of zeros stores d = -0 and level 8. A block too small for FP16 is restored as zeros; a d that rounds to infinity
    raises an error. 18 bytes a block: d, then `byte[j] = level[j] | level[j + 16] << 4`.
    Rounding points: d, 1 / d, the product and the sum to FP32; the stored d to FP16.
    """

    name = "q4_0"
    purpose = "llama.cpp's 4-bit cache"
    layout = (Part("scale", torch.float16), Part("codes", torch.uint8, 4))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        blocks = self.split(x)
        scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
        level = (blocks * reciprocal(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
        return {"codes": pack_parts(level, 4).flatten(-2), "scale": to_fp16(scale.squeeze(-1))}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = unpack_parts(split_groups(fields["codes"], self.block // 2), 4)
        return ((level.float() - 8) * fields["scale"].float().unsqueeze(-1)).flatten(-2)


class BlockQ8(BlockFormat):
    """`q8_0`: 32 values, 255 even steps. 34 bytes a block: d, then 32 signed codes.

        d = max |x| / 127;  code = round(x * (1 / d)), ties away from zero;  restored: code * fp16(d)

    A block too small for FP16 is restored as zeros; a d that rounds to infinity raises an error.
    Rounding points: d, 1 / d and the product to FP32; the stored d to FP16.
    """

    name = "q8_0"
    purpose = "llama.cpp's 8-bit cache"
    layout = (Part("scale", torch.float16), Part("codes", torch.int8, 8))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        blocks = self.split(x)
        scale = divide(blocks.abs().amax(-1, keepdim=True), 127)
        codes = round_half_away(blocks * reciprocal(scale)).to(torch.int8).flatten(-2)
        return {"codes": codes, "scale": to_fp16(scale.squeeze(-1))}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        codes = split_groups(fields["codes"], self.block)
        return (codes.float() * fields["scale"].float().unsqueeze(-1)).flatten(-2)


@cache
def _signs_on(name: str, device: torch.device) -> Tensor:
    return hadamard_signs(name).to(device)


class HadamardTQ3(BlockFormat):
    """`tq3_0`: four levels of a rotated block of 32, and a residual sign that nothing reads.

        y = WHT32(s * x) * 0.17677669;  d = max |y| / 1.510;  v = y * (1 / d)
        level = 0, 1, 2, 3 below -.9814, below 0, below .9814, from there on
        sign = (y - c[level] * d >= 0);  restored: s * WHT32(c[level] * fp16(d)) * 0.17677669

    A block of zeros, or one too small for FP16, comes back as zeros; one whose d rounds to infinity is refused. 14 bytes a
    block: levels (2 bits), signs, both least significant bit first, then fp16(d). Nothing is fused: the sign at the block's
    maximum is that of a rounding error. Rounding points: every FP32 operation of the formula; gamma to FP16.
    """

    name = "tq3_0"
    purpose = "a llama.cpp fork's TQ3_0"
    layout = (Part("codes", torch.uint8, 2), Part("signs", torch.uint8, 1), Part("gamma", torch.float16))
    unpack = staticmethod(partial(unpack_stream, bits=2))
    centroids = (-1.510, -0.4528, 0.4528, 1.510)
    boundaries = (-0.9814, 0.0, 0.9814)
    norm = 0.17677669

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        y = fwht(self.split(x) * _signs_on("tq3_0", x.device)) * self.norm
        scale = divide(y.abs().amax(-1, keepdim=True), self.centroids[-1])
        gamma = to_fp16(scale.squeeze(-1))
        level = _reached_levels(y * reciprocal(scale), self.boundaries)
        sign = (y - _at(self.centroids, level) * scale >= 0).to(torch.uint8)
        return {"codes": pack_stream(level, 2).flatten(-2), "signs": pack_stream(sign, 1).flatten(-2), "gamma": gamma}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = split_groups(self.unpack(fields["codes"]), self.block)
        y = _at(self.centroids, level) * fields["gamma"].float().unsqueeze(-1)
        return (fwht(y) * self.norm * _signs_on("tq3_0", y.device)).flatten(-2)


class HadamardTBQ4(BlockFormat):
    """`tbq4_0`: 16 Lloyd-Max levels of a rotated block of 128, the renormalisation folded into the scale as in `tq4`.

        y = s2 * WHT128(s1 * x * (1 / ||x||)) * 0.08838834764831845;  level = #{b : y >= b};  d = fp16(||x|| / ||c[level]||)

    A block with ||x|| <= 1e-10 stores d 0 and level 8 and comes back as zeros; one whose squares overflow or whose d rounds to
    infinity is refused. 66 bytes a block: d, then byte j / 2 with the even j in its low half.
    Rounding points: both sums of squares in order, each FP32 operation of the formula; d to FP16.
    """

    name = "tbq4_0"
    purpose = "a llama.cpp fork's TBQ4_0"
    block = multiple = 128
    cuts = "stores blocks of 128 values"
    layout = (Part("scale", torch.float16), Part("codes", torch.uint8, 4))
    unpack = staticmethod(partial(unpack_stream, bits=4))
    _upper_centroids = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
    _upper_boundaries = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
    centroids = (*(-c for c in reversed(_upper_centroids)), *_upper_centroids)
    boundaries = (*(-b for b in reversed(_upper_boundaries)), 0.0, *_upper_boundaries)
    norm = 0.08838834764831845
    smallest = 1e-10

    def _rotate(self, blocks: Tensor, before: str, after: str) -> Tensor:
        return fwht(blocks * _signs_on(before, blocks.device)) * self.norm * _signs_on(after, blocks.device)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        blocks = self.split(x)
        norm = square_root(sum_in_order(blocks * blocks)).unsqueeze(-1)
        norm = torch.where(norm <= self.smallest, torch.zeros_like(norm), norm)
        level = _reached_levels(self._rotate(blocks * reciprocal(norm), "tbq4_0/before", "tbq4_0/after"), self.boundaries)
        centroids = _at(self.centroids, level)
        scale = to_fp16(norm.squeeze(-1) / square_root(sum_in_order(centroids * centroids)))
        return {"codes": pack_stream(level, 4).flatten(-2), "scale": scale}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = split_groups(self.unpack(fields["codes"]), self.block)
        # The origin's order: rotated back at its own length, then scaled.
        unit = self._rotate(_at(self.centroids, level), "tbq4_0/after", "tbq4_0/before")
        return (unit * fields["scale"].float().unsqueeze(-1)).flatten(-2)


# -- Whole vectors -----------------------------------------------------------------------------------------------------------
LARGEST_FP8 = 448.0


class FP8E4M3(KVFormat):
    """Each coordinate as E4M3, ties to even, saturating at 448; no scale. The smallest number is 2**-9."""

    name = "fp8_e4m3"
    purpose = "8-bit floats, no scale"
    layout = (Part("codes", torch.uint8, 8),)
    to_compare = True

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        return {"codes": x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["codes"].view(torch.float8_e4m3fn).float()


CENTROIDS = (-2.151946, -1.343910, -0.756006, -0.245094, 0.245094, 0.756006, 1.343910, 2.151946)
BOUNDARIES = (-1.747928, -1.049958, -0.500550, 0.0, 0.500550, 1.049958, 1.747928)
_RADIUS_EPS = 1e-8


@cache
def _centroids_on(head_dim: int, device: torch.device) -> Tensor:
    """c / sqrt(D), [8] fp32, divided on the host."""
    return (torch.tensor(CENTROIDS) / torch.tensor(math.sqrt(head_dim))).to(device)


class Manthan3(KVFormat):
    """`manthan3`: Lloyd-Max levels of a Gaussian, three bits each, without a rotation, and an FP32 length.

        r = ||x||;  s = x / (r + 1e-8) * sqrt(D);  level = #{b : b < s};  restored: c[level] / sqrt(D) * r

    A zero vector comes back as zeros. A vector whose squares overflow (|x| ~ 1e19) is refused. A coordinate above
    2.15 r / sqrt(D) is cut to that: an outlier channel costs nearly all of the direction. Bytes: the FP32 radius, then level i
    from bit 3i of a stream on. Rounding points: squares summed in numpy's pairwise order; each FP32 operation, left to right.
    """

    name = "manthan3"
    purpose = "ManthanQuant, not rotated"
    layout = (Part("radius", torch.float32, axes=0), Part("codes", torch.uint8, 3))
    unpack = staticmethod(partial(unpack_stream, bits=3))
    multiple = 8
    cuts = "packs 8 coordinates in 3 bytes"
    to_compare = True

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        radius = square_root(sum_pairwise(x * x)).unsqueeze(-1)
        require_finite(radius)
        scaled = x.contiguous() / (radius + _RADIUS_EPS) * math.sqrt(x.shape[-1])
        return {"codes": pack_stream(_reached_levels(scaled, BOUNDARIES, ties_up=False), 3), "radius": radius.squeeze(-1)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = self.unpack(fields["codes"])
        return centroids_at(level, _centroids_on(level.shape[-1], level.device)) * fields["radius"].unsqueeze(-1)


EPS = 1e-10


class Kivi(KVFormat):
    """One side of KIVI: levels of G numbers that share a range.

        scale = (max - min) / (2**bits - 1) + 1e-10;  level = clamp(round((x - min) / scale), 0, 2**bits - 1)
        restored: level * scale + min

    Keys go G tokens at a time, a range per channel: x is [..., G, D], and the fields of a group are `codes`
    [D, G * bits / 8] uint8, `scale` and `zero` [D] fp32. Values go by token, in groups of G channels: x is [..., D], and the
    fields are `codes` [D * bits / 8] uint8, `scale` and `zero` [D / G] fp32.

    Ties round up. A constant group comes back exactly; one whose range overflows is refused. Levels are packed least
    significant bit first. Rounding points: each FP32 operation of the formula.
    """

    to_compare = True

    def __init__(self, bits: int, group: int, *, keys: bool) -> None:
        self.name = f"kivi{bits}" if group == 32 else f"kivi{bits}_g{group}"  # groups of 32 need not be named
        self.purpose = f"KIVI, groups of {group}"
        self.bits, self.group, self.keys = bits, group, keys
        self.layout = Part("codes", torch.uint8, bits, 1 + keys), Part("scale", torch.float32), Part("zero", torch.float32)
        self.group_tokens, self.multiple = (group, 1) if keys else (1, group)
        self.cuts = f"groups {group} channels of V"

    def fields(self, head_dim: int) -> dict[str, Field]:
        super().fields(head_dim)
        numbers = Field(torch.float32, (head_dim if self.keys else head_dim // self.group,))
        codes = (head_dim, self.group * self.bits // 8) if self.keys else (head_dim * self.bits // 8,)
        return {"codes": Field(torch.uint8, codes), "scale": numbers, "zero": numbers}

    def _range_groups(self, x: Tensor) -> Tensor:
        """Numbers that share a range, side by side: [..., D, G] of keys, [..., D / G, G] of values."""
        self.fields(x.shape[-1])
        return x.transpose(-1, -2) if self.keys else split_groups(x, self.group)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Store groups of keys [..., G, D], or values [..., D].

        Raises:
            NonFiniteError: with the index of a vector, or of a group of keys whose range overflows.
            InputError: keys that are not G tokens.
        """
        if self.keys and (x.ndim < 2 or x.shape[-2] != self.group):
            raise InputError(f"{self.name} takes keys in groups of {self.group} tokens, not {list(x.shape)}")
        x = x.float()
        require_finite(x)
        groups, most = self._range_groups(x), 2**self.bits - 1
        zero = groups.amin(-1)
        scale = divide(groups.amax(-1) - zero, most) + EPS
        require_finite(scale)
        value = (groups - zero.unsqueeze(-1)) / scale.unsqueeze(-1)
        codes = pack_stream(round_half_away(value).clamp(0, most).to(torch.uint8), self.bits)
        return {"codes": codes if self.keys else codes.flatten(-2), "scale": scale, "zero": zero}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        groups = self._range_groups(self.levels(fields)).float() * fields["scale"].unsqueeze(-1) + fields["zero"].unsqueeze(-1)
        return groups.transpose(-1, -2) if self.keys else groups.flatten(-2)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """[..., G, D] or [..., D] uint8."""
        level = unpack_stream(fields["codes"], self.bits)
        return level.transpose(-1, -2) if self.keys else level


def kivi_pair(bits: int, group: int) -> tuple[Kivi, Kivi]:
    """K's and V's format."""
    return Kivi(bits, group, keys=True), Kivi(bits, group, keys=False)
