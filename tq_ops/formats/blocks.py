"""What formats share that store a vector as blocks of values, each with an FP16 scale of its own, as ggml does."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import groups_of


class BlockFormat(KVFormat):
    """A format whose blocks stand alone. In the cache codes and scales lie apart; `to_bytes` has the origin's blocks.

    Attributes:
        block: values a block.
    """

    block: int

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
