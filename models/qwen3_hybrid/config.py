"""The text model of a Qwen3.5, or a Qwen3-Next, from its `config.json` or by the name of a family member.

Both store norms as w and multiply with 1 + w, all but DeltaNet's own. Their attention is gated, norms heads and turns a
quarter of each. A checkpoint may have layers that predict several tokens (MTP): as in transformers, those are not run.
"""

from __future__ import annotations

from reprlib import repr as shown
from typing import Any

from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.delta_net import DeltaNet
from haarkv.models.hf_config import HFConfig, read_rope
from haarkv.tq_ops.errors import InputError

_NEXT = "qwen3_next"
_FULL, _LINEAR = "full_attention", "linear_attention"
_EVERY = 4
"""One layer in this many attends."""
_PART = 0.25
"""Of each head that RoPE turns."""


def _layers(count: int, attention: Attention, delta: DeltaNet, mlp: Dense | Experts) -> tuple[Layer, ...]:
    norm = Norm(1e-6, plus_one=True)
    return tuple(Layer(delta if (index + 1) % _EVERY else attention, mlp, norm) for index in range(count))


def _member(
    model_type: str, count: int, hidden_size: int, mlp: Dense | Experts, *, heads: tuple[int, int], value_heads: int,
    tied: bool = False, vocab_size: int = 248320, eos: tuple[int, ...] = (248046, 248044),
) -> ModelConfig:  # fmt: skip
    attention = Attention(*heads, 256, Rope(1e7, 64), 256**-0.5, head_norms=True, gated=True)
    delta = DeltaNet(16, value_heads, 128, 128, by_key_head=model_type == _NEXT)
    return ModelConfig(
        model_type, _layers(count, attention, delta, mlp), hidden_size, vocab_size, Norm(1e-6, plus_one=True), tied=tied,
        max_position_embeddings=262144, eos_token_ids=eos,
    )  # fmt: skip


SIZES: dict[str, ModelConfig] = {
    "qwen3.5-0.8b": _member("qwen3_5", 24, 1024, Dense(3584), heads=(8, 2), value_heads=16, tied=True),
    "qwen3.5-27b": _member("qwen3_5", 64, 5120, Dense(17408), heads=(24, 4), value_heads=48),
    "qwen3.5-35b-a3b": _member(
        "qwen3_5_moe", 40, 2048, Experts(256, 8, 512, normalized=True, shared=512), heads=(16, 2), value_heads=32
    ),
    "qwen3-next": _member(
        _NEXT, 48, 2048, Experts(512, 10, 512, normalized=True, shared=512), heads=(16, 2), value_heads=32,
        vocab_size=151936, eos=(151645, 151643),
    ),
}  # fmt: skip
"""Published members, by the word that `random:SIZE` takes."""

_COMMON = {
    "num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32768, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DENSE = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4,
}  # fmt: skip
_MOE = {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}
_NEXT_MOE = {
    "vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _COMMON | _DENSE),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _COMMON | _EXPERTS | _MOE),
    _NEXT: _COMMON | _EXPERTS | _NEXT_MOE,
}
"""As of `models.base.Family`."""


def read_config(file: HFConfig) -> ModelConfig:
    """The declaration of a model, from its `config.json`.

    Raises:
        InputError: an entry that cannot be, or a feature that is not built (biases, attention without gates, dense layers
            among those with experts), by name.
    """
    act = file.raw.get("hidden_act", "silu")
    file.refuse(
        {
            "attention biases": file.flag("attention_bias"),
            "attention without output gates": file.raw.get("attn_output_gate") is False,
            f"activation {shown(act)}": act != "silu",
            "dense layers among those with experts": file.raw.get("mlp_only_layers")
            or file.raw.get("decoder_sparse_step", 1) != 1,
        }
    )
    moe = file.raw["model_type"] not in ("qwen3_5", "qwen3_5_text")
    rope = read_rope(file, file.count("max_position_embeddings"), default_part=_PART)
    attention = file.attention(rope, head_norms=True, gated=True)
    norm = Norm(file.number("rms_norm_eps", 1e-6), plus_one=True)
    delta, mlp = _delta(file), _experts(file) if moe else Dense(file.count("intermediate_size"))
    layers = tuple(Layer(delta if kind == _LINEAR else attention, mlp, norm) for kind in _kinds(file))
    return file.model(layers, rope.positions)


def _kinds(file: HFConfig) -> list[str]:
    """Of each layer, full_attention or linear_attention."""
    count, kinds = file.count("num_hidden_layers"), file.raw.get("layer_types")
    if kinds is None:
        every = file.count("full_attention_interval", _EVERY)
        return [_LINEAR if (index + 1) % every else _FULL for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise InputError(f"{file.path}: layer_types does not name the kind of each of {count} layers")
    file.refuse({f"layers of the type {shown(kind)}": kind not in (_FULL, _LINEAR) for kind in kinds})
    return kinds


def _delta(file: HFConfig) -> DeltaNet:
    keys, values = file.count("linear_num_key_heads"), file.count("linear_num_value_heads")
    if values % keys:
        raise InputError(f"{file.path}: {values} heads of V cannot share {keys} heads of K evenly")
    taps = file.count("linear_conv_kernel_dim")
    file.refuse({"a convolution of a single token": taps < 2})
    sizes = file.count("linear_key_head_dim"), file.count("linear_value_head_dim")
    return DeltaNet(keys, values, *sizes, taps, by_key_head=file.raw["model_type"] == _NEXT)


def _experts(file: HFConfig) -> Experts:
    count, chosen = file.count("num_experts"), file.count("num_experts_per_tok")
    if chosen > count:
        raise InputError(f"{file.path}: a token cannot go through {chosen} of {count} experts")
    normalized = file.raw["model_type"] != _NEXT or file.raw.get("norm_topk_prob") is None or file.flag("norm_topk_prob")
    width, shared = (file.count(key) for key in ("moe_intermediate_size", "shared_expert_intermediate_size"))
    return Experts(count, chosen, width, normalized=normalized, shared=shared)
