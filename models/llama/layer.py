"""One Llama decoder layer and its tensors: Q and K go into RoPE as projected; Qwen2 adds a bias to Q, K and V."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from haarkv.models import weights as contract
from haarkv.models.base import DecoderConfig
from haarkv.models.parallel import Ranks
from haarkv.models.weights import stored
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class LayerWeights(contract.LayerWeights):
    """One decoder layer; projections are [out, in] as Hugging Face stores them."""

    input_norm: Tensor = stored("input_layernorm.weight", "hidden_size")
    q_proj: Tensor = stored("self_attn.q_proj.weight", "q_size", "hidden_size")
    k_proj: Tensor = stored("self_attn.k_proj.weight", "kv_size", "hidden_size")
    v_proj: Tensor = stored("self_attn.v_proj.weight", "kv_size", "hidden_size")
    o_proj: Tensor = stored("self_attn.o_proj.weight", "hidden_size", "q_size")
    post_norm: Tensor = stored("post_attention_layernorm.weight", "hidden_size")
    gate_proj: Tensor = stored("mlp.gate_proj.weight", "intermediate_size", "hidden_size")
    up_proj: Tensor = stored("mlp.up_proj.weight", "intermediate_size", "hidden_size")
    down_proj: Tensor = stored("mlp.down_proj.weight", "hidden_size", "intermediate_size")
    q_bias: Tensor | None = stored("self_attn.q_proj.bias", "q_size", only_if="qkv_bias")
    k_bias: Tensor | None = stored("self_attn.k_proj.bias", "kv_size", only_if="qkv_bias")
    v_bias: Tensor | None = stored("self_attn.v_proj.bias", "kv_size", only_if="qkv_bias")


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

    Rounding points: those of `tq_ops.reference`; biases are added in FP32; q once after RoPE, the hidden state once after
    each residual.
    """
    tokens, dtype = hidden.shape[0], hidden.dtype

    def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = ops.linear(x, weight)
        return (y if bias is None else y + bias).view(tokens, -1, config.head_dim)

    x = ops.rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    q = ops.rope(projected(x, weights.q_proj, weights.q_bias), *rope)
    k = ops.rope(projected(x, weights.k_proj, weights.k_bias), *rope)
    v = projected(x, weights.v_proj, weights.v_bias)
    ops.store_kv(k, v, cache, index, batch)
    attended = ops.paged_attention(q.to(dtype), cache, index, batch, config.softmax_scale).flatten(1)
    hidden = (hidden.float() + ranks.sum(ops.linear(attended, weights.o_proj))).to(dtype)

    x = ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    product = ops.silu_mul(ops.linear(x, weights.gate_proj), ops.linear(x, weights.up_proj), dtype)
    return (hidden.float() + ranks.sum(ops.linear(product, weights.down_proj))).to(dtype)
