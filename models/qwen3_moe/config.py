"""A Qwen3 with experts, from its `config.json` or by the name of a family member."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haarkv.models.config import Experts, Layer, ModelConfig, Norm, dense_layers
from haarkv.models.hf_config import HFConfig, read_rope
from haarkv.tq_ops.errors import InputError


def _member(layers: int, hidden_size: int, num_heads: int, expert_size: int) -> ModelConfig:
    of_layers = dense_layers(
        layers, num_heads=num_heads, num_kv_heads=4, head_dim=128, intermediate_size=expert_size, head_norms=True
    )
    experts = Experts(128, 8, expert_size, normalized=True)
    return ModelConfig(
        "qwen3_moe", _with_experts(of_layers, experts), hidden_size, vocab_size=151936, final_norm=Norm(1e-6),
        eos_token_ids=(151645, 151643),
    )  # fmt: skip


def _with_experts(layers: tuple[Layer, ...], experts: Experts) -> tuple[Layer, ...]:
    return tuple(replace(layer, mlp=experts) for layer in layers)


SIZES: dict[str, ModelConfig] = {
    "30b-a3b": _member(48, 2048, 32, 768),
    "235b-a22b": _member(94, 4096, 64, 1536),
}
"""Published members, by the word that `random:SIZE` takes."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
}
"""As of `models.base.Family`."""


def read_config(file: HFConfig) -> ModelConfig:
    """The declaration of a model, from its `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (biases, dense layers among those with experts), by
            name.
    """
    file.refuse(
        {
            "attention biases": file.flag("attention_bias"),
            "dense layers among those with experts": file.raw.get("mlp_only_layers")
            or file.raw.get("decoder_sparse_step", 1) != 1,
        }
    )
    # transformers 5 writes num_local_experts for what Qwen's own files call num_experts.
    experts = file.count("num_experts" if file.raw.get("num_experts") is not None else "num_local_experts")
    chosen = file.count("num_experts_per_tok")
    if chosen > experts:
        raise InputError(f"{file.path}: a token cannot go through {chosen} of {experts} experts")
    rope = read_rope(file, file.count("max_position_embeddings"))
    attention = file.attention(rope, head_norms=True)
    window = file.raw.get("sliding_window", 4096) if file.flag("use_sliding_window") else None
    layers = file.plain_layers(attention, file.windows(window, [True] * file.count("num_hidden_layers")))
    mlp = Experts(experts, chosen, file.count("moe_intermediate_size"), normalized=file.flag("norm_topk_prob"))
    return file.model(_with_experts(layers, mlp), rope.positions)
