"""One Qwen3 decoder layer, the same for prefill and decode: it sees tokens, not phases."""

from __future__ import annotations

from torch import Tensor

from haarkv.models.base import DecoderConfig
from haarkv.models.parallel import Ranks
from haarkv.models.qwen3_14b.weights import AttentionWeights, LayerWeights
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


def decoder_layer(
    hidden: Tensor,
    weights: LayerWeights,
    index: int,
    *,
    config: DecoderConfig,
    ops: OpTable,
    cache: PagedKVCache,
    batch: Batch,
    rope: tuple[Tensor, Tensor],
    ranks: Ranks,
) -> Tensor:
    """Run one layer and store its K and V; arguments as in `models.base.DecoderLayer`.

    Rounding points: those of `tq_ops.reference`; q once after RoPE, the hidden state once after each residual.
    """
    hidden = attention(hidden, weights, index, config=config, ops=ops, cache=cache, batch=batch, rope=rope, ranks=ranks)
    dtype, x = hidden.dtype, ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    product = ops.silu_mul(ops.linear(x, weights.gate_proj), ops.linear(x, weights.up_proj), dtype)
    return (hidden.float() + ranks.sum(ops.linear(product, weights.down_proj))).to(dtype)


def attention(
    hidden: Tensor,
    weights: AttentionWeights,
    index: int,
    *,
    config: DecoderConfig,
    ops: OpTable,
    cache: PagedKVCache,
    batch: Batch,
    rope: tuple[Tensor, Tensor],
    ranks: Ranks,
) -> Tensor:
    """The layer up to its first residual, all but the MLP; arguments and result as of `decoder_layer`."""
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
    return (hidden.float() + ranks.sum(ops.linear(attended, weights.o_proj))).to(dtype)
