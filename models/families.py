"""Families of models by `model_type`: how each reads a `config.json`, its defaults, and published members.

Gemma stores norms as w of 1 + w, gates by GELU and scales embeddings by sqrt(hidden). Gemma 3 also norms heads of Q and K and
the outputs of attention and MLP; five of six layers have a window and a RoPE base of their own.

Qwen3.5 and Qwen3-Next: of four layers three are Gated DeltaNet, one is gated attention with normed heads and RoPE on a quarter
of each. Norms but DeltaNet's are stored as w of 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from haarkv.models.config import Dense, Experts, Layer, ModelConfig, Norm
from haarkv.models.hf_config import FULL, FoundRope, HFConfig, read_rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.errors import InputError

_LOCAL_THETA, _LOCAL = 1e4, "sliding_attention"
_GELU = ("gelu_pytorch_tanh", "gelu_new")
"""Names of tanh GELU."""
_NEXT = "qwen3_next"
_LINEAR = "linear_attention"
_DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
_EVERY = 4
"""One layer in four is attention."""
_PART = 0.25
"""Rotated fraction of each head."""


@dataclass(frozen=True)
class Family:
    """A `model_type`: the reader of its `config.json`, and the defaults of transformers' config class."""

    read_config: Callable[[HFConfig], ModelConfig]
    defaults: Mapping[str, Any]


def read_qwen3(file: HFConfig) -> ModelConfig:
    """Qwen3, dense or with experts."""
    moe = file.raw["model_type"] == "qwen3_moe"
    file.refuse({"attention biases": file.flag("attention_bias")})
    mlp = file.experts(normalized=file.flag("norm_topk_prob")) if moe else None
    rope = read_rope(file, file.count("max_position_embeddings"))
    layers = file.plain_layers(file.attention(rope, head_norms=True), _late_windows(file, 0 if moe else 28))
    return file.model(tuple(replace(layer, mlp=mlp) if mlp else layer for layer in layers), rope.positions)


def read_llama(file: HFConfig) -> ModelConfig:
    """Llama 2 and 3, Mistral, Qwen2 and Qwen2.5. Mistral's windows are in all layers, Qwen2's in the late ones."""
    kind = file.raw["model_type"]
    file.refuse({"attention biases": file.flag("attention_bias"), "MLP biases": file.flag("mlp_bias")})
    rope = read_rope(file, file.count("max_position_embeddings"))
    attention = file.attention(rope, bias=kind == "qwen2")
    if kind == "qwen2":
        windows = _late_windows(file)
    else:
        windows = file.windows(file.raw.get("sliding_window"), [kind == "mistral"] * file.count("num_hidden_layers"))
    return file.model(file.plain_layers(attention, windows), rope.positions)


def _late_windows(file: HFConfig, default_first: int = 28) -> list[int | None]:
    """Qwen's sliding windows, of the layers from `max_window_layers` on."""
    layers = file.count("num_hidden_layers")
    window = file.raw.get("sliding_window", 4096) if file.flag("use_sliding_window") else None
    first = file.raw.get("max_window_layers", default_first) if default_first else 0
    is_local = [isinstance(first, int) and window is not None and index >= first for index in range(layers)]
    return file.windows(window, is_local)


def read_gemma(file: HFConfig) -> ModelConfig:
    """Gemma 1, and the text models of Gemma 3."""
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
    layer = Layer(attention, Dense(file.count("intermediate_size"), "gelu_tanh"), norm, post_norms=third)
    layers = _with_local(file, layer) if third else (layer,) * file.count("num_hidden_layers")
    return file.model(layers, rope.positions, embedding_scale=file.count("hidden_size") ** 0.5)


def _with_local(file: HFConfig, layer: Layer) -> tuple[Layer, ...]:
    """Gemma 3's layers, global and local."""
    pattern = file.count("sliding_window_pattern", file.count("_sliding_window_pattern", 6))
    is_local = [(index + 1) % pattern != 0 for index in range(file.count("num_hidden_layers"))]
    rope = _local_rope(file).on(layer.attention.head_dim)
    return tuple(
        layer if window is None else replace(layer, mixer=replace(layer.attention, window=window, rope=rope))
        for window in file.windows(file.raw.get("sliding_window"), is_local)
    )


