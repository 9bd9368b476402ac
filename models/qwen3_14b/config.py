"""Shapes of a dense Qwen3, read from a Hugging Face `config.json` or by the name of a family member."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tq_ops.errors import InputError


@dataclass(frozen=True)
class Qwen3Config:
    """What the forward needs to know; the words are Hugging Face's.

    Attributes:
        head_dim: D, from the config and never hidden_size / num_heads.
        num_kv_heads: Hkv; each serves num_heads / num_kv_heads query heads.
        tie_word_embeddings: the head is the embedding.
        eos_token_ids: tokens that end a text.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 40960
    eos_token_ids: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    @classmethod
    def from_hf(cls, path: Path) -> Qwen3Config:
        """Read a `config.json`.

        Raises:
            InputError: no such file, not JSON, not a dense Qwen3, or a feature that is not built (rope scaling, sliding
                windows, attention biases), by name.
        """
        raw = _read_json(path)
        _refuse_what_is_not_built(raw, path)
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [key for key in required if not isinstance(raw.get(key), int) or raw[key] < 1]
        if missing:
            raise InputError(f"{path}: {', '.join(missing)} is missing or not a positive number")
        heads = raw["num_attention_heads"]
        config = cls(
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or 128,  # Qwen3's own default, whatever hidden_size / heads may be
            intermediate_size=raw["intermediate_size"],
            vocab_size=raw["vocab_size"],
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 1e4),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 32768)),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )
        if config.num_heads % config.num_kv_heads:
            raise InputError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
        if config.head_dim % 2:
            raise InputError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs an even one")
        return config

    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        norms = 2 * self.hidden_size + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def token_ids(value: object) -> tuple[int, ...]:
    """A token id, a list of them or nothing, as Hugging Face's JSON has it, as a tuple."""
    if isinstance(value, int):
        return (value,)
    return tuple(int(v) for v in value) if isinstance(value, list) else ()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a model is a folder in Hugging Face format, tiny, or random:SIZE") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a model's configuration")
    return raw


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, 4 wrote `rope_theta` and `rope_scaling`."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _refuse_what_is_not_built(raw: Mapping[str, Any], path: Path) -> None:
    kind = raw.get("model_type")
    if kind != "qwen3":
        raise InputError(f"{path} is a {kind or 'nameless'} model; this project runs dense Qwen3 (model_type qwen3)")
    rope_type = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    windowed = raw.get("use_sliding_window") or any(t != "full_attention" for t in raw.get("layer_types") or [])
    reasons = {
        f"rope scaling {rope_type!r}": rope_type != "default",
        "sliding-window attention": windowed,
        "attention biases": raw.get("attention_bias"),
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }
    for reason, present in reasons.items():
        if present:
            raise InputError(f"{path} asks for {reason}, which this project does not build")


QWEN3_14B = Qwen3Config(
    hidden_size=5120, num_layers=40, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=17408,
    vocab_size=151936, eos_token_ids=(151645, 151643),
)  # fmt: skip

FAMILY: dict[str, Qwen3Config] = {
    "0.6b": replace(
        QWEN3_14B, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tie_word_embeddings=True
    ),
    "1.7b": replace(
        QWEN3_14B, hidden_size=2048, num_layers=28, num_heads=16, intermediate_size=6144, tie_word_embeddings=True
    ),
    "4b": replace(QWEN3_14B, hidden_size=2560, num_layers=36, num_heads=32, intermediate_size=9728, tie_word_embeddings=True),
    "8b": replace(QWEN3_14B, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288),
    "14b": QWEN3_14B,
    "32b": replace(QWEN3_14B, num_layers=64, num_heads=64, intermediate_size=25600),
}
