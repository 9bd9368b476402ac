"""Formats that store a vector as blocks of values, each with an FP16 scale of its own, as ggml does, to compare with.

`q4_0` and `q8_0` are ggml's own (`quantize_row_q*_0_ref`); `tq3_0` and `tbq4_0` are of llama.cpp forks that rotate blocks by a
Walsh-Hadamard transform with signs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import hadamard_signs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, fwht, reciprocal, round_half_away, square_root, sum_in_order
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import groups_of, pack_parts, pack_stream, unpack_parts, unpack_stream
from haarkv.tq_ops.formats.rotated import centroids_at, numbers_on


class BlockFormat(KVFormat):
    """A format whose blocks stand alone. In the cache codes and scales lie apart; `to_bytes` has the origin's blocks.

    Attributes:
        block: values a block.
    """

    block: int
    to_compare = True

    def count_blocks(self, head_dim: int) -> int:
        """Blocks a vector.

        Raises:
            InputError: they would not fill it.
        """
        if head_dim < 1 or head_dim % self.block:
            raise InputError(f"{self.name} stores blocks of {self.block} values and cannot hold head_dim {head_dim}")
        return head_dim // self.block

    def split(self, x: Tensor) -> Tensor:
        """[..., D] of any dtype -> [..., blocks, block] fp32."""
        self.count_blocks(x.shape[-1])
        return groups_of(x.float(), self.block)


def to_fp16(scale: Tensor) -> Tensor:
    """Round scales [..., blocks] to FP16, ties to even.

    Raises:
        NonFiniteError: one is not finite or rounds to infinity (65520 and more), which a cache must not hold.
    """
    stored = scale.to(torch.float16)
    require_finite(stored.float())
    return stored


def in_blocks(*parts: Tensor) -> Tensor:
    """Bytes of the blocks, the parts of each one after the other: each [..., blocks, n_i] uint8 -> [..., blocks * sum n]."""
    return torch.cat(parts, dim=-1).flatten(-2)


def scale_bytes(scale: Tensor) -> Tensor:
    """FP16 scales [..., blocks] as [..., blocks, 2] uint8, little-endian."""
    return bytes_of(scale, 0)


class BlockQ4(BlockFormat):
    """`q4_0`: 32 values, 16 even steps, the largest value (with its sign) at level 0.

        d = (the value of largest magnitude, the first of equals) / -8
        level = min(15, trunc(x * (1 / d) + 8.5));  restored: (level - 8) * fp16(d)

    A block of zeros stores d = 0 (with the sign bit set, as -0 comes out of 0 / -8) and level 8. A block too small for FP16
    comes back as zeros, one whose d rounds to infinity is refused. 18 bytes a block: d, then `byte[j] = level[j] | level[j +
    16] << 4`.
    Rounding points: d, 1 / d, the product and the sum to FP32; the stored d to FP16.
    """

    name = "q4_0"
    purpose = "llama.cpp's 4-bit cache"
    block = 32

    def fields(self, head_dim: int) -> dict[str, Field]:
        blocks = self.count_blocks(head_dim)
        return {"codes": Field(torch.uint8, (head_dim // 2,)), "scale": Field(torch.float16, (blocks,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        value, scale = self._value(self.split(x))
        stored = to_fp16(scale.squeeze(-1))
        level = value.trunc().clamp(0, 15).to(torch.uint8)
        return {"codes": pack_parts(level, 4).flatten(-2), "scale": stored}

    def _value(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """`x / d + 8.5` [..., blocks, 32] and d [..., blocks, 1]."""
        scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
        return blocks * reciprocal(scale) + 8.5, scale

    def _codes(self, fields: dict[str, Tensor]) -> Tensor:
        """Levels as stored, [..., blocks, 32] uint8."""
        return unpack_parts(groups_of(fields["codes"], self.block // 2), 4)

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return ((self._codes(fields).float() - 8) * fields["scale"].float().unsqueeze(-1)).flatten(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return in_blocks(scale_bytes(fields["scale"]), groups_of(fields["codes"], self.block // 2))


class BlockQ8(BlockFormat):
    """`q8_0`: 32 values, 255 even steps.

        d = max |x| / 127;  code = round(x * (1 / d)), ties away from zero;  restored: code * fp16(d)

    A block of zeros stores zeros. A block too small for FP16 comes back as zeros, one whose d rounds to infinity is refused.
    34 bytes a block: d, then 32 signed codes.
    Rounding points: d, 1 / d and the product to FP32; the stored d to FP16.
    """

    name = "q8_0"
    purpose = "llama.cpp's 8-bit cache"
    block = 32

    def fields(self, head_dim: int) -> dict[str, Field]:
        blocks = self.count_blocks(head_dim)
        return {"codes": Field(torch.int8, (head_dim,)), "scale": Field(torch.float16, (blocks,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        blocks = self.split(x)
        scale = divide(blocks.abs().amax(-1, keepdim=True), 127)
        codes = round_half_away(blocks * reciprocal(scale)).to(torch.int8).flatten(-2)
        return {"codes": codes, "scale": to_fp16(scale.squeeze(-1))}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        codes = groups_of(fields["codes"], self.block)
        return (codes.float() * fields["scale"].float().unsqueeze(-1)).flatten(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        codes = groups_of(fields["codes"].contiguous().view(torch.uint8), self.block)
        return in_blocks(scale_bytes(fields["scale"]), codes)


@cache
def _signs_on(name: str, device: torch.device) -> Tensor:
    return hadamard_signs(name).to(device)


def _at(numbers: tuple[float, ...], level: Tensor) -> Tensor:
    return centroids_at(level, numbers_on(numbers, level.device))


class HadamardTQ3(BlockFormat):
    """`tq3_0`: four levels of a rotated block of 32, and a residual sign that nothing reads.

        y = WHT32(s * x) * 0.17677669;  d = max |y| / 1.510;  v = y * (1 / d)
        level = 0, 1, 2, 3 below -.9814, below 0, below .9814, from there on
        sign = (y - c[level] * d >= 0);  restored: s * WHT32(c[level] * fp16(d)) * 0.17677669

    A block of zeros stores level 2, sign 1 and gamma 0, and comes back as zeros, as does one too small for FP16; one whose d
    rounds to infinity is refused. 14 bytes a block: levels, 2 bits each, then signs, both least significant bit first, then
    gamma = fp16(d), last.
    The sign at the block's maximum is that of a rounding error and flips with fused multiply-add; here nothing is fused.
    Rounding points: every FP32 operation of the formula; gamma to FP16.
    """

    name = "tq3_0"
    purpose = "a llama.cpp fork's TQ3_0"
    block = 32
    centroids = (-1.510, -0.4528, 0.4528, 1.510)
    boundaries = (-0.9814, 0.0, 0.9814)
    largest = 1.510
    norm = 0.17677669

    def fields(self, head_dim: int) -> dict[str, Field]:
        blocks = self.count_blocks(head_dim)
        return {
            "codes": Field(torch.uint8, (head_dim // 4,)),
            "signs": Field(torch.uint8, (head_dim // 8,)),
            "gamma": Field(torch.float16, (blocks,)),
        }

    def _value(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y and `y / d` [..., blocks, 32], and d [..., blocks, 1]."""
        y = fwht(blocks * _signs_on("tq3_0", blocks.device)) * self.norm
        scale = divide(y.abs().amax(-1, keepdim=True), self.largest)
        return y, y * reciprocal(scale), scale

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        y, value, scale = self._value(self.split(x))
        gamma = to_fp16(scale.squeeze(-1))
        level = torch.bucketize(value, numbers_on(self.boundaries, x.device), right=True, out_int32=True).to(torch.uint8)
        sign = (y - _at(self.centroids, level) * scale >= 0).to(torch.uint8)
        return {"codes": pack_stream(level, 2).flatten(-2), "signs": pack_stream(sign, 1).flatten(-2), "gamma": gamma}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = groups_of(self.levels(fields), self.block)
        y = _at(self.centroids, level) * fields["gamma"].float().unsqueeze(-1)
        return (fwht(y) * self.norm * _signs_on("tq3_0", y.device)).flatten(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        codes, signs = groups_of(fields["codes"], 8), groups_of(fields["signs"], 4)
        return in_blocks(codes, signs, scale_bytes(fields["gamma"]))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_stream(fields["codes"], 2)


class HadamardTBQ4(BlockFormat):
    """`tbq4_0`: 16 Lloyd-Max levels of a rotated block of 128, the renormalisation folded into the scale as in `tq4`.

        y = s2 * WHT128(s1 * x * (1 / ||x||)) * 0.08838834764831845;  level = #{b : y >= b};  d = fp16(||x|| / ||c[level]||)

    It stands for `d * c[level]` in the rotated domain, where attention may be computed with q rotated once. A block with
    ||x|| <= 1e-10 stores d 0 and level 8 and comes back as zeros; one whose squares overflow or whose d rounds to infinity is
    refused. 66 bytes a block: d first, then byte j / 2 with the even j in its low half.
    Rounding points: both sums of squares in order, each FP32 operation of the formula; d to FP16.
    """

    name = "tbq4_0"
    purpose = "a llama.cpp fork's TBQ4_0"
    block = 128
    _upper_centroids = (0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556)
    _upper_boundaries = (0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232)
    centroids = (*(-c for c in reversed(_upper_centroids)), *_upper_centroids)
    boundaries = (*(-b for b in reversed(_upper_boundaries)), 0.0, *_upper_boundaries)
    norm = 0.08838834764831845
    smallest = 1e-10

    def fields(self, head_dim: int) -> dict[str, Field]:
        blocks = self.count_blocks(head_dim)
        return {"codes": Field(torch.uint8, (head_dim // 2,)), "scale": Field(torch.float16, (blocks,))}

    def _rotated(self, blocks: Tensor, before: str, after: str) -> Tensor:
        return fwht(blocks * _signs_on(before, blocks.device)) * self.norm * _signs_on(after, blocks.device)

    def _value(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """y [..., blocks, 128] and the norm [..., blocks, 1], both 0 where the norm is not above 1e-10."""
        norm = square_root(sum_in_order(blocks * blocks)).unsqueeze(-1)
        norm = torch.where(norm <= self.smallest, torch.zeros_like(norm), norm)
        return self._rotated(blocks * reciprocal(norm), "tbq4_0/before", "tbq4_0/after"), norm

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        value, norm = self._value(self.split(x))
        level = torch.bucketize(value, numbers_on(self.boundaries, x.device), right=True, out_int32=True).to(torch.uint8)
        centroids = _at(self.centroids, level)
        scale = to_fp16(norm.squeeze(-1) / square_root(sum_in_order(centroids * centroids)))
        return {"codes": pack_stream(level, 4).flatten(-2), "scale": scale}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = groups_of(self.levels(fields), self.block)
        # The origin's order: rotated back at its own length, then scaled.
        unit = self._rotated(_at(self.centroids, level), "tbq4_0/after", "tbq4_0/before")
        return (unit * fields["scale"].float().unsqueeze(-1)).flatten(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return in_blocks(scale_bytes(fields["scale"]), groups_of(fields["codes"], self.block // 2))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_stream(fields["codes"], 4)
