"""The tensors of a Qwen3 layer; those of its attention are also the MoE layer's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from haarkv.models import weights
from haarkv.models.weights import stored


@dataclass(frozen=True)
class AttentionWeights(weights.LayerWeights):
    """Everything before the MLP; projections are [out, in] as Hugging Face stores them."""

    input_norm: Tensor = stored("input_layernorm.weight", "hidden_size")
    q_proj: Tensor = stored("self_attn.q_proj.weight", "q_size", "hidden_size")
    k_proj: Tensor = stored("self_attn.k_proj.weight", "kv_size", "hidden_size")
    v_proj: Tensor = stored("self_attn.v_proj.weight", "kv_size", "hidden_size")
    q_norm: Tensor = stored("self_attn.q_norm.weight", "head_dim")
    k_norm: Tensor = stored("self_attn.k_norm.weight", "head_dim")
    o_proj: Tensor = stored("self_attn.o_proj.weight", "hidden_size", "q_size")
    post_norm: Tensor = stored("post_attention_layernorm.weight", "hidden_size")


@dataclass(frozen=True)
class LayerWeights(AttentionWeights):
    """One decoder layer."""

    gate_proj: Tensor = stored("mlp.gate_proj.weight", "intermediate_size", "hidden_size")
    up_proj: Tensor = stored("mlp.up_proj.weight", "intermediate_size", "hidden_size")
    down_proj: Tensor = stored("mlp.down_proj.weight", "hidden_size", "intermediate_size")
