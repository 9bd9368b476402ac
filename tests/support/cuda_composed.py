"""What the fused ops mean, in the ops of a table: the spec that a backend's own are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import Heads, OpTable


def attention(
    ops: OpTable, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], cache: PagedKVCache, layer: int, batch: Batch,
    softmax_scale: float,
) -> Tensor:  # fmt: skip
    """As `FusedOps.attention`."""
    if heads.bias is not None:
        qkv = qkv + heads.bias
    shape = cache.shape(layer)
    split = [heads.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(qkv), -1, shape.head_dim), split, dim=1)
    if heads.q_norm is not None:
        q, k = ops.rms_norm(q, heads.q_norm, heads.eps), ops.rms_norm(k, heads.k_norm, heads.eps)
    q, k = ops.rope(q, *rope), ops.rope(k, *rope)
    ops.store_kv(k, v, cache, layer, batch)
    return ops.paged_attention(q.to(heads.dtype), cache, layer, batch, softmax_scale).flatten(1)


def add_norm(
    ops: OpTable, hidden: Tensor, update: Tensor, weight: Tensor, eps: float, behind: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """As `FusedOps.add_norm`."""
    if behind is not None:
        update = ops.rms_norm(update, *behind)
    hidden = (hidden.float() + update).to(hidden.dtype)
    return hidden, ops.rms_norm(hidden, weight, eps)