def _local_rope(file: HFConfig) -> FoundRope:
    """RoPE of local layers; `rope_theta` and `rope_scaling` beside `rope_parameters` are of global ones."""
    positions = file.count("max_position_embeddings")
    if file.part("rope_parameters").part(_LOCAL).raw:
        local_entries = {name: value for name, value in file.raw.items() if name not in ("rope_theta", "rope_scaling")}
        return read_rope(replace(file, raw=local_entries), positions, _LOCAL_THETA, _LOCAL)
    return FoundRope(file.number("rope_local_base_freq", _LOCAL_THETA), None, positions)


def read_hybrid(file: HFConfig) -> ModelConfig:
    """The text model of a Qwen3.5, or a Qwen3-Next."""
    act = file.raw.get("hidden_act", "silu")
    file.refuse(
        {
            "attention biases": file.flag("attention_bias"),
            "attention without output gates": file.raw.get("attn_output_gate") is False,
            f"activation {shown(act)}": act != "silu",
        }
    )
    rope = read_rope(file, file.count("max_position_embeddings"), default_part=_PART)
    attention = file.attention(rope, head_norms=True, gated=True)
    norm = Norm(file.number("rms_norm_eps", 1e-6), plus_one=True)
    count, every, kind = file.count("num_hidden_layers"), file.count("full_attention_interval", _EVERY), file.raw["model_type"]
    by_rule = [_LINEAR if (index + 1) % every else FULL for index in range(count)]
    delta, mlp = _delta(file), Dense(file.count("intermediate_size")) if kind in _DENSE_TYPES else _experts(file)
    kinds = file.layer_kinds(count, FULL, _LINEAR) or by_rule
    return file.model(
        tuple(Layer(delta if layer_kind == _LINEAR else attention, mlp, norm) for layer_kind in kinds), rope.positions
    )


def _experts(file: HFConfig) -> Experts:
    sums_to_one = file.raw["model_type"] != _NEXT or file.raw.get("norm_topk_prob") is None or file.flag("norm_topk_prob")
    return file.experts(normalized=sums_to_one, shared=file.count("shared_expert_intermediate_size"))


def _delta(file: HFConfig) -> DeltaNet:
    keys, values = file.count("linear_num_key_heads"), file.count("linear_num_value_heads")
    if values % keys:
        raise InputError(f"{file.path}: {values} heads of V cannot share {keys} heads of K evenly")
    taps = file.count("linear_conv_kernel_dim")
    file.refuse({"a convolution of a single token": taps < 2})
    sizes = file.count("linear_key_head_dim"), file.count("linear_value_head_dim")
    return DeltaNet(keys, values, *sizes, taps, by_key_head=file.raw["model_type"] == _NEXT)


# -- Members and defaults --------------------------------------------------------------------------------------------------


def _defaults(
    vocab: int, hidden: int, width: int | None, layers: int, heads: int, positions: int, **more: object
) -> Mapping[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": positions, **more,
    }  # fmt: skip


_DELTA = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_SHARED = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN3_5 = Family(read_hybrid, _defaults(248320, 4096, 12288, 32, 16, 32768, num_key_value_heads=4, **_DELTA))
_QWEN3_5_MOE = Family(
    read_hybrid, _defaults(248320, 2048, None, 40, 16, 32768, num_experts=256, num_experts_per_tok=8, **_SHARED, **_DELTA)
)
FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        read_qwen3, _defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32, head_dim=128)
    ),
    "qwen3_moe": Family(
        read_qwen3,
        _defaults(151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, num_local_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=768),
    ),
    "llama": Family(read_llama, _defaults(32000, 4096, 11008, 32, 32, 2048)),
    "mistral": Family(
        read_llama, _defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096)
    ),
    "qwen2": Family(read_llama, _defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)),
    "gemma": Family(
        read_gemma,
        _defaults(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16, head_dim=256, tie_word_embeddings=True),
    ),
    "gemma3_text": Family(
        read_gemma,
        _defaults(262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True,
                  sliding_window=4096, query_pre_attn_scalar=256),
    ),
    **dict.fromkeys(_DENSE_TYPES, _QWEN3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5_MOE),
    _NEXT: Family(
        read_hybrid,
        _defaults(151936, 2048, None, 48, 16, 32768, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, **_SHARED,
                  **_DELTA),
    ),
}  # fmt: skip
"""Every family that is built, by `model_type`."""


