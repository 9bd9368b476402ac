"""What a GGUF file says of its model, as the entries of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch

from haarkv.models import gguf_hybrid
from haarkv.models.config import decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor
from haarkv.models.gguf_rope import llama3_entries, scaling_entries
from haarkv.models.gguf_words import ends_of
from haarkv.tq_ops.errors import InputError

MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text",
    "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe",
}  # fmt: skip
"""`model_type` by general.architecture; any other is refused by its own name, as of a folder."""
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
ROPE_FACTORS = "rope_freqs.weight"
_GEMMA_PATTERN, _GEMMA_LOCAL_BASE, _GEMMA_27B = 6, 1e4, 62
"""What llama.cpp takes where a Gemma 3 does not say it: every sixth layer sees all tokens, RoPE's base of the others, and the
layers of the one member whose attention is scaled by another number than its head's."""


@dataclass(frozen=True)
class GGUFSettings:
    """The entries of one file."""

    path: Path
    file: GGUFFile

    @property
    def architecture(self) -> str:
        return str(self.file.entries.get("general.architecture"))

    def said(self, key: str, default: Any = None) -> Any:
        """An entry of the model's architecture."""
        return self.file.entries.get(f"{self.architecture}.{key}", default)

    def read(self) -> dict[str, Any]:
        """The entries of a `config.json`, for the family to judge."""
        embedding = self.file.tensors.get("token_embd.weight")
        found = {name: decimal(value) for key, name in _ENTRIES.items() if (value := self.said(key)) is not None}
        found["model_type"] = MODEL_TYPES.get(self.architecture, self.architecture)
        found["vocab_size"] = embedding.shape[0] if embedding else self.said("vocab_size")
        found["tie_word_embeddings"] = "output.weight" not in self.file.tensors
        found["attention_bias"] = found["model_type"] != "qwen2" and "blk.0.attn_q.bias" in self.file.tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in self.file.tensors
        found["eos_token_id"] = ends_of(self.file.entries)
        self._add_shapes(found)
        found |= scaling_entries(self.path, self.architecture, self.file.entries)
        if (factors := self.file.tensors.get(ROPE_FACTORS)) is not None:
            found |= self._llama3(factors, found)
        if self.architecture in gguf_hybrid.ARCHITECTURES:
            found |= gguf_hybrid.entries(self.said, found)
        if found["model_type"] == "gemma3_text":
            self._add_gemma(found)
        elif window := found.get("sliding_window"):
            if self.architecture != "llama":
                name = f"{self.architecture} with a sliding window of {shown(window)}"
                raise InputError(f"{self.path}: {name}, and the file does not say of which layers; none is read")
            found["model_type"] = "mistral"  # llama.cpp calls a Mistral a llama
        return found

    def _add_shapes(self, found: dict[str, Any]) -> None:
        """What a file may leave out and a `config.json` may not."""
        heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
        found.setdefault("num_key_value_heads", heads)
        found.setdefault("rope_theta", 1e4)
        if isinstance(heads, int) and isinstance(hidden, int) and heads:
            found.setdefault("head_dim", hidden // heads)
        dim, rotated = found.get("head_dim"), self.said("rope.dimension_count")
        if (width := self.said("attention.value_length", dim)) != dim:
            raise InputError(
                f"{self.path}: heads of V have {shown(width)} channels and those of K {shown(dim)}; none is built"
            )
        if isinstance(rotated, int) and isinstance(dim, int) and dim:
            found["partial_rotary_factor"] = rotated / dim
        if self.architecture == "qwen3moe":
            found["norm_topk_prob"] = self.said("expert_weights_norm", True)
        elif self.architecture not in gguf_hybrid.ARCHITECTURES and found.pop("num_experts", None):
            found["model_type"] += " with experts"

    def _llama3(self, factors: GGUFTensor, found: Mapping[str, Any]) -> dict[str, Any]:
        dim, theta = found.get("head_dim"), found["rope_theta"]
        if factors.fault is not None:
            raise InputError(f"{self.path}: {ROPE_FACTORS} {factors.fault}")
        if factors.shape != (dim // 2 if isinstance(dim, int) else None,) or not isinstance(theta, float):
            raise InputError(f"{self.path}: {ROPE_FACTORS} has shape {list(factors.shape)}, heads have {shown(dim)} channels")
        return llama3_entries(self.path, self.file.read(factors, torch.float32), theta)

    def _add_gemma(self, found: dict[str, Any]) -> None:
        layers, window = found.get("num_hidden_layers"), found.get("sliding_window")
        every = self.said("attention.sliding_window_pattern", _GEMMA_PATTERN) if window else 1
        if isinstance(layers, int) and 0 < layers < 2**10:
            if isinstance(every, list):
                local = [bool(is_local) for is_local in every]
            elif isinstance(every, int) and every > 0:
                local = [bool((index + 1) % every) for index in range(layers)]
            else:
                raise InputError(f"{self.path}: sliding_window_pattern {shown(every)} is neither a number nor a list")
            found["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]
        found["hidden_activation"] = found["hidden_act"] = "gelu_pytorch_tanh"
        found["rope_local_base_freq"] = decimal(self.said("rope.freq_base_swa", _GEMMA_LOCAL_BASE))
        found["final_logit_softcapping"] = self.said("final_logit_softcapping")
        scale = found.get("head_dim")
        if layers == _GEMMA_27B and all(isinstance(found.get(key), int) for key in ("hidden_size", "num_attention_heads")):
            scale = found["hidden_size"] // max(1, found["num_attention_heads"])
        found["query_pre_attn_scalar"] = scale
