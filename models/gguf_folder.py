"""A folder in Hugging Face's format as what a GGUF file is written from: its settings, names and order of rows as llama.cpp's
converter has them.

Each of them is the other way round of what `gguf_source` reads. What was written is opened again, and a model that would then
be another is refused: so nothing that a file cannot say is lost in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from haarkv.models.config import Experts, ModelConfig, Rope
from haarkv.models.gguf_settings import HYBRIDS, MODEL_TYPES
from haarkv.models.gguf_source import SAMPLING, GGUFSource, llama_row_order, stored_name
from haarkv.models.hf_config import parse_config
from haarkv.models.hf_folder import HFFolder
from haarkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies
from haarkv.models.source import CheckpointTensor, Words
from haarkv.models.text import has_patterns
from haarkv.models.weights import checkpoint_shapes
from haarkv.models.words import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    PROBE,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS,
    build_words,
    named_ends,
    pre_tokenizer_of,
)
from haarkv.tq_ops.errors import InputError, warn

_ARCHITECTURES = {of: name for name, of in MODEL_TYPES.items() if name not in HYBRIDS} | {"mistral": "llama"}
"""general.architecture by `model_type`."""
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class FolderOrigin:
    """Attributes and methods as of `gguf_writer.FileOrigin`.

    Args:
        held: of the folder, compared with `config`.
    Raises:
        InputError: a model of which no file is written, by name, or a tokenizer that llama.cpp has not.
    """

    def __init__(self, folder: HFFolder, config: ModelConfig, source_tensors: Mapping[str, CheckpointTensor]) -> None:
        self.path, self._folder, self._config, self._source_tensors = folder.path, folder, config, source_tensors
        if config.model_type not in _ARCHITECTURES:
            architectures = ", ".join(_ARCHITECTURES)
            raise InputError(
                f"{self.path} is a {config.model_type} model; GGUF files are written of {architectures}. llama.cpp's "
                "convert_hf_to_gguf.py makes one of others, which may then be quantized"
            )
        self.architecture = _ARCHITECTURES[config.model_type]
        self._entries = self._shapes() | self._words()
        self._names = dict(self._file_names())
        self._rope = config.attentions[0].rope

    def entries(self) -> Mapping[str, Any]:
        return self._entries

    def entry_kind(self, key: str) -> None:
        """A value's own kind is written."""

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, (first, *others) in self._names.items():
            source_tensor = self._source_tensors[first]
            shape = (len(others) + 1, *source_tensor.shape) if "_exps." in name else source_tensor.shape
            plain = len(source_tensor.shape) < 2 or "ffn_gate_inp" in name
            tensors[name] = shape, "F32" if plain else _TYPES[source_tensor.dtype or torch.float32]
        if isinstance(self._rope.scaling, Llama3Scaling):
            tensors["rope_freqs.weight"] = (self._rope.dims // 2,), "F32"
        return tensors

    def tensor_bytes(self, name: str) -> Tensor:
        shape, kind = self.tensors()[name]
        count = shape[-2] if len(shape) > 1 else 1
        parts = [self._in_order(name, first, first + count) for first in range(0, math.prod(shape[:-1]), count)]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        return rows.to({type_name: dtype for dtype, type_name in _TYPES.items()}[kind]).contiguous().view(torch.uint8)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self._in_order(name, begin, end).float()

    def by_stored_name(self, column_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values_by_name = {}
        for name, names in self._names.items():
            if all(one in column_values for one in names):
                values_by_name[name] = (
                    column_values[names[0]] if len(names) == 1 else torch.stack([column_values[one] for one in names])
                )
        return values_by_name

    def check(self, gguf_path: Path) -> None:
        """Refuse a written file that does not say what this model is."""
        config = parse_config(gguf_path, GGUFSource(gguf_path).settings())
        pairs = list(zip(self._config.attentions, config.attentions, strict=False))
        same = _but_scaling(self._config) == _but_scaling(config) and all(_turn_alike(a.rope, b.rope) for a, b in pairs)
        if not same or not set(self._ends) <= set(config.eos_token_ids):
            raise InputError(f"{self.path}: a GGUF file cannot say all that this model's config says; none is written")

    # -- Settings ----------------------------------------------------------------------------------------------------------

    def _shapes(self) -> dict[str, Any]:
        config = self._config
        mixer, mlp = config.attentions[0], config.layers[0].mlp
        rope = mixer.rope
        window = next((attention.window for attention in config.attentions if attention.window), None)
        global_rope = next((attention.rope for attention in config.attentions if attention.window is None), rope)
        entries: dict[str, Any] = {
            "block_count": config.num_layers, "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size, "attention.head_count": mixer.num_heads,
            "attention.head_count_kv": mixer.num_kv_heads, "attention.key_length": mixer.head_dim,
            "attention.value_length": mixer.head_dim, "attention.layer_norm_rms_epsilon": config.final_norm.eps,
            "rope.freq_base": global_rope.theta, "rope.dimension_count": rope.dims, "vocab_size": config.vocab_size,
        }  # fmt: skip
        if isinstance(mlp, Experts):
            if not mlp.normalized:
                raise InputError(f"{self.path}: weights of its experts do not sum to 1, as llama.cpp has them")
            entries |= {"expert_count": mlp.count, "expert_used_count": mlp.per_token, "expert_feed_forward_length": mlp.width}
        inner = self._folder.settings().get("intermediate_size")  # of experts it is that of no layer
        entries["feed_forward_length"] = inner if isinstance(inner, int) else mlp.width
        entries |= {"attention.sliding_window": window} if window else {}
        entries |= _scaling(global_rope.scaling)
        general = {"general.type": "model", "general.name": self.path.resolve().name}
        return general | {f"{self.architecture}.{key}": value for key, value in entries.items()}

    def _words(self) -> dict[str, Any]:
        words = self._folder.words()
        self._ends = tuple(dict.fromkeys((*self._config.eos_token_ids, *words.ends)))
        ids = special_ids(words, self._ends, self._folder.settings(), self.path)
        return tokenizer_entries(words, self._config.vocab_size, ids) | self._sampling()

    def _sampling(self) -> dict[str, Any]:
        sampling = self._folder.sampling()
        return {f"general.sampling.{key}": sampling[name] for key, name in SAMPLING.items() if name in sampling}

    # -- Tensors -----------------------------------------------------------------------------------------------------------

    def _file_names(self) -> Iterator[tuple[str, list[str]]]:
        """Every tensor's name in a file, and Hugging Face's: of experts that are stored together all of them."""
        experts: dict[str, list[str]] = {}
        for name in checkpoint_shapes(self._config):
            file_name = stored_name(name, self.architecture)
            if "_exps." in file_name:
                experts.setdefault(file_name, []).append(name)
            else:
                yield file_name, [name]
        yield from experts.items()

    def _in_order(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a tensor in the file's order, in its own dtype; norms as llama.cpp multiplies with them."""
        if name == "rope_freqs.weight":
            return self._factors()
        names = self._names[name]
        count = self._source_tensors[names[0]].shape[0] if len(self._source_tensors[names[0]].shape) > 1 else 1
        one, source_tensor = names[begin // count], self._source_tensors[names[begin // count]]
        tensor = self._folder.read(one, source_tensor.dtype or torch.float32)
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return tensor.float() + 1
        counts = self._config.attentions[0].heads
        head_count = {"attn_q": counts.num_heads, "attn_k": counts.num_kv_heads}.get(name.split(".")[-2])
        if self.architecture == "llama" and head_count:
            tensor = tensor[llama_row_order(len(tensor), head_count).argsort()]
        return tensor if tensor.ndim < 2 else tensor[begin % count : begin % count + end - begin]

    def _factors(self) -> Tensor:
        """What each of Llama 3's frequencies is divided by: [dims / 2] fp32."""
        half, scaling = self._rope.dims // 2, self._rope.scaling
        assert scaling is not None
        plain = (1.0 / (self._rope.theta ** (torch.arange(half, dtype=torch.float64) / half))).float()
        return plain / scaling.scaled(plain, self._rope.theta)


def _but_scaling(config: ModelConfig) -> ModelConfig:
    """All of a config but what is compared apart, or is called otherwise in a file: a Mistral is a llama."""
    layers = tuple(
        replace(layer, mixer=replace(layer.attention, rope=replace(layer.attention.rope, scaling=None)))
        for layer in config.layers
    )
    return replace(config, layers=layers, model_type="", eos_token_ids=())


def _turn_alike(one: Rope, other: Rope) -> bool:
    """Whether two embeddings turn by the same angles, but for the FP32 in which a file has their factors."""
    warm, theirs = (rope.scaling.attention_factor if rope.scaling else 1.0 for rope in (one, other))
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


def tokenizer_entries(words: Words, rows: int, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """The entries, by key.

    Args:
        rows: of the embedding; tokens that nobody named fill it up.
        ids: of special tokens, by the names that llama.cpp has for them (`bos`, `eos`, `eot`, `padding`); None of one that
            there is not.
    Raises:
        InputError: llama.cpp has no such tokenizer, or would make other tokens.
    """
    state = json.loads(words.tokenizer.to_str())
    if state["model"].get("type") != "BPE" or has_patterns(words.tokenizer):
        raise InputError(f"{words.path}: llama.cpp has no name for how it cuts text; {_ELSE}")
    vocabulary = words.tokenizer.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) >= rows:
        raise InputError(f"{words.path} has more tokens than the embedding's {rows:,}")
    tokens = [f"[PAD{id}]" for id in range(rows)]
    for token, id in vocabulary.items():
        tokens[id] = token
    pieces = bool(state["model"].get("byte_fallback"))
    fields: dict[str, Any] = {"model": "llama" if pieces else "gpt2", "pre": "default" if pieces else _pre(words, state)}
    fields |= {"tokens": tokens, "token_type": _kinds(state, tokens, set(vocabulary))}
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in state["model"]["merges"]]
    if not merges:
        raise InputError(f"{words.path}: its tokenizer merges nothing, and llama.cpp has none without merges")
    if pieces:
        fields |= {"scores": _scores(tokens, merges), "add_space_prefix": "Prepend" in json.dumps(state["normalizer"])}
    else:
        fields["merges"] = [" ".join(merge) for merge in merges]
    around = words.tokenizer.encode("").ids
    fields |= {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    fields |= {"add_bos_token": ids.get("bos") in around, "add_eos_token": bool(around) and around[-1] != ids.get("bos")}
    entries = {f"{TOKENS}{key}": value for key, value in fields.items()}
    entries |= {TEMPLATE + f".{name}" * (name != "default"): source for name, source in words.templates.items()}
    if others := [name for name in words.templates if name != "default"]:
        entries[f"{TEMPLATE}s"] = others
    _compare(words, build_words(words.path, entries, rows).tokenizer)
    if unsaid := list(dict.fromkeys(_unsaid_steps(state["normalizer"], pieces))):
        warn(
            f"{words.path} changes text by {' and '.join(unsaid)} before it is cut, which llama.cpp does not and no GGUF file "
            "says: of text that is changed so the file makes other tokens"
        )
    return entries


def _unsaid_steps(normalizer: Mapping[str, Any] | None, pieces: bool) -> Iterator[str]:
    """Names of the steps of a normalizer that a file does not say; of SentencePiece's it says how spaces are spelled."""
    if normalizer is None:
        return
    spaces = normalizer["type"] == "Prepend" or normalizer.get("pattern") == {"String": " "}
    if normalizer["type"] == "Sequence":
        for step in normalizer["normalizers"]:
            yield from _unsaid_steps(step, pieces)
    elif not (pieces and spaces):
        yield str(normalizer["type"])


_ELSE = "convert it with llama.cpp's convert_hf_to_gguf.py"


def _pre(words: Words, state: Mapping[str, Any]) -> str:
    """llama.cpp's name of the way in which a byte-level BPE cuts text."""
    cut, whole = words.tokenizer.pre_tokenizer, bool(state["model"].get("ignore_merges"))
    if cut is not None:
        right = [piece for piece, _ in cut.pre_tokenize_str(PROBE)]
        for names in PRE_TOKENIZERS:
            fits = [name for name in names if name and (name in WHOLE_WORDS) == whole]
            if fits and [piece for piece, _ in pre_tokenizer_of(fits[0]).pre_tokenize_str(PROBE)] == right:
                return fits[0]
    raise InputError(f"{words.path}: llama.cpp has no name for how it cuts text; {_ELSE}")


def _kinds(state: Mapping[str, Any], tokens: Sequence[str], vocabulary: set[str]) -> list[int]:
    added_kinds = {entry["content"]: CONTROL if entry["special"] else USER_DEFINED for entry in state["added_tokens"]}
    unknown, pieces = state["model"].get("unk_token"), bool(state["model"].get("byte_fallback"))

    def kind(token: str) -> int:
        if token not in vocabulary:
            return UNUSED
        if token == unknown:
            return UNKNOWN
        is_byte = pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return added_kinds.get(token, BYTE if is_byte else NORMAL)

    return [kind(token) for token in tokens]


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Of two neighbours those are merged first whose token scores most: of each, the rank of the first merge that makes it."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _compare(words: Words, again: Tokenizer) -> None:
    for text in (PROBE, *PROBE.split("\n")):
        if again.encode(text).ids != words.tokenizer.encode(text).ids:
            raise InputError(f"{words.path}: as a GGUF file it would make other tokens of a text; {_ELSE}")


def special_ids(words: Words, ends: Sequence[int], settings: Mapping[str, Any], path: Path) -> dict[str, int | None]:
    """Ids of special tokens, by llama.cpp's names: BOS, up to three that end a text, padding.

    Args:
        ends: tokens that end a text.
        settings: the model's `config.json`, which may name a BOS that the tokenizer does not.
    Raises:
        InputError: more tokens end a text than a file can say, beside those that are known by name.
    """
    ids = words.tokenizer.token_to_id
    named_ids = {name: ids(words.special[key]) for name, key in SPECIAL.items() if name != "eos" and key in words.special}
    if named_ids.get("bos") is None and isinstance(settings.get("bos_token_id"), int):
        named_ids["bos"] = settings["bos_token_id"]
    by_name = named_ends(words.tokenizer.get_vocab(with_added_tokens=True))
    order = [*ends[:1], *sorted(ends[1:], key=by_name.__contains__)]
    if not set(order[3:]) <= set(by_name):
        raise InputError(f"{path}: {len(ends)} tokens end a text, and a GGUF file names three; {_ELSE}")
    return named_ids | dict(zip(("eos", "eot", "eom"), order, strict=False))
