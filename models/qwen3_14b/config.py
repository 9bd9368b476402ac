"""The dense Qwen3, from its `config.json` or by the name of a family member."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haarkv.models.config import ModelConfig, Norm, dense_layers
from haarkv.models.hf_config import HFConfig, read_rope


def read_config(file: HFConfig) -> ModelConfig:
    """The declaration of a model, from its `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (attention biases), by name.
    """
    file.refuse({"attention biases": file.flag("attention_bias")})
    rope = read_rope(file, file.count("max_position_embeddings"))
    attention = file.attention(rope, head_norms=True)
    return file.model(file.plain_layers(attention, late_windows(file)), rope.positions)


def late_windows(file: HFConfig) -> list[int | None]:
    """Sliding windows as Qwen2 and Qwen3 have them: where they are switched on, of the layers from `max_window_layers` on."""
    layers = file.count("num_hidden_layers")
    window = file.raw.get("sliding_window", 4096) if file.flag("use_sliding_window") else None
    first = file.raw.get("max_window_layers", 28)
    is_local = [isinstance(first, int) and window is not None and index >= first for index in range(layers)]
    return file.windows(window, is_local)


def _member(
    layers: int, hidden_size: int, intermediate_size: int, num_heads: int = 16, num_kv_heads: int = 8, tied: bool = True
) -> ModelConfig:
    of_layers = dense_layers(
        layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, intermediate_size=intermediate_size,
        head_norms=True,
    )  # fmt: skip
    return ModelConfig(
        "qwen3", of_layers, hidden_size, vocab_size=151936, final_norm=Norm(1e-6), tied=tied, eos_token_ids=(151645, 151643)
    )


QWEN3_14B = _member(40, 5120, 17408, num_heads=40, tied=False)

SIZES: dict[str, ModelConfig] = {
    "0.6b": _member(28, 1024, 3072),
    "1.7b": _member(28, 2048, 6144),
    "4b": _member(36, 2560, 9728, num_heads=32),
    "8b": _member(36, 4096, 12288, num_heads=32, tied=False),
    "14b": QWEN3_14B,
    "32b": _member(64, 5120, 25600, num_heads=64, tied=False),
    "narrow": replace(_member(40, 256, 512, num_heads=2, num_kv_heads=1), vocab_size=1024, eos_token_ids=()),
}
"""Every dense Qwen3, by the word that `random:SIZE` takes; `narrow` is none: 40 layers that an interpreter runs in minutes."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    }
}
"""As of `models.base.Family`."""
