"""Shapes of a Llama, Mistral or Qwen2, read from its `config.json`."""

from __future__ import annotations

from dataclasses import replace

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_config import HFConfig

_LLAMA_8B = DecoderConfig(
    model_type="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14336,
    vocab_size=128256, rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=131072,
)  # fmt: skip

SIZES: dict[str, DecoderConfig] = {
    "llama-1b": replace(
        _LLAMA_8B, hidden_size=2048, num_layers=16, head_dim=64, intermediate_size=8192, tie_word_embeddings=True
    ),
    "llama-3b": replace(
        _LLAMA_8B, hidden_size=3072, num_layers=28, num_heads=24, intermediate_size=8192, tie_word_embeddings=True
    ),
    "llama-8b": _LLAMA_8B,
}
"""Llama 3.1 and 3.2, by the word that `random:SIZE` takes; their scaled RoPE is left out, which costs nothing."""


def read_config(file: HFConfig) -> DecoderConfig:
    """Shapes from a `config.json`; defaults are those of transformers' config of the same `model_type`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (sliding windows, biases of Llama), by name.
    """
    model_type = file.raw["model_type"]
    config = file.decoder(
        head_dim=file.count("hidden_size") // file.count("num_attention_heads"),
        num_kv_heads={"llama": None, "mistral": 8, "qwen2": 32}[model_type],
        max_positions={"llama": 2048, "mistral": 131072, "qwen2": 32768}[model_type],
        qkv_bias=model_type == "qwen2",
    )
    file.refuse(
        {
            "sliding-window attention": _slides(file, config.max_position_embeddings) or file.windowed(),
            "attention biases": file.flag("attention_bias"),
            "MLP biases": file.flag("mlp_bias"),
        }
    )
    return config


def _slides(file: HFConfig, positions: int) -> bool:
    """Whether some token would not see all before it. A window as wide as the context hides nothing.

    Args:
        positions: that the model may be run with, YaRN's included.
    """
    if file.raw["model_type"] == "mistral":
        window = file.raw.get("sliding_window", 4096)
    else:
        window = file.raw.get("sliding_window", 4096) if file.flag("use_sliding_window") else None
    return window is not None and not (isinstance(window, int) and window >= positions)
