"""Shapes of a Llama, Mistral or Qwen2, read from its `config.json`."""

from __future__ import annotations

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_config import HFConfig

SIZES: dict[str, DecoderConfig] = {}
"""No member is made by `random:SIZE`."""


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
