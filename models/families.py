"""Families of models by `model_type`: what the layers of each have, its defaults, and published members.

Gemma stores norms as w of 1 + w, gates by GELU and scales embeddings by sqrt(hidden). Gemma 3 also norms heads of Q and K and
the outputs of attention and MLP; five of six layers have a window and a RoPE base of their own.

Qwen3.5 and Qwen3-Next: of four layers three are Gated DeltaNet, one is gated attention with normed heads and RoPE on a quarter
of each. Norms but DeltaNet's are stored as w of 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.hf_config import FULL, HFConfig, read_rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.errors import InputError

_LOCAL_THETA, _LOCAL = 1e4, "sliding_attention"
_SILU, _GELU = ("silu",), ("gelu_pytorch_tanh", "gelu_new")
_NEXT = "qwen3_next"
_LINEAR = "linear_attention"
_EVERY = 4
"""One layer in four is attention."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A `model_type`: what its layers have beside sizes.

    Attributes:
        defaults: of transformers' config class. Where they name experts, a shared one or a scale of queries, layers have them.
        layers: all layers, from one with attention to all tokens.
        attention: fields of `Attention`.
        plus_one, post_norms: as in `Norm` and `Layer`.
        activations: names of SiLU, or of tanh GELU, with which embeddings are scaled; the default first.
        theta, rotated: RoPE's default base, and rotated fraction of each head; None refuses a fraction below 1.
    """

    defaults: Mapping[str, Any]
    layers: Callable[[HFConfig, Layer], tuple[Layer, ...]]
    attention: Mapping[str, bool] = field(default_factory=dict)
    plus_one: bool = False
    post_norms: bool = False
    activations: tuple[str, ...] = _SILU
    theta: float = 1e4
    rotated: float | None = None


def read_family(file: HFConfig) -> ModelConfig:
    """The model of a config whose `model_type` is in `FAMILIES`; a setting that is not built is refused."""
    family = FAMILIES[file.raw["model_type"]]
    is_gelu = family.activations != _SILU
    act = (file.raw.get("hidden_activation") if is_gelu else None) or file.raw.get("hidden_act") or family.activations[0]
    file.refuse(
        {
            "attention biases": file.flag("attention_bias"),
            "MLP biases": file.flag("mlp_bias"),
            "attention to later tokens": file.raw.get("use_bidirectional_attention"),
            "attention without output gates": file.raw.get("attn_output_gate") is False,
            "capped logits": file.raw.get("attn_logit_softcapping") or file.raw.get("final_logit_softcapping"),
            f"activation {shown(act)}": act not in family.activations,
        }
    )
    heads = file.count("num_attention_heads")
    dim = file.count("head_dim", file.count("hidden_size") // heads)
    rope, positions = read_rope(file, dim, family.theta, FULL, family.rotated)
    scale = (file.number("query_pre_attn_scalar") if "query_pre_attn_scalar" in family.defaults else dim) ** -0.5
    attention = Attention(heads, file.count("num_key_value_heads", heads), dim, rope, scale, **family.attention)
    if "moe_intermediate_size" in family.defaults:
        shared = file.count("shared_expert_intermediate_size") if "shared_expert_intermediate_size" in family.defaults else 0
        says = file.raw.get("norm_topk_prob") is not None
        mlp: Dense | Experts = file.experts(normalized=file.flag("norm_topk_prob") if says else shared > 0, shared=shared)
    else:
        mlp = Dense(file.count("intermediate_size"), "gelu_tanh" if is_gelu else "silu")
    norm = Norm(file.number("rms_norm_eps", 1e-6), plus_one=family.plus_one)
    layer = Layer(attention, mlp, norm, post_norms=family.post_norms)
    embedding_scale = file.count("hidden_size") ** 0.5 if is_gelu else 1.0
    return file.model(family.layers(file, layer), positions, embedding_scale)


def _all_or_none(file: HFConfig, layer: Layer) -> tuple[Layer, ...]:
    """Mistral's windows are in all layers."""
    is_local = [file.raw["model_type"] == "mistral"] * file.count("num_hidden_layers")
    return _in_windows(layer, file.windows(file.raw.get("sliding_window"), is_local))


def _late(file: HFConfig, layer: Layer) -> tuple[Layer, ...]:
    """Qwen's windows are in the layers from `max_window_layers` on, with experts in all."""
    window = file.raw.get("sliding_window", 4096) if file.flag("use_sliding_window") else None
    first = 0 if isinstance(layer.mlp, Experts) else file.raw.get("max_window_layers", 28)
    is_local = [
        isinstance(first, int) and window is not None and index >= first for index in range(file.count("num_hidden_layers"))
    ]
    return _in_windows(layer, file.windows(window, is_local))


def _in_windows(layer: Layer, windows: Sequence[int | None]) -> tuple[Layer, ...]:
    return tuple(replace(layer, mixer=replace(layer.attention, window=window)) for window in windows)


