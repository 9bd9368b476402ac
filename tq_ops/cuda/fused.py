"""`tq_ops.fused.FusedOps` on a GPU, or, with tensors on the CPU, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices, elementwise, experts, ops
from haarkv.tq_ops.cuda.launching import launch
from haarkv.tq_ops.fused import Heads, Stack
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.weight import Weight


@dataclass(frozen=True)
class CudaFused:
    """The fused ops of one executor. None of them waits for the device.

    Attributes:
        fault: from `ops.new_fault`; a K or V that is not finite, or too large for its format, is left out and noted there.
    """

    fault: Tensor

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, weight, eps)

    def linear(self, x: Tensor, weight: Weight | tuple[Weight, ...]) -> Tensor:
        if isinstance(weight, tuple):
            return torch.cat([ops.linear(x, part) for part in weight], dim=1)
        return ops.linear(x, weight)

    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.silu_mul(gate, up, dtype)

    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.gelu_mul(gate, up, dtype)

    def experts(self, x: Tensor, logits: Tensor, stack: Stack) -> Tensor:
        """As `ExpertOps.experts`: the launches of `experts.through`."""
        return experts.through(x, logits, stack)

    def attention(
        self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], cache: PagedKVCache, layer: int, batch: Batch,
        softmax_scale: float,
    ) -> Tensor:  # fmt: skip
        """As `FusedOps.attention`: the launch of `ops.rotate_and_append`, and those of `ops.attend`."""
        q, rotated = ops.rotate_and_append(qkv, heads, rope, cache, layer, batch, self.fault)
        return ops.attend(q, rotated, cache, layer, batch, softmax_scale).flatten(1)

    def add_norm(
        self, hidden: Tensor, update: Tensor, weight: Tensor, eps: float, behind: tuple[Tensor, float] | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FusedOps.add_norm`, one launch."""
        hidden, update, (rows, width) = hidden.contiguous(), update.contiguous(), hidden.shape
        out, normed, size = torch.empty_like(hidden), torch.empty_like(hidden), triton.next_power_of_2(width)
        of_update, its_eps = behind or (None, 0.0)
        launch(elementwise.add_norm_kernel, (rows,))(
            hidden, update, of_update, weight, out, normed, width, its_eps, eps, SIZE=size, num_warps=choices.row_warps(size),
            **choices.COMPILED,
        )  # fmt: skip
        return out, normed
