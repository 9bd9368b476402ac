"""Reading a Hugging Face `config.json` entry by entry; the family of its `model_type` says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from haarkv.models.base import DecoderConfig
from haarkv.models.hf_rope import read_rope
from haarkv.models.registry import FAMILIES, family_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json

_MOST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**17,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "head_dim": 2**10,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "vocab_size": 2**22,
    "num_experts": 2**10,
    "num_local_experts": 2**10,
    "num_experts_per_tok": 2**10,
    # Positions are counted in FP32, which has no integers between those above.
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
}
"""What a model may have of each, several times what any has. A larger number is a mistake, found before memory is taken."""
_MOST_NUMBER, _LEAST_NUMBER = 3e38, 1e-38
"""Numbers that FP32 holds."""
_MOST_EXPERTS = 2**16
"""Of all layers together."""


def read_hf_config(path: Path) -> DecoderConfig:
    """Read a `config.json`.

    Raises:
        InputError: no such file, not JSON, of an unknown `model_type`, an entry that cannot be, or a feature that is not built
            (such as a sliding window), by name.
    """
    return config_of(path, read_hf_settings(path))


def config_of(path: Path, settings: Mapping[str, Any]) -> DecoderConfig:
    """Shapes by the entries of a `config.json`, wherever they come from; `path` names them in messages.

    Raises:
        InputError: as `read_hf_config`.
    """
    file = HFConfig(path, settings)
    model_type = file.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        name = model_type if isinstance(model_type, str) else shown(model_type or "nameless")
        raise InputError(f"{path} is a {name} model; this project runs model_type {known}")
    config = family_of(model_type).read_config(file)
    if config.num_heads % config.num_kv_heads:
        raise InputError(f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.max_position_embeddings > _MOST["max_position_embeddings"]:
        raise InputError(f"{path}: its RoPE scaling reaches more than {_MOST['max_position_embeddings']:,} positions")
    if config.num_layers * config.num_experts > _MOST_EXPERTS:
        raise InputError(f"{path}: {config.num_layers} layers of {config.num_experts} experts are more than any model has")
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
        value = self.raw.get(key)
        if not isinstance(value, dict | None):
            raise InputError(f"{self.path}: {key} is not an object")
        return HFConfig(self.path, value or {})

    def count(self, key: str, default: int | None = None) -> int:
        """An integer above 0 that a model may have; an absent or null one is `default`, and an error where there is none."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is missing or not a positive integer")
        if value > _MOST[key]:
            raise InputError(f"{self.path}: {key} is larger than any model's; at most {_MOST[key]:,} can be")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that FP32 holds; as `count`."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise InputError(f"{self.path}: {key} is missing or not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; an absent or null one is false."""
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise InputError(f"{self.path}: {key} is neither true nor false")
        return bool(value)

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
        self.refuse({f"activation {shown(act)}": act != "silu"})
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
            tie_word_embeddings=self.flag("tie_word_embeddings"),
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
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 2**31 for i in ids):
        raise InputError(f"{path}: eos_token_id {shown(value)} is neither a token id nor a list of them")
    return tuple(ids)


def read_hf_settings(path: Path) -> Mapping[str, Any]:
    """The entries of a `config.json`; those of the model that reads text where it has other parts beside it.

    Raises:
        InputError: no such file, or no settings.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; a model is a folder in Hugging Face format, tiny, or random:SIZE")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a model's configuration")
    inner = raw.get("text_config")
    if not isinstance(inner, dict) or not inner:
        return raw
    return {key: raw[key] for key in ("model_type", "eos_token_id", "tie_word_embeddings") if key in raw} | inner
