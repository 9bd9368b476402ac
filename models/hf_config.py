"""Reading a Hugging Face `config.json` entry by entry; the family of its `model_type` says which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_rope import read_rope
from haarkv.models.registry import FAMILIES, family_of
from haarkv.tq_ops.errors import InputError


def read_hf_config(path: Path) -> DecoderConfig:
    """Read a `config.json`.

    Raises:
        InputError: no such file, not JSON, of an unknown `model_type`, an entry that cannot be, or a feature that is not built
            (such as a sliding window), by name.
    """
    file = HFConfig(path, _read_json(path))
    model_type = file.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"{path} is a {model_type or 'nameless'} model; this project runs model_type {known}")
    config = family_of(model_type).read_config(file)
    if config.num_heads % config.num_kv_heads:
        raise InputError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise InputError(f"{path}: head_dim {config.head_dim} is odd; rotary embedding needs an even one")
    return config


@dataclass(frozen=True)
class HFConfig:
    """The entries of one `config.json`. Whatever is wrong with one is refused by the file's and the entry's name."""

    path: Path
    raw: Mapping[str, Any]

    def part(self, key: str) -> HFConfig:
        """An object within, as a config of its own; an absent or null one is empty.

        Raises:
            InputError: it is no object.
        """
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: {key} {value!r} is not an object")
        return HFConfig(self.path, value)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer above 0; an absent or null one is `default`, and an error where there is none."""
        return int(_positive(self.raw, key, self.path, default, int))

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; as `count`."""
        return _positive(self.raw, key, self.path, default, float)

    def refuse(self, reasons: Mapping[str, object]) -> None:
        """Refuse the first feature, by name, that the config asks for.

        Raises:
            InputError: the value of one is true.
        """
        for reason, present in reasons.items():
            if present:
                raise InputError(f"{self.path} asks for {reason}, which this project does not build")

    def windowed(self) -> bool:
        """Whether `layer_types` asks for anything but full attention."""
        kinds = self.raw.get("layer_types") or []
        return not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)

    def decoder(self, *, head_dim: int, num_kv_heads: int | None, max_positions: int, qkv_bias: bool = False) -> DecoderConfig:
        """What all families say alike.

        Args:
            head_dim, max_positions: the family's own defaults.
            num_kv_heads: the family's own default where the entry is absent; None: as many as heads. An entry that is null
                means as many as heads in every family.
            qkv_bias: as in `DecoderConfig`.
        """
        raw, act = self.raw, self.raw.get("hidden_act", "silu")
        self.refuse({f"activation {act!r}": act != "silu"})
        heads, positions = self.count("num_attention_heads"), self.count("max_position_embeddings", max_positions)
        rope = read_rope(self, positions)
        return DecoderConfig(
            model_type=str(raw["model_type"]),
            hidden_size=self.count("hidden_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=self.count("num_key_value_heads", heads if "num_key_value_heads" in raw else num_kv_heads or heads),
            head_dim=self.count("head_dim", head_dim),
            intermediate_size=self.count("intermediate_size"),
            vocab_size=self.count("vocab_size"),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=rope.positions,
            eos_token_ids=eos_token_ids(raw, self.path),
            qkv_bias=qkv_bias,
        )


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
