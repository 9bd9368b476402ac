"""ggml's own block formats `q4_0` and `q8_0`, and llama.cpp's rotation before the first, to compare with.

Source: ggml, `quantize_row_q*_0_ref`; llama.cpp, pull request 21038.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, fwht, reciprocal, round_half_away
from haarkv.tq_ops.formats.base import Field, LevelChoice
from haarkv.tq_ops.formats.blocks import BlockFormat, in_blocks, scale_bytes, to_fp16
from haarkv.tq_ops.formats.numbers import Exact, Kind, Numbers
from haarkv.tq_ops.formats.packing import groups_of, pack_parts, unpack_parts


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
    purpose = "llama.cpp's 4-bit cache, to compare with"
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


class RotatedBlockQ4(BlockQ4):
    """`q4_0` of vectors that were rotated by a Hadamard matrix, as llama.cpp's attention rotation stores K and V.

        y = WHT(x) / sqrt(n) of each n numbers;  then q4_0 of y;  restored: WHT(q4_0's) / sqrt(n)

    llama.cpp rotates every quantized cache whose head_dim 64 divides, unless told not to: K by the largest power of two that
    divides head_dim, V by 64. It rotates q too, and the output back, which is the same in exact arithmetic. Where 64 does not
    divide head_dim it stores plain q4_0; here that is refused. Written here after its code, and none of its bytes were
    compared: it multiplies by the matrix, in an order of sums that differs by backend; here it is the fast transform.
    Rounding points: each stage of the transform and its factor to FP32; then q4_0's.

    Args:
        whole: rotate by the largest power of two, as K is; by 64 else, as V is.
    """

    name = "q4_0_rot"
    purpose = "llama.cpp's q4_0 with its attention rotation"
    smallest = 64

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole

    def count_blocks(self, head_dim: int) -> int:
        if head_dim < 1 or head_dim % self.smallest:
            raise InputError(f"{self.name} rotates {self.smallest} values at a time and cannot hold head_dim {head_dim}")
        return super().count_blocks(head_dim)

    def _rotate(self, x: Tensor) -> Tensor:
        """[..., D] fp32, its own inverse."""
        head_dim = x.shape[-1]
        size = head_dim & -head_dim if self._whole else self.smallest
        return (fwht(groups_of(x, size)) * float(size**-0.5)).flatten(-2)

    def split(self, x: Tensor) -> Tensor:
        self.count_blocks(x.shape[-1])
        return super().split(self._rotate(x.float()))

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return self._rotate(super().dequantize(fields, layer))


class BlockQ8(BlockFormat):
    """`q8_0`: 32 values, 255 even steps.

        d = max |x| / 127;  code = round(x * (1 / d)), ties away from zero;  restored: code * fp16(d)

    A block of zeros stores zeros. A block too small for FP16 comes back as zeros, one whose d rounds to infinity is refused.
    34 bytes a block: d, then 32 signed codes.
    Rounding points: d, 1 / d and the product to FP32; the stored d to FP16.
    """

    name = "q8_0"
    purpose = "llama.cpp's 8-bit cache, to compare with"
    block = 32

    def fields(self, head_dim: int) -> dict[str, Field]:
        blocks = self.count_blocks(head_dim)
        return {"codes": Field(torch.int8, (head_dim,)), "scale": Field(torch.float16, (blocks,))}

    def numbers(self, head_dim: int) -> Numbers:
        self.count_blocks(head_dim)
        return Numbers(Kind.INT8, scale="scale", exact=Exact(127 * torch.finfo(torch.float16).max))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        value, scale = self._value(self.split(x))
        stored = to_fp16(scale.squeeze(-1))
        return {"codes": round_half_away(value).to(torch.int8).flatten(-2), "scale": stored}

    def _value(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """`x / d` [..., blocks, 32] and d [..., blocks, 1]."""
        scale = divide(blocks.abs().amax(-1, keepdim=True), 127)
        return blocks * reciprocal(scale), scale

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        codes = groups_of(fields["codes"], self.block)
        return (codes.float() * fields["scale"].float().unsqueeze(-1)).flatten(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        codes = groups_of(fields["codes"].contiguous().view(torch.uint8), self.block)
        return in_blocks(scale_bytes(fields["scale"]), codes)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """Codes counted from -127, which is level 0."""
        return (fields["codes"].int() + 127).to(torch.uint8)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        value, scale = self._value(self.split(x))
        # Noise moves a number and, through the block's maximum, the scale; a block of zeros does not move.
        moved = (2 * noise * torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)).unsqueeze(-1) / scale
        reach = torch.where(scale == 0, torch.zeros_like(value), moved.expand_as(value))
        boundaries = torch.arange(-126.5, 127.0, device=x.device)
        # Away from zero: a negative tie belongs to the level below.
        above = torch.nextafter(boundaries, torch.full_like(boundaries, torch.inf))
        boundaries = torch.where(boundaries < 0, above, boundaries)
        return LevelChoice(value.flatten(-2), reach.flatten(-2), boundaries)
