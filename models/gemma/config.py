"""A Gemma 1 or the text model of a Gemma 3, from its `config.json`.

Both store norms as w and multiply with 1 + w, gate by GELU and scale embeddings by sqrt(hidden). Gemma 3 also norms each head
of Q and K, and what attention and the MLP give; of six layers five see a window and turn by a base of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.hf_config import FoundRope, HFConfig, read_rope

_LOCAL_THETA = 1e4
_LOCAL = "sliding_attention"
_GELU = ("gelu_pytorch_tanh", "gelu_new")
"""Names of GELU by its tanh."""


def _layers(count: int, attention: Attention, window: int, width: int) -> tuple[Layer, ...]:
    """Gemma 3's, five with a window to one without."""
    every = Layer(attention, Dense(width, "gelu_tanh"), Norm(1e-6, plus_one=True), norms_behind=True)
    local = replace(every, mixer=replace(attention, window=window, rope=Rope(_LOCAL_THETA, attention.head_dim)))
    return tuple(every if index % 6 == 5 else local for index in range(count))


def _member(count: int, hidden_size: int, width: int, num_heads: int, window: int) -> ModelConfig:
    attention = Attention(num_heads, 1, 256, Rope(1e6, 256), 256**-0.5, head_norms=True)
    return ModelConfig(
        "gemma3_text", _layers(count, attention, window, width), hidden_size, 262144, Norm(1e-6, plus_one=True),
        embedding_scale=hidden_size**0.5, tied=True, max_position_embeddings=32768, eos_token_ids=(1, 106),
    )  # fmt: skip


SIZES: dict[str, ModelConfig] = {
    "gemma-270m": _member(18, 640, 2048, num_heads=4, window=512),
    "gemma-1b": _member(26, 1152, 6912, num_heads=4, window=512),
}
"""Gemma 3 without vision, by the word that `random:SIZE` takes."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
}
"""As of `models.base.Family`."""


def read_config(file: HFConfig) -> ModelConfig:
    """The declaration of a model, from its `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (capped logits, biases, attention both ways), by
            name.
    """
    third = file.raw["model_type"] == "gemma3_text"
    default_act = file.raw.get("hidden_act") if not third else None
    act = file.raw.get("hidden_activation") or default_act or _GELU[0]
    file.refuse(
        {
            "attention biases": file.flag("attention_bias"),
            "attention to later tokens": file.raw.get("use_bidirectional_attention"),
            "capped logits": file.raw.get("attn_logit_softcapping") or file.raw.get("final_logit_softcapping"),
            f"activation {act}": act not in _GELU and not (act == "gelu" and not third),
        }
    )
    norm = Norm(file.number("rms_norm_eps", 1e-6), plus_one=True)
    rope = read_rope(file, file.count("max_position_embeddings"), 1e6 if third else 1e4, "full_attention")
    attention = file.attention(rope, head_norms=third)
    if third:
        attention = replace(attention, scale=file.number("query_pre_attn_scalar") ** -0.5)
    layer = Layer(attention, Dense(file.count("intermediate_size"), "gelu_tanh"), norm, norms_behind=third)
    count = file.count("num_hidden_layers")
    layers = _windowed(file, layer, count) if third else (layer,) * count
    return file.model(layers, rope.positions, embedding_scale=file.count("hidden_size") ** 0.5)


def _windowed(file: HFConfig, layer: Layer, count: int) -> tuple[Layer, ...]:
    pattern = file.count("sliding_window_pattern", file.count("_sliding_window_pattern", 6))
    windows = file.windows(file.raw.get("sliding_window"), [(index + 1) % pattern != 0 for index in range(count)])
    rope = _local_rope(file).on(layer.attention.head_dim)
    return tuple(
        layer if window is None else replace(layer, mixer=replace(layer.attention, window=window, rope=rope))
        for window in windows
    )


def _local_rope(file: HFConfig) -> FoundRope:
    """Of the layers with a window. `rope_theta` and `rope_scaling` beside `rope_parameters` are of the others."""
    positions = file.count("max_position_embeddings")
    if file.part("rope_parameters").part(_LOCAL).raw:
        own = {name: value for name, value in file.raw.items() if name not in ("rope_theta", "rope_scaling")}
        return read_rope(replace(file, raw=own), positions, _LOCAL_THETA, _LOCAL)
    return FoundRope(file.number("rope_local_base_freq", _LOCAL_THETA), None, positions)
