"""Shapes of a Qwen3 with experts, read from its `config.json` or by the name of a family member."""

from __future__ import annotations

from dataclasses import replace

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_config import HFConfig
from haarkv.tq_ops.errors import InputError

SIZES: dict[str, DecoderConfig] = {
    "30b-a3b": DecoderConfig(
        model_type="qwen3_moe", hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, vocab_size=151936, eos_token_ids=(151645, 151643), num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "235b-a22b": DecoderConfig(
        model_type="qwen3_moe", hidden_size=4096, num_layers=94, num_heads=64, num_kv_heads=4, head_dim=128,
        intermediate_size=12288, vocab_size=151936, eos_token_ids=(151645, 151643), num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1536, norm_topk_prob=True,
    ),
}  # fmt: skip
"""Published members, by the word that `random:SIZE` takes."""


def read_config(file: HFConfig) -> DecoderConfig:
    """Shapes from a `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (sliding windows, biases, dense layers among those
            with experts), by name.
    """
    file.refuse(
        {
            "sliding-window attention": file.flag("use_sliding_window") or file.windowed(),
            "attention biases": file.flag("attention_bias"),
            "dense layers among those with experts": file.raw.get("mlp_only_layers")
            or file.raw.get("decoder_sparse_step", 1) != 1,
        }
    )
    # transformers 5 writes num_local_experts for what Qwen's own files call num_experts.
    experts = file.count("num_experts" if file.raw.get("num_experts") is not None else "num_local_experts", 128)
    chosen = file.count("num_experts_per_tok", 8)
    if chosen > experts:
        raise InputError(f"{file.path}: a token cannot go through {chosen} of {experts} experts")
    head_dim = file.count("hidden_size") // file.count("num_attention_heads")
    return replace(
        file.decoder(head_dim=head_dim, num_kv_heads=4, max_positions=32768),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=file.count("moe_intermediate_size"),
        norm_topk_prob=file.flag("norm_topk_prob"),
    )
