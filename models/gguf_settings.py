"""Metadata of a GGUF file as the entries of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Rope, decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor
from haarkv.models.gguf_tokenizer import end_token_ids
from haarkv.models.rope import Llama3Scaling, inverse_frequencies
from haarkv.tq_ops.errors import InputError

MODEL_TYPES = {
    "llama": "llama",  # a Mistral as well
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
"""`model_type` by general.architecture; another has its own name, which is refused."""
_HYBRIDS = ("qwen35", "qwen35moe")
_ENTRIES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_HYBRID_ENTRIES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.group_count": "linear_num_key_heads",
    "full_attention_interval": "full_attention_interval",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
ROPE_FACTORS = "rope_freqs.weight"
_GEMMA_PATTERN, _GEMMA_LOCAL_BASE, _GEMMA_27B = 6, 1e4, 62
"""llama.cpp's defaults of a Gemma 3: every sixth layer is global, RoPE's base of the others, and the layers of the one member
that scales attention by hidden_size / heads."""


@dataclass(frozen=True)
class GGUFSettings:
    """Metadata of one file."""

    path: Path
    file: GGUFFile

    @property
    def architecture(self) -> str:
        return str(self.file.entries.get("general.architecture"))

    def setting(self, key: str, default: Any = None) -> Any:
        """An entry of the model's architecture."""
        return self.file.entries.get(f"{self.architecture}.{key}", default)

    def read(self) -> dict[str, Any]:
        """The entries of a `config.json`."""
        embedding = self.file.tensors.get("token_embd.weight")
        settings = {name: decimal(value) for key, name in _ENTRIES.items() if (value := self.setting(key)) is not None}
        settings["model_type"] = MODEL_TYPES.get(self.architecture, self.architecture)
        settings["vocab_size"] = embedding.shape[0] if embedding else self.setting("vocab_size")
        settings["tie_word_embeddings"] = "output.weight" not in self.file.tensors
        settings["attention_bias"] = settings["model_type"] != "qwen2" and "blk.0.attn_q.bias" in self.file.tensors
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in self.file.tensors
        settings["eos_token_id"] = end_token_ids(self.file.entries)
        self._add_shapes(settings)
        settings |= scaling_entries(self.path, self.architecture, self.file.entries)
        if (factors := self.file.tensors.get(ROPE_FACTORS)) is not None:
            settings |= self._llama3(factors, settings)
        if self.architecture in _HYBRIDS:
            self._add_hybrid(settings)
        if settings["model_type"] == "gemma3_text":
            self._add_gemma(settings)
        elif window := settings.get("sliding_window"):
            if self.architecture != "llama":
                name = f"{self.architecture} with a sliding window of {shown(window)}"
                raise InputError(f"{self.path}: {name}, and the file does not say of which layers; none is read")
            settings["model_type"] = "mistral"  # llama.cpp calls a Mistral a llama
        return settings

    def _add_shapes(self, settings: dict[str, Any]) -> None:
        """Defaults of entries that a file may leave out."""
        heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
        settings.setdefault("num_key_value_heads", heads)
        settings.setdefault("rope_theta", 1e4)
        if isinstance(heads, int) and isinstance(hidden, int) and heads:
            settings.setdefault("head_dim", hidden // heads)
        dim, rope_dims = settings.get("head_dim"), self.setting("rope.dimension_count")
        if (width := self.setting("attention.value_length", dim)) != dim:
            raise InputError(
                f"{self.path}: heads of V have {shown(width)} channels and those of K {shown(dim)}; none is built"
            )
        if isinstance(rope_dims, int) and isinstance(dim, int) and dim:
            settings["partial_rotary_factor"] = rope_dims / dim
        if self.architecture == "qwen3moe":
            settings["norm_topk_prob"] = self.setting("expert_weights_norm", True)
        elif self.architecture not in _HYBRIDS and settings.pop("num_experts", None):
            settings["model_type"] += " with experts"

    def _llama3(self, factors: GGUFTensor, settings: Mapping[str, Any]) -> dict[str, Any]:
        dim, theta = settings.get("head_dim"), settings["rope_theta"]
        if factors.fault is not None:
            raise InputError(f"{self.path}: {ROPE_FACTORS} {factors.fault}")
        if factors.shape != (dim // 2 if isinstance(dim, int) else None,) or not isinstance(theta, float):
            raise InputError(f"{self.path}: {ROPE_FACTORS} has shape {list(factors.shape)}, heads have {shown(dim)} channels")
        return llama3_entries(self.path, self.file.read(factors, torch.float32), theta)

    def _add_hybrid(self, settings: dict[str, Any]) -> None:
        """Entries of DeltaNet, and the number of layers without drafting ones."""
        settings |= {name: value for key, name in _HYBRID_ENTRIES.items() if (value := self.setting(key)) is not None}
        inner, heads = self.setting("ssm.inner_size"), settings.get("linear_num_value_heads")
        if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
            settings["linear_value_head_dim"] = inner // heads
        layers, ahead = settings.get("num_hidden_layers"), self.setting("nextn_predict_layers")
        if isinstance(layers, int) and isinstance(ahead, int) and 0 < ahead < layers:
            settings["num_hidden_layers"] = layers - ahead

    def _add_gemma(self, settings: dict[str, Any]) -> None:
        layers, window = settings.get("num_hidden_layers"), settings.get("sliding_window")
        every = self.setting("attention.sliding_window_pattern", _GEMMA_PATTERN) if window else 1
        if isinstance(layers, int) and 0 < layers < 2**10:
            if isinstance(every, list):
                local = [bool(is_local) for is_local in every]
            elif isinstance(every, int) and every > 0:
                local = [bool((index + 1) % every) for index in range(layers)]
            else:
                raise InputError(f"{self.path}: sliding_window_pattern {shown(every)} is neither a number nor a list")
            settings["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]
        settings["hidden_activation"] = settings["hidden_act"] = "gelu_pytorch_tanh"
        settings["rope_local_base_freq"] = decimal(self.setting("rope.freq_base_swa", _GEMMA_LOCAL_BASE))
        settings["final_logit_softcapping"] = self.setting("final_logit_softcapping")
        scale = settings.get("head_dim")
        if layers == _GEMMA_27B and all(isinstance(settings.get(key), int) for key in ("hidden_size", "num_attention_heads")):
            scale = settings["hidden_size"] // max(1, settings["num_attention_heads"])
        settings["query_pre_attn_scalar"] = scale


_KEYS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_NEUTRAL = {"finetuned": None, "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Further keys and the value with which each changes nothing; None: any."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3; their factors differ."""
_LEAST_ERROR = 1e-4


def scaling_entries(path: Path, architecture: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, if a file has one; keys that are not built are refused."""
    prefix = f"{architecture}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
    factor = scaling.pop("factor", None) or entries.get(f"{architecture}.rope.scale_linear")
    kind = scaling.pop("type", "linear" if factor else "none")  # llama.cpp's own default
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return {}
    rope_scaling: dict[str, Any] = {"rope_type": kind} | ({} if factor is None else {"factor": factor})
    for key, value in scaling.items():
        if key in _KEYS:
            rope_scaling[_KEYS[key]] = value
        elif key not in _NEUTRAL or _NEUTRAL[key] not in (None, value):
            raise InputError(f"{path}: {prefix}{key} is {shown(value)}, which this project does not build")
    return {"rope_scaling": rope_scaling}


def llama3_entries(path: Path, divisors: Tensor, theta: float) -> dict[str, Any]:
    """`rope_scaling` of a Llama 3 from the divisors [dims / 2] of its frequencies; other divisors are refused."""
    plain, largest = inverse_frequencies(Rope(theta, 2 * len(divisors))), float(divisors.max())
    if largest == 1.0 == float(divisors.min()):
        return {}
    scaling = Llama3Scaling(largest, *_LLAMA3.values())  # type: ignore[arg-type]
    if bool(((plain / scaling.scaled(plain, theta) / divisors - 1).abs() <= _LEAST_ERROR).all()):
        return {"rope_scaling": {"rope_type": "llama3", "factor": largest, **_LLAMA3}}
    raise InputError(f"{path}: rope_freqs.weight holds factors that are none of Llama 3's RoPE, the one that is built")