def _size(
    model_type: str, layers: int, hidden: int, width: int, heads: int, kv_heads: int, more: Mapping[str, Any]
) -> ModelConfig:
    settings = {
        **FAMILIES[model_type].defaults, "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more,
    }  # fmt: skip
    return FAMILIES[model_type].read_config(HFConfig(Path(model_type), settings))


_TIED_EMBEDDINGS = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6, "eos_token_id": [151645, 151643]}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "norm_topk_prob": True}
_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_GEMMA = {
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "sliding_window": 512,
    "eos_token_id": [1, 106],
}
_HYBRID = {"max_position_embeddings": 262144, "rope_theta": 1e7, "eos_token_id": [248046, 248044]}
SIZES: dict[str, ModelConfig] = {
    "0.6b": _size("qwen3", 28, 1024, 3072, 16, 8, _QWEN3 | _TIED_EMBEDDINGS),
    "1.7b": _size("qwen3", 28, 2048, 6144, 16, 8, _QWEN3 | _TIED_EMBEDDINGS),
    "4b": _size("qwen3", 36, 2560, 9728, 32, 8, _QWEN3 | _TIED_EMBEDDINGS),
    "8b": _size("qwen3", 36, 4096, 12288, 32, 8, _QWEN3),
    "14b": _size("qwen3", 40, 5120, 17408, 40, 8, _QWEN3),
    "32b": _size("qwen3", 64, 5120, 25600, 64, 8, _QWEN3),
    "narrow": _size("qwen3", 40, 256, 512, 2, 1, _QWEN3 | _TIED_EMBEDDINGS | {"vocab_size": 1024, "eos_token_id": []}),
    "30b-a3b": _size("qwen3_moe", 48, 2048, 768, 32, 4, _QWEN3_MOE | {"moe_intermediate_size": 768}),
    "235b-a22b": _size("qwen3_moe", 94, 4096, 1536, 64, 4, _QWEN3_MOE | {"moe_intermediate_size": 1536}),
    "llama-1b": _size("llama", 16, 2048, 8192, 32, 8, _LLAMA | _TIED_EMBEDDINGS),
    "llama-3b": _size("llama", 28, 3072, 8192, 24, 8, _LLAMA | _TIED_EMBEDDINGS),
    "llama-8b": _size("llama", 32, 4096, 14336, 32, 8, _LLAMA),
    "gemma-270m": _size("gemma3_text", 18, 640, 2048, 4, 1, _GEMMA),
    "gemma-1b": _size("gemma3_text", 26, 1152, 6912, 4, 1, _GEMMA),
    "qwen3.5-0.8b": _size("qwen3_5", 24, 1024, 3584, 8, 2, _HYBRID | _TIED_EMBEDDINGS | {"linear_num_value_heads": 16}),
    "qwen3.5-27b": _size("qwen3_5", 64, 5120, 17408, 24, 4, _HYBRID | {"linear_num_value_heads": 48}),
    "qwen3.5-35b-a3b": _size("qwen3_5_moe", 40, 2048, 0, 16, 2, _HYBRID),
    "qwen3-next": _size(_NEXT, 48, 2048, 0, 16, 2, _HYBRID | {"eos_token_id": [151645, 151643]}),
}
"""Published members, by the word that `random:SIZE` takes; `narrow` is none: 40 layers that an interpreter runs in minutes.
Llama 3.1 and 3.2 leave out their scaled RoPE, which costs nothing; Gemma 3 is without vision."""
