"""Checked reading of a Hugging Face `config.json`; `models.families` says which entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from haarkv.models.config import Attention, Experts, Layer, ModelConfig, Rope, RopeScaling
from haarkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, yarn_attention_factor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json

_MOST_LAYERS_OR_HEADS = 2**10
_MOST = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "vocab_size": 2**22,
    "linear_conv_kernel_dim": 2**6,
    # Positions are counted in FP32, which has no integers between those above.
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
}
"""Several times what any model has, of layers, heads, experts and sizes of heads, and of other entries."""
_MOST_NUMBER, _LEAST_NUMBER = 3e38, 1e-38
"""Numbers that FP32 holds."""
FULL, _SLIDING = "full_attention", "sliding_attention"
_SCALINGS = ("linear", "llama3", "yarn")
_MOST_EXPERTS = 2**16
"""Of all layers together."""


def parse_config(path: Path, settings: Mapping[str, Any]) -> ModelConfig:
    """Declaration from the entries of a `config.json`, which `path` names in messages; InputError if a part is unknown."""
    from haarkv.models.families import FAMILIES, read_family  # which reads entries by this module

    file = HFConfig(path, settings)
    model_type = file.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        model_types = ", ".join(FAMILIES)
        name = model_type if isinstance(model_type, str) else shown(model_type or "nameless")
        raise InputError(f"{path} is a {name} model; this project runs model_type {model_types}")
    config = read_family(file)
    for layer in dict.fromkeys(config.layers):
        _require_possible(path, layer)
    if config.max_position_embeddings > _MOST["max_position_embeddings"]:
        raise InputError(f"{path}: its RoPE scaling reaches more than {_MOST['max_position_embeddings']:,} positions")
    experts = max(layer.mlp.count if isinstance(layer.mlp, Experts) else 0 for layer in config.layers)
    if config.num_layers * experts > _MOST_EXPERTS:
        raise InputError(f"{path}: {config.num_layers} layers of {experts} experts are more than any model has")
    return config


def _require_possible(path: Path, layer: Layer) -> None:
    mixer = layer.mixer
    if not isinstance(mixer, Attention):
        return
    if mixer.num_heads % mixer.num_kv_heads:
        raise InputError(f"{path}: {mixer.num_heads} heads cannot share {mixer.num_kv_heads} KV heads evenly")
    if mixer.head_dim % 2:
        raise InputError(f"{path}: head_dim {mixer.head_dim} is odd; rotary embedding needs an even one")
    if mixer.rope.dims % 2 or not mixer.rope.dims:
        raise InputError(f"{path}: rotary embedding of {mixer.rope.dims} coordinates of a head cannot be; it needs pairs")


@dataclass(frozen=True)
class HFConfig:
    """Entries of one `config.json`; an InputError names the file and the wrong entry."""

    path: Path
    raw: Mapping[str, Any]

    def part(self, key: str) -> HFConfig:
        """A nested object; empty if absent or null."""
        value = self.raw.get(key)
        if not isinstance(value, dict | None):
            raise InputError(f"{self.path}: {key} is not an object")
        return HFConfig(self.path, value or {})

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` if absent or null."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is missing or not a positive integer")
        if value > (most := _MOST.get(key, _MOST_LAYERS_OR_HEADS)):
            raise InputError(f"{self.path}: {key} is larger than any model's; at most {most:,} can be")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that FP32 holds; `default` if absent or null."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise InputError(f"{self.path}: {key} is missing or not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; false if absent or null."""
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise InputError(f"{self.path}: {key} is neither true nor false")
        return bool(value)

    def refuse(self, reasons: Mapping[str, object]) -> None:
        """Refuse the first present feature, by its description."""
        for reason, present in reasons.items():
            if present:
                raise InputError(f"{self.path} asks for {reason}, which this project does not build")

    def layer_kinds(self, count: int, *kind_names: str) -> list[str] | None:
        """`layer_types`, each of `kind_names`; None if absent."""
        kinds = self.raw.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != count:
            raise InputError(f"{self.path}: layer_types does not name the kind of each of {count} layers")
        self.refuse({f"layers of the type {shown(kind)}": kind not in kind_names for kind in kinds})
        return kinds

    def windows(self, window: object, is_local: Sequence[bool]) -> list[int | None]:
        """The sliding window of each layer: `window` by `layer_types`, or else by the family's rule `is_local`."""
        if kinds := self.layer_kinds(len(is_local), FULL, _SLIDING):
            is_local = [kind == _SLIDING for kind in kinds]
        if not any(is_local) or window is None:
            return [None] * len(is_local)
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise InputError(f"{self.path}: sliding_window {shown(window)} is no number of tokens")
        return [window if local else None for local in is_local]

    def experts(self, *, normalized: bool, shared: int = 0) -> Experts:
        """Experts; transformers 5 writes num_local_experts for Qwen's num_experts."""
        sparse = self.raw.get("decoder_sparse_step", 1) == 1
        self.refuse({"dense layers among those with experts": self.raw.get("mlp_only_layers") or not sparse})
        count = self.count("num_experts" if self.raw.get("num_experts") is not None else "num_local_experts")
        per_token = self.count("num_experts_per_tok")
        if per_token > count:
            raise InputError(f"{self.path}: a token cannot go through {per_token} of {count} experts")
        return Experts(count, per_token, self.count("moe_intermediate_size"), normalized=normalized, shared=shared)

    def model(self, layers: tuple[Layer, ...], positions: int, embedding_scale: float) -> ModelConfig:
        """A model with the entries that all families share; windows as wide as the positions are dropped."""

        def effective_window(layer: Layer) -> Layer:
            mixer = layer.mixer
            if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= positions:
                return replace(layer, mixer=replace(mixer, window=None))
            return layer

        layers = tuple(map(effective_window, layers))
        return ModelConfig(
            str(self.raw["model_type"]), layers, self.count("hidden_size"), self.count("vocab_size"), layers[0].norm,
            embedding_scale, self.flag("tie_word_embeddings"), positions, eos_token_ids(self.raw, self.path),
        )  # fmt: skip


