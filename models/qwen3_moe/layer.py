"""One Qwen3 decoder layer with experts, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.models.base import DecoderConfig
from haarkv.models.parallel import Ranks
from haarkv.models.qwen3_14b.layer import attention
from haarkv.models.qwen3_14b.weights import AttentionWeights
from haarkv.models.weights import TensorGroup, repeated, stored
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class Expert(TensorGroup):
    """One expert's MLP."""

    gate_proj: Tensor = stored("gate_proj.weight", "moe_intermediate_size", "hidden_size")
    up_proj: Tensor = stored("up_proj.weight", "moe_intermediate_size", "hidden_size")
    down_proj: Tensor = stored("down_proj.weight", "hidden_size", "moe_intermediate_size")


@dataclass(frozen=True)
class LayerWeights(AttentionWeights):
    """One decoder layer: a dense Qwen3's attention, a router [experts, hidden] and the experts."""

    router: Tensor = stored("mlp.gate.weight", "num_experts", "hidden_size")
    experts: tuple[Expert, ...] = repeated("mlp.experts", Expert, "num_experts")


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

    Rounding points: those of a dense Qwen3; the router's weights and the sum over a token's experts stay in FP32.
    """
    hidden = attention(hidden, weights, index, config=config, ops=ops, cache=cache, batch=batch, rope=rope, ranks=ranks)
    x = ops.rms_norm(hidden, weights.post_norm, config.rms_norm_eps)
    return (hidden.float() + ranks.sum(through_experts(x, weights, config, ops))).to(hidden.dtype)


def through_experts(x: Tensor, weights: LayerWeights, config: DecoderConfig, ops: OpTable) -> Tensor:
    """Each token [T, hidden] through its most likely experts, summed by the router's weights: [T, hidden] fp32.

        share = softmax(x @ router.T), the largest num_experts_per_tok of it;   out = sum(share_e * expert_e(x))

    An expert runs once, on the tokens that chose it. Each token's experts are summed in the experts' order: who else is in
    the batch does not matter.
    """
    share, chosen = ops.linear(x, weights.router).softmax(-1).topk(config.num_experts_per_tok)
    if config.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in sorted(set(chosen.flatten().tolist())):
        token, place = (chosen == index).nonzero(as_tuple=True)
        expert, gathered = weights.experts[index], x[token]
        product = ops.silu_mul(ops.linear(gathered, expert.gate_proj), ops.linear(gathered, expert.up_proj), x.dtype)
        out[token] += share[token, place, None] * ops.linear(product, expert.down_proj)
    return out
