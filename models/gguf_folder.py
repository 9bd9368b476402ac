"""A folder in Hugging Face's format as what a GGUF file is written from: its settings, names and order of rows as llama.cpp's
converter has them.

Each of them is the other way round of what `gguf_source` reads. What was written is opened again, and a model that would then
be another is refused: so nothing that a file cannot say is lost in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Experts, ModelConfig, Rope
from haarkv.models.gguf_hybrid import ARCHITECTURES as HYBRIDS
from haarkv.models.gguf_names import SAMPLING, rows_of, stored_name
from haarkv.models.gguf_settings import MODEL_TYPES
from haarkv.models.gguf_source import GGUFSource
from haarkv.models.gguf_vocabulary import entries_of, special_ids
from haarkv.models.hf_config import config_of
from haarkv.models.hf_folder import HFFolder
from haarkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies
from haarkv.models.source import Held
from haarkv.models.weights import checkpoint_shapes
from haarkv.tq_ops.errors import InputError

_ARCHITECTURES = {of: name for name, of in MODEL_TYPES.items() if name not in HYBRIDS} | {"mistral": "llama"}
"""general.architecture by `model_type`."""
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class FolderOrigin:
    """Attributes and methods as of `gguf_writer.Origin`.

    Args:
        held: of the folder, compared with `config`.
    Raises:
        InputError: a model of which no file is written, by name, or a tokenizer that llama.cpp has not.
    """

    def __init__(self, folder: HFFolder, config: ModelConfig, held: Mapping[str, Held]) -> None:
        self.path, self._folder, self._config, self._held = folder.path, folder, config, held
        if config.model_type not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise InputError(
                f"{self.path} is a {config.model_type} model; GGUF files are written of {known}. llama.cpp's "
                "convert_hf_to_gguf.py makes one of others, which may then be quantized"
            )
        self.architecture = _ARCHITECTURES[config.model_type]
        self._entries = self._shapes() | self._words()
        self._names = dict(self._named())
        self._rope = config.attentions[0].rope

    def entries(self) -> Mapping[str, Any]:
        return self._entries

    def kind_of(self, key: str) -> None:
        """A value's own kind is written."""

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (first, *others) in self._names.items():
            held = self._held[first]
            shape = (len(others) + 1, *held.shape) if "_exps." in name else held.shape
            plain = len(held.shape) < 2 or "ffn_gate_inp" in name
            found[name] = shape, "F32" if plain else _TYPES[held.dtype or torch.float32]
        if isinstance(self._rope.scaling, Llama3Scaling):
            found["rope_freqs.weight"] = (self._rope.dims // 2,), "F32"
        return found

    def stored(self, name: str) -> Tensor:
        shape, kind = self.tensors()[name]
        count = shape[-2] if len(shape) > 1 else 1
        parts = [self._in_order(name, first, first + count) for first in range(0, math.prod(shape[:-1]), count)]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        return rows.to({of: dtype for dtype, of in _TYPES.items()}[kind]).contiguous().view(torch.uint8)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self._in_order(name, begin, end).float()

    def by_stored_name(self, of_columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, names in self._names.items():
            if all(one in of_columns for one in names):
                found[name] = of_columns[names[0]] if len(names) == 1 else torch.stack([of_columns[one] for one in names])
        return found

    def check(self, written: Path) -> None:
        """Compare what a written file says with the folder.

        Raises:
            InputError: a file cannot say what this model is.
        """
        config = config_of(written, GGUFSource(written).settings())
        pairs = list(zip(self._config.attentions, config.attentions, strict=False))
        same = _but_scaling(self._config) == _but_scaling(config) and all(_turn_alike(a.rope, b.rope) for a, b in pairs)
        if not same or not set(self._ends) <= set(config.eos_token_ids):
            raise InputError(f"{self.path}: a GGUF file cannot say all that this model's config says; none is written")

    # -- Settings ----------------------------------------------------------------------------------------------------------

    def _shapes(self) -> dict[str, Any]:
        config = self._config
        mixer, mlp = config.attentions[0], config.layers[0].mlp
        rope = mixer.rope
        window = next((of.window for of in config.attentions if of.window), None)
        of_all = next((of.rope for of in config.attentions if of.window is None), rope)
        said: dict[str, Any] = {
            "block_count": config.num_layers, "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size, "attention.head_count": mixer.num_heads,
            "attention.head_count_kv": mixer.num_kv_heads, "attention.key_length": mixer.head_dim,
            "attention.value_length": mixer.head_dim, "attention.layer_norm_rms_epsilon": config.final_norm.eps,
            "rope.freq_base": of_all.theta, "rope.dimension_count": rope.dims, "vocab_size": config.vocab_size,
        }  # fmt: skip
        if isinstance(mlp, Experts):
            if not mlp.normalized:
                raise InputError(f"{self.path}: weights of its experts do not sum to 1, as llama.cpp has them")
            said |= {"expert_count": mlp.count, "expert_used_count": mlp.per_token, "expert_feed_forward_length": mlp.width}
        inner = self._folder.settings().get("intermediate_size")  # of experts it is that of no layer
        said["feed_forward_length"] = inner if isinstance(inner, int) else mlp.width
        said |= {"attention.sliding_window": window} if window else {}
        said |= _scaling(of_all.scaling)
        general = {"general.type": "model", "general.name": self.path.resolve().name}
        return general | {f"{self.architecture}.{key}": value for key, value in said.items()}

    def _words(self) -> dict[str, Any]:
        words = self._folder.words()
        self._ends = tuple(dict.fromkeys((*self._config.eos_token_ids, *words.ends)))
        ids = special_ids(words, self._ends, self._folder.settings(), self.path)
        return entries_of(words, self._config.vocab_size, ids) | self._sampling()

    def _sampling(self) -> dict[str, Any]:
        said = self._folder.sampling()
        return {f"general.sampling.{key}": said[name] for key, name in SAMPLING.items() if name in said}

    # -- Tensors -----------------------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, list[str]]]:
        """Every tensor's name in a file, and Hugging Face's: of experts that are stored together all of them."""
        experts: dict[str, list[str]] = {}
        for name in checkpoint_shapes(self._config):
            stored = stored_name(name, gemma=self.architecture == "gemma3")
            if "_exps." in stored:
                experts.setdefault(stored, []).append(name)
            else:
                yield stored, [name]
        yield from experts.items()

    def _in_order(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a tensor in the file's order, in its own dtype; norms as llama.cpp multiplies with them."""
        if name == "rope_freqs.weight":
            return self._factors()
        names = self._names[name]
        count = self._held[names[0]].shape[0] if len(self._held[names[0]].shape) > 1 else 1
        one, held = names[begin // count], self._held[names[begin // count]]
        found = self._folder.read(one, held.dtype or torch.float32)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return found.float() + 1
        counts = self._config.attentions[0].heads
        of_part = {"attn_q": counts.num_heads, "attn_k": counts.num_kv_heads}.get(name.split(".")[-2])
        if self.architecture == "llama" and of_part:
            found = found[rows_of(len(found), of_part).argsort()]
        return found if found.ndim < 2 else found[begin % count : begin % count + end - begin]

    def _factors(self) -> Tensor:
        """What each of Llama 3's frequencies is divided by: [dims / 2] fp32."""
        half, scaling = self._rope.dims // 2, self._rope.scaling
        assert scaling is not None
        plain = (1.0 / (self._rope.theta ** (torch.arange(half, dtype=torch.float64) / half))).float()
        return plain / scaling.scaled(plain, self._rope.theta)


def _but_scaling(config: ModelConfig) -> ModelConfig:
    """All of a config but what is compared apart, or is called otherwise in a file: a Mistral is a llama."""
    layers = tuple(
        replace(of, mixer=replace(of.attention, rope=replace(of.attention.rope, scaling=None))) for of in config.layers
    )
    return replace(config, layers=layers, model_type="", eos_token_ids=())


def _turn_alike(one: Rope, other: Rope) -> bool:
    """Whether two embeddings turn by the same angles, but for the FP32 in which a file has their factors."""
    warm, theirs = (of.scaling.attention_factor if of.scaling else 1.0 for of in (one, other))
    close = torch.allclose(inverse_frequencies(one), inverse_frequencies(other), rtol=1e-5, atol=0.0)
    return close and math.isclose(warm, theirs, rel_tol=1e-6)


def _scaling(scaling: object) -> dict[str, Any]:
    if isinstance(scaling, LinearScaling):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        return {
            "rope.scaling.type": "yarn", "rope.scaling.factor": scaling.factor,
            "rope.scaling.original_context_length": scaling.original_positions,
            "rope.scaling.yarn_beta_fast": scaling.beta_fast, "rope.scaling.yarn_beta_slow": scaling.beta_slow,
        }  # fmt: skip
    return {}  # a Llama 3 has its factors as a tensor