def eos_token_ids(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: an id, a list of them, or null."""
    value = raw.get("eos_token_id")
    ids = _as_list(value)
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) < 2**31 for i in ids):
        raise InputError(f"{path}: eos_token_id {shown(value)} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def read_hf_settings(path: Path) -> Mapping[str, Any]:
    """The entries of a `config.json` over its family's defaults; of a multimodal model, those of `text_config`."""
    from haarkv.models.families import FAMILIES

    if not path.exists():
        other = of_another_form(path.parent) or "; a model is a folder in Hugging Face format, tiny, or random:SIZE"
        raise InputError(f"{path} does not exist{other}")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a model's configuration")
    inner = raw.get("text_config")
    if isinstance(inner, dict) and inner:
        ends = {"eos_token_id": [id for entries in (inner, raw) for id in _as_list(entries.get("eos_token_id"))]}
        raw = {key: raw[key] for key in ("model_type", "tie_word_embeddings") if key in raw} | inner | ends
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    return {**family.defaults, **raw} if family else raw


_OTHER_FORMS = {
    "adapter_*": "an adapter; merge it into its model (peft's merge_and_unload), and save that",
    "params.json": "of its makers' own form; fetch it with config.json and model.safetensors, or as a GGUF file",
    "consolidated*": "weights under its makers' own names; fetch model.safetensors or its shards, or a GGUF file",
    "flax_model*": "for JAX; save it with transformers' save_pretrained",
    "tf_model*": "for TensorFlow; save it with transformers' save_pretrained",
    "pytorch_model*": "saved by torch; save it with transformers' save_pretrained",
    "*.pt*": "of torch's; save it with transformers' save_pretrained",
}
"""Model files in other forms."""


def of_another_form(folder: Path) -> str:
    """What a folder holds in place of a model in Hugging Face format, as the end of a sentence; "" if unknown."""
    other_files = ((path.name, what) for form, what in _OTHER_FORMS.items() for path in sorted(folder.glob(form))[:1])
    return next((f", but {name}, {what}" for name, what in other_files), "")


def read_rope(
    file: HFConfig, head_dim: int, default_theta: float = 1e4, kind_of_layer: str = "", default_part: float | None = None
) -> tuple[Rope, int]:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of 4.

    Args:
        kind_of_layer: key in `rope_parameters`, where these are by `layer_types`.
        default_part: rotated fraction of each head by default; None refuses a fraction below 1.
    Returns:
        RoPE, and `max_position_embeddings`, or those that YaRN's factor reaches, if they are more.
    """
    positions = file.count("max_position_embeddings")
    old, new = file.part("rope_scaling"), file.part("rope_parameters")
    if kind_of_layer and kind_of_layer in new.raw:
        new = new.part(kind_of_layer)
    rope = old if old.raw else new
    kind = next((rope.raw[key] for key in ("rope_type", "type") if rope.raw.get(key) is not None), "default")
    if not isinstance(kind, str):
        raise InputError(f"{file.path}: rope_type {shown(kind)} is not a string")
    theta = (rope if rope.raw.get("rope_theta") is not None else file).number("rope_theta", default_theta)
    partial = rope.raw.get("partial_rotary_factor") or file.raw.get("partial_rotary_factor") or default_part or 1
    if default_part is not None and not (isinstance(partial, int | float) and 0 < partial <= 1):
        raise InputError(f"{file.path}: partial_rotary_factor {shown(partial)} is no part of a head")
    file.refuse(
        {
            f"RoPE on a part of each head (partial_rotary_factor {shown(partial)})": partial != 1 and default_part is None,
            f"rope scaling {shown(kind)} (built are {', '.join(_SCALINGS)})": kind != "default" and kind not in _SCALINGS,
        }
    )
    dims = int(head_dim * partial)
    if kind == "default":
        return Rope(theta, dims), positions
    # transformers prefers a trained length beside the rotary parameters.
    outer = file.raw.get("original_max_position_embeddings") is not None
    original = (file if outer else rope).count("original_max_position_embeddings", positions)
    scaling = _read_scaling(kind, rope, positions, original)
    if isinstance(scaling, YarnScaling):
        if theta <= 1:
            raise InputError(f"{file.path}: rope_theta {theta:g} must be above 1 for YaRN, which divides by its logarithm")
        positions = max(positions, round(scaling.factor * original))
    return Rope(theta, dims, scaling), positions


def _read_scaling(kind: str, rope: HFConfig, positions: int, original: int) -> RopeScaling:
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise InputError(f"{rope.path}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
        return Llama3Scaling(rope.number("factor"), low, high, original)
    factor = rope.number("factor", positions / original)
    scales = [rope.number(key) if rope.raw.get(key) not in (None, 0) else None for key in ("mscale", "mscale_all_dim")]
    attention = rope.number("attention_factor", yarn_attention_factor(factor, *scales))
    fast, slow = rope.number("beta_fast", 32), rope.number("beta_slow", 1)
    return YarnScaling(factor, original, attention, fast, slow, rope.raw.get("truncate") is None or rope.flag("truncate"))
