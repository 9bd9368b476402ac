"""A Llama, Mistral or Qwen2, from its `config.json`."""

from __future__ import annotations

from typing import Any

from haarkv.models.config import ModelConfig, Norm, dense_layers
from haarkv.models.hf_config import HFConfig, read_rope
from haarkv.models.qwen3_14b.config import late_windows


def _member(
    layers: int, hidden_size: int, intermediate_size: int, num_heads: int = 32, head_dim: int = 128, tied: bool = True
) -> ModelConfig:
    of_layers = dense_layers(
        layers, num_heads=num_heads, num_kv_heads=8, head_dim=head_dim, intermediate_size=intermediate_size, rope_theta=5e5,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    return ModelConfig(
        "llama", of_layers, hidden_size, vocab_size=128256, final_norm=Norm(1e-5), tied=tied, max_position_embeddings=131072
    )


SIZES: dict[str, ModelConfig] = {
    "llama-1b": _member(16, 2048, 8192, head_dim=64),
    "llama-3b": _member(28, 3072, 8192, num_heads=24),
    "llama-8b": _member(32, 4096, 14336, tied=False),
}
"""Llama 3.1 and 3.2, by the word that `random:SIZE` takes; their scaled RoPE is left out, which costs nothing."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}
"""As of `models.base.Family`."""


def read_config(file: HFConfig) -> ModelConfig:
    """The declaration of a model, from its `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (biases of Llama), by name.
    """
    model_type = file.raw["model_type"]
    file.refuse({"attention biases": file.flag("attention_bias"), "MLP biases": file.flag("mlp_bias")})
    rope = read_rope(file, file.count("max_position_embeddings"))
    attention = file.attention(rope, bias=model_type == "qwen2")
    return file.model(file.plain_layers(attention, _windows(file)), rope.positions)


def _windows(file: HFConfig) -> list[int | None]:
    """Of each layer: Mistral's are in all layers, Qwen2's in the late ones, Llama has none."""
    layers, model_type = file.count("num_hidden_layers"), file.raw["model_type"]
    if model_type == "qwen2":
        return late_windows(file)
    return file.windows(file.raw.get("sliding_window"), [model_type == "mistral"] * layers)
