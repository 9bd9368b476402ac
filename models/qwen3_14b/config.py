"""Shapes of a dense DecoderModel, read from a Hugging Face `config.json` or by the name of a family member."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from haarkv.models.base import DecoderConfig
from haarkv.tq_ops.errors import InputError


def read_hf_config(path: Path) -> DecoderConfig:
    """Read a `config.json`.

    Raises:
        InputError: no such file, not JSON, not a dense DecoderModel, or a feature that is not built (rope scaling, sliding
            windows, attention biases), by name.
    """
    raw = _read_json(path)
    _refuse_what_is_not_built(raw, path)

    def count(key: str, default: int | None = None) -> int:
        return int(_positive(raw, key, path, default, int))

    heads, rope = count("num_attention_heads"), _rope(raw)
    config = DecoderConfig(
        hidden_size=count("hidden_size"),
        num_layers=count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", 128),  # Qwen3's own default, whatever hidden_size / heads may be
        intermediate_size=count("intermediate_size"),
        vocab_size=count("vocab_size"),
        rope_theta=_positive(raw if rope.get("rope_theta") is None else rope, "rope_theta", path, 1e4),
        rms_norm_eps=_positive(raw, "rms_norm_eps", path, 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=count("max_position_embeddings", 32768),
        eos_token_ids=eos_token_ids(raw, path),
    )
    if config.num_heads % config.num_kv_heads:
        raise InputError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise InputError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs an even one")
    return config


def eos_token_ids(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Tokens that end a text, from a file's `eos_token_id`: an id, a list of them or nothing.

    Raises:
        InputError: it is something else.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise InputError(f"{path}: eos_token_id {value!r} is neither a token id nor a list of them")
    return tuple(ids)


def _positive(
    raw: Mapping[str, Any], key: str, path: Path, default: float | None, kind: type[int] | type[float] = float
) -> float:
    """A number above 0; an absent or null one is `default`, and an error where there is none."""
    value = default if raw.get(key) is None else raw[key]
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
        raise InputError(f"{path}: {key} is missing or not a positive {'integer' if kind is int else 'number'}")
    return kind(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a model is a folder in Hugging Face format, tiny, or random:SIZE") from None
    except (ValueError, OSError, RecursionError) as error:
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
    if not isinstance(_rope(raw), dict):
        raise InputError(f"{path}: its rope parameters {_rope(raw)!r} are not an object")
    rope_type = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    # Anything else than a list of "full_attention" describes another attention.
    kinds = raw.get("layer_types") or []
    windowed = raw.get("use_sliding_window") or not isinstance(kinds, list) or any(t != "full_attention" for t in kinds)
    reasons = {
        f"rope scaling {rope_type!r}": rope_type != "default",
        "sliding-window attention": windowed,
        "attention biases": raw.get("attention_bias"),
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }
    for reason, present in reasons.items():
        if present:
            raise InputError(f"{path} asks for {reason}, which this project does not build")


QWEN3_14B = DecoderConfig(
    hidden_size=5120, num_layers=40, num_heads=40, num_kv_heads=8, head_dim=128, intermediate_size=17408,
    vocab_size=151936, eos_token_ids=(151645, 151643),
)  # fmt: skip

FAMILY: dict[str, DecoderConfig] = {
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