def _mostly_local(file: HFConfig, layer: Layer) -> tuple[Layer, ...]:
    """Gemma 3's layers, global and local."""
    pattern = file.count("sliding_window_pattern", file.count("_sliding_window_pattern", 6))
    is_local = [(index + 1) % pattern != 0 for index in range(file.count("num_hidden_layers"))]
    rope = _local_rope(file, layer.attention.head_dim)
    return tuple(
        layer if window is None else replace(layer, mixer=replace(layer.attention, window=window, rope=rope))
        for window in file.windows(file.raw.get("sliding_window"), is_local)
    )


def _local_rope(file: HFConfig, head_dim: int) -> Rope:
    """RoPE of local layers; `rope_theta` and `rope_scaling` beside `rope_parameters` are of global ones."""
    if file.part("rope_parameters").part(_LOCAL).raw:
        local_entries = {name: value for name, value in file.raw.items() if name not in ("rope_theta", "rope_scaling")}
        return read_rope(replace(file, raw=local_entries), head_dim, _LOCAL_THETA, _LOCAL)[0]
    return Rope(file.number("rope_local_base_freq", _LOCAL_THETA), head_dim)


def _mostly_states(file: HFConfig, layer: Layer) -> tuple[Layer, ...]:
    """Layers of Gated DeltaNet, and of attention."""
    count, every = file.count("num_hidden_layers"), file.count("full_attention_interval", _EVERY)
    by_rule = [_LINEAR if (index + 1) % every else FULL for index in range(count)]
    keys, values = file.count("linear_num_key_heads"), file.count("linear_num_value_heads")
    if values % keys:
        raise InputError(f"{file.path}: {values} heads of V cannot share {keys} heads of K evenly")
    taps = file.count("linear_conv_kernel_dim")
    file.refuse({"a convolution of a single token": taps < 2})
    sizes = file.count("linear_key_head_dim"), file.count("linear_value_head_dim")
    delta = replace(layer, mixer=DeltaNet(keys, values, *sizes, taps, by_key_head=file.raw["model_type"] == _NEXT))
    return tuple(delta if kind == _LINEAR else layer for kind in file.layer_kinds(count, FULL, _LINEAR) or by_rule)


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
_HEAD_NORMS = {"head_norms": True}
_HYBRID: dict[str, Any] = {
    "layers": _mostly_states,
    "attention": {"head_norms": True, "gated": True},
    "plus_one": True,
    "rotated": 0.25,
}
_QWEN3_5 = Family(defaults=_defaults(248320, 4096, 12288, 32, 16, 32768, num_key_value_heads=4, **_DELTA), **_HYBRID)
_QWEN3_5_MOE = Family(
    defaults=_defaults(248320, 2048, None, 40, 16, 32768, num_experts=256, num_experts_per_tok=8, **_SHARED, **_DELTA),
    **_HYBRID,
)
FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        defaults=_defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32, head_dim=128),
        layers=_late, attention=_HEAD_NORMS,
    ),
    "qwen3_moe": Family(
        defaults=_defaults(151936, 2048, 6144, 24, 32, 32768, num_key_value_heads=4, num_local_experts=128,
                           num_experts_per_tok=8, moe_intermediate_size=768),
        layers=_late, attention=_HEAD_NORMS,
    ),
    "llama": Family(defaults=_defaults(32000, 4096, 11008, 32, 32, 2048), layers=_all_or_none),
    "mistral": Family(
        defaults=_defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, sliding_window=4096),
        layers=_all_or_none,
    ),
    "qwen2": Family(
        defaults=_defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32), layers=_late, attention={"bias": True},
    ),
    "gemma": Family(
        defaults=_defaults(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16, head_dim=256, tie_word_embeddings=True),
        layers=_all_or_none, plus_one=True, activations=(*_GELU, "gelu"),
    ),
    "gemma3_text": Family(
        defaults=_defaults(262208, 2304, 9216, 26, 8, 131072, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True,
                           sliding_window=4096, query_pre_attn_scalar=256),
        layers=_mostly_local, attention=_HEAD_NORMS, plus_one=True, post_norms=True, activations=_GELU, theta=1e6,
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _QWEN3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5_MOE),
    _NEXT: Family(
        defaults=_defaults(151936, 2048, None, 48, 16, 32768, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True,
                           **_SHARED, **_DELTA),
        **_HYBRID,
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
    return read_family(HFConfig(Path(model_type), settings))


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
_LONG = {"max_position_embeddings": 262144, "rope_theta": 1e7, "eos_token_id": [248046, 248044]}
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
    "qwen3.5-0.8b": _size("qwen3_5", 24, 1024, 3584, 8, 2, _LONG | _TIED_EMBEDDINGS | {"linear_num_value_heads": 16}),
    "qwen3.5-27b": _size("qwen3_5", 64, 5120, 17408, 24, 4, _LONG | {"linear_num_value_heads": 48}),
    "qwen3.5-35b-a3b": _size("qwen3_5_moe", 40, 2048, 0, 16, 2, _LONG),
    "qwen3-next": _size(_NEXT, 48, 2048, 0, 16, 2, _LONG | {"eos_token_id": [151645, 151643]}),
}
"""Published members, by the word that `random:SIZE` takes; `narrow` is none: 40 layers that an interpreter runs in minutes.
Llama 3.1 and 3.2 leave out their scaled RoPE, which costs nothing; Gemma 3 is without vision."""
