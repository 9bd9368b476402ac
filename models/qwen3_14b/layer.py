"""One Qwen3 decoder layer, the same for prefill and decode: it sees tokens, not phases."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from models.qwen3_14b.config import Qwen3Config
from models.qwen3_14b.weights import LayerWeights
from tq_ops.batch import Batch
from tq_ops.cache import PagedKVCache


class Ops(Protocol):
    """An op table: a module such as `tq_ops.reference`, whose signatures every other table repeats."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def store_kv(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None: ...
    def paged_attention(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor: ...


OP_NAMES = ("rms_norm", "linear", "rope", "silu_mul", "store_kv", "paged_attention")
"""Every op of a table, in the order in which a layer first calls them."""


class RopeTable:
    """cos and sin of every position, FP32: computed once on the host and handed to every executor.

        inv_freq_i = theta ** (-2i/D);   angle = position * inv_freq

    Args:
        config: theta, head_dim and the number of positions.
        device: where the tables live.
    """

    def __init__(self, config: Qwen3Config, device: torch.device | str = "cpu") -> None:
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq = 1.0 / (config.rope_theta**exponent)
        angle = torch.arange(config.max_position_embeddings, dtype=torch.float32).unsqueeze(1) * inv_freq
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D/2] fp32 of positions [T]."""
        return self.cos[positions], self.sin[positions]


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    index: int,
    *,
    config: Qwen3Config,
    ops: Ops,
    cache: PagedKVCache,
    batch: Batch,
    rope: tuple[Tensor, Tensor],
) -> Tensor:
    """Run one layer and store its K and V.

    Args:
        hidden: [T, hidden] bf16 or fp32, the model's dtype.
        weights: of this layer.
        index: of this layer, which chooses rotation and cache.
        rope: cos and sin of the batch's positions.
    Returns:
        [T, hidden] of hidden's dtype.
    Rounding points: those of `tq_ops.reference`; q once after RoPE, the hidden state once after each residual.
    """
    tokens, dtype = hidden.shape[0], hidden.dtype
    x = ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    q, k, v = (
        ops.linear(x, projection).view(tokens, -1, config.head_dim)
        for projection in (weights.q_proj, weights.k_proj, weights.v_proj)
    )
    q = ops.rope(ops.rms_norm(q, weights.q_norm, config.rms_norm_eps), *rope)
    k = ops.rope(ops.rms_norm(k, weights.k_norm, config.rms_norm_eps), *rope)
    ops.store_kv(k, v, cache, index, batch)
    attended = ops.paged_attention(q.to(dtype), cache, index, batch, config.softmax_scale).flatten(1)
    hidden = (hidden.float() + ops.linear(attended, weights.o_proj)).to(dtype)

    x = ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    product = ops.silu_mul(ops.linear(x, weights.gate_proj), ops.linear(x, weights.up_proj), dtype)
    return (hidden.float() + ops.linear(product, weights.down_proj)).to(dtype)
