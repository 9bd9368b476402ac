"""What formats share that store a vector as blocks of values, each with an FP16 scale of its own, as ggml does."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, LevelChoice, bytes_of, lengths_of, require_finite, stored_bytes
from haarkv.tq_ops.formats.numbers import Numbers
from haarkv.tq_ops.formats.packing import groups_of
from haarkv.tq_ops.formats.rotated import Description


class BlockFormat(ABC):
    """A format whose blocks stand alone. In the cache codes and scales lie apart; `to_bytes` has the origin's blocks.

    Attributes:
        block: values a block.
    """

    name: str
    purpose: str
    group_tokens = 1
    lossy = True
    block: int

    @abstractmethod
    def fields(self, head_dim: int) -> dict[str, Field]: ...

    @abstractmethod
    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]: ...

    @abstractmethod
    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor: ...

    @abstractmethod
    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor: ...

    @abstractmethod
    def levels(self, fields: dict[str, Tensor]) -> Tensor: ...

    @abstractmethod
    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice: ...

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return lengths_of(self.dequantize(fields, layer))

    def description(self, head_dim: int) -> Description | None:
        return None  # not one of rotated levels

    def numbers(self, head_dim: int) -> Numbers | None:
        return None  # unless it says so

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(stored_bytes(self.fields(head_dim)))

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


def relative_reach(value: Tensor, x: Tensor, scale: Tensor, noise: float | Tensor) -> Tensor:
    """How far `value = y / scale` may move where noise moves y by as much and, through the block's maximum, the scale.

    Args:
        value: [..., blocks, block].
        x: [..., D], of whose length noise is a fraction.
        scale: [..., blocks, 1]; 0 for a block of zeros, whose value does not move.
    """
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    moved = (2 * noise * length).unsqueeze(-1) / scale.abs()
    return torch.where(scale == 0, torch.zeros_like(value), moved.expand_as(value))
