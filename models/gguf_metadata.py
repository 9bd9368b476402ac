"""What the metadata of a GGUF file say: the entries of a Hugging Face `config.json`, and the same tokens as llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor

from haarkv.models.config import Rope, decimal
from haarkv.models.gguf_file import GGUFFile, GGUFTensor
from haarkv.models.rope import Llama3Scaling, inverse_frequencies
from haarkv.models.source import Words, checked_templates
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
        settings |= self._scaling()
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

    def _scaling(self) -> dict[str, Any]:
        """`rope_scaling`, if the file has one; keys that are not built are refused."""
        prefix = f"{self.architecture}.rope.scaling."
        scaling = {key.removeprefix(prefix): value for key, value in self.file.entries.items() if key.startswith(prefix)}
        factor = scaling.pop("factor", None) or self.setting("rope.scale_linear")
        kind = scaling.pop("type", "linear" if factor else "none")  # llama.cpp's own default
        if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
            return {}
        rope_scaling: dict[str, Any] = {"rope_type": kind} | ({} if factor is None else {"factor": factor})
        for key, value in scaling.items():
            if key in _KEYS:
                rope_scaling[_KEYS[key]] = value
            elif key not in _NEUTRAL or _NEUTRAL[key] not in (None, value):
                raise InputError(f"{self.path}: {prefix}{key} is {shown(value)}, which this project does not build")
        return {"rope_scaling": rope_scaling}

    def _llama3(self, factors: GGUFTensor, settings: Mapping[str, Any]) -> dict[str, Any]:
        dim, theta = settings.get("head_dim"), settings["rope_theta"]
        if factors.fault is not None:
            raise InputError(f"{self.path}: {ROPE_FACTORS} {factors.fault}")
        if factors.shape != (dim // 2 if isinstance(dim, int) else None,) or not isinstance(theta, float):
            raise InputError(f"{self.path}: {ROPE_FACTORS} has shape {list(factors.shape)}, heads have {shown(dim)} channels")
        return llama3_entries(self.path, self.file.read(factors, torch.float32), theta)

    def _add_hybrid(self, settings: dict[str, Any]) -> None:
        """Sizes of DeltaNet, and the number of layers without drafting ones."""
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


def llama3_entries(path: Path, divisors: Tensor, theta: float) -> dict[str, Any]:
    """`rope_scaling` of a Llama 3 from the divisors [dims / 2] of its frequencies; other divisors are refused."""
    plain, largest = inverse_frequencies(Rope(theta, 2 * len(divisors))), float(divisors.max())
    if largest == 1.0 == float(divisors.min()):
        return {}
    scaling = Llama3Scaling(largest, *_LLAMA3.values())  # type: ignore[arg-type]
    if bool(((plain / scaling.scaled(plain, theta) / divisors - 1).abs() <= _LEAST_ERROR).all()):
        return {"rope_scaling": {"rope_type": "llama3", "factor": largest, **_LLAMA3}}
    raise InputError(f"{path}: rope_freqs.weight holds factors that are none of Llama 3's RoPE, the one that is built")


# -- The tokenizer --------------------------------------------------------------------------------------------------------

_TOKENS = "tokenizer.ggml."
"""Prefix of a tokenizer's keys."""
_TEMPLATE = "tokenizer.chat_template"
"""Key of the default chat template; others add a dot and their name."""
_SPECIAL = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
"""Names of special tokens in chat templates, by llama.cpp's keys."""
_MOST_TOKENS, _LONGEST_TOKEN = 2**22, 2**10
"""Tokens of a vocabulary and characters of a token, several times what any has."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)
"""Kinds of tokens by tokenizer.ggml.token_type."""
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "<|return|>",
    "<|call|>", "<|flush|>", "<|calls|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens that end an answer by name, as in llama.cpp; without </s>, which is HTML in Qwen's and Gemma's vocabularies."""
_PART_ENDS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""In a vocabulary with both, <|end|> ends a part of an answer."""
_NAMED = frozenset(_ENDS).union(*_PART_ENDS)
_SPACE = "▁"
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
    r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"): (_PIECES % r"\p{N}",),
    ("qwen35",): (_WITH_MARKS,),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"): (_PIECES % r"\p{N}{1,3}",),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"): (_GPT2,),
    ("default", ""): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""llama.cpp's regular expressions by tokenizer.ggml.pre, applied one after the other."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
"""Names in `_SPLITS` with whole words as tokens, and BOS before each text by default."""


def end_token_ids(entries: Mapping[str, Any]) -> list[Any]:
    """Ids of the tokens that end a text: those that the entries of a file name, and those known by name; not checked."""
    tokens = entries.get(f"{_TOKENS}tokens")
    ids = [id for name in ("eos", "eot", "eom") if (id := _special_id(name, entries)) is not None]
    if isinstance(tokens, list):
        named = {token: id for id, token in enumerate(tokens) if isinstance(token, str) and token in _NAMED}
        ids += [named[name] for name in _ENDS if name in named and not ends_a_part(name, named.get)]
    return [id for at, id in enumerate(ids) if id not in ids[:at]]


def ends_a_part(token: str, find_id: Callable[[str], int | None]) -> bool:
    """Whether a token ends only a part of an answer, by the ids in the vocabulary."""
    return token == "<|end|>" and any(all(find_id(other) is not None for other in others) for others in _PART_ENDS)


def build_words(path: Path, entries: Mapping[str, Any], rows: int | None = None) -> Words:
    """The tokenizer and chat templates of a file with `rows` in its embedding; an InputError if it cannot be built."""
    kind, tokens = entries.get(f"{_TOKENS}model"), entries.get(f"{_TOKENS}tokens")
    if not isinstance(tokens, list) or kind in (None, "no_vocab", "none"):
        raise InputError(f"{path} has no tokenizer; text cannot be turned into tokens")
    if kind not in ("gpt2", "llama"):
        raise InputError(f"{path}: its tokenizer is {shown(kind)}; gpt2 (byte-level BPE) and llama (SentencePiece) are built")
    if len(tokens) > _MOST_TOKENS or not all(isinstance(token, str) for token in tokens):
        raise InputError(f"{path}: {_TOKENS}tokens is no list of at most {_MOST_TOKENS:,} texts")
    if max(map(len, tokens), default=0) > _LONGEST_TOKEN:
        raise InputError(f"{path}: a token has more than {_LONGEST_TOKEN:,} characters, which none has; fetch the file again")
    if rows not in (None, len(tokens)):
        raise InputError(f"{path} has {len(tokens):,} tokens, and an embedding of {rows:,}; one of them is another model's")
    try:
        tokenizer = _byte_level(path, tokens, entries) if kind == "gpt2" else _sentence_piece(path, tokens, entries)
        _add_special(path, tokenizer, tokens, entries)
        ids = {name: _token(path, name, tokens, entries) for name in _SPECIAL}
        _add_ends(path, tokenizer, tokens, ids, entries, bos=kind == "llama" or entries.get(f"{_TOKENS}pre") in _WHOLE_WORDS)
    except InputError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path}: its tokenizer cannot be built: {' '.join(str(error).split())}") from None
    special = {_SPECIAL[name]: tokens[id] for name, id in ids.items() if id is not None}
    keys = [_TEMPLATE, *(key for key in entries if key.startswith(f"{_TEMPLATE}."))]
    sources = {key.removeprefix(_TEMPLATE)[1:] or "default": entries[key] for key in keys if entries.get(key)}
    return Words(tokenizer, path, checked_templates(sources, path), special)


def _byte_level(path: Path, tokens: Sequence[str], entries: Mapping[str, Any]) -> Tokenizer:
    pre = entries.get(f"{_TOKENS}pre", "")
    if not any(pre in names for names in _SPLITS):
        split_names = ", ".join(name for names in _SPLITS for name in names if name)
        raise InputError(f"{path}: its text is cut by the pre-tokenizer {shown(pre)}; built are {split_names}")
    pairs = [tuple(str(merge).split(" ", 1)) for merge in _list(path, "merges", entries)]
    if any(len(pair) != 2 for pair in pairs):
        raise InputError(f"{path}: {_TOKENS}merges is no list of pairs")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS))  # type: ignore[arg-type]
    patterns = next(patterns for names, patterns in _SPLITS.items() if pre in names)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(path: Path, tokens: Sequence[str], entries: Mapping[str, Any]) -> Tokenizer:
    """BPE whose merges are all pairs of tokens that make a token, by score."""
    scores = _list(path, "scores", entries)
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise InputError(f"{path}: {_TOKENS}scores has no number for each of {len(tokens):,} tokens")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    by_score = sorted(
        (-scores[id], vocabulary[left], vocabulary[right])
        for token, id in vocabulary.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary
    )
    merges = [(tokens[left], tokens[right]) for _, left, right in by_score]
    unknown = _token(path, "unknown", tokens, entries)
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = entries.get(f"{_TOKENS}add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    decoder_steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder_steps, decoders.Strip(" ", 1, 0)] if prefix else decoder_steps)
    return tokenizer


def _add_special(path: Path, tokenizer: Tokenizer, tokens: Sequence[str], entries: Mapping[str, Any]) -> None:
    """Add control and user-defined tokens."""
    kinds = entries.get(f"{_TOKENS}token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise InputError(f"{path}: {_TOKENS}token_type has no kind for each of {len(tokens):,} tokens")
    ends = end_token_ids(entries)
    kinds = [_CONTROL if id in ends else kind for id, kind in enumerate(kinds)]
    whole = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if token]
    special = [AddedToken(token, normalized=False, special=True) for token, kind in whole if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in whole if kind == _USER_DEFINED])


def _add_ends(
    path: Path, tokenizer: Tokenizer, tokens: Sequence[str], ids: Mapping[str, int | None], entries: Mapping[str, Any],
    *, bos: bool,
) -> None:  # fmt: skip
    """Add BOS and EOS around texts; `bos` is the default of add_bos_token."""
    around: dict[str, int] = {}
    for name, default in (("bos", bos), ("eos", False)):
        if entries.get(f"{_TOKENS}add_{name}_token", default):
            if (id := ids[name]) is None:
                raise InputError(f"{path}: it asks for {name.upper()} around each text, and names no {_TOKENS}{name}_token_id")
            around[name] = id
    if around:
        # Names without spaces and colons, which a token may have.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*["<bos>"] * ("bos" in around), "$A", *["<eos>"] * ("eos" in around)],
            special_tokens=[{"id": f"<{name}>", "ids": [id], "tokens": [tokens[id]]} for name, id in around.items()],
        )


def _token(path: Path, name: str, tokens: Sequence[str], entries: Mapping[str, Any]) -> int | None:
    if (id := _special_id(name, entries)) is not None and (not isinstance(id, int) or not 0 <= id < len(tokens)):
        raise InputError(f"{path}: {_TOKENS}{name}_token_id {shown(id)} is none of {len(tokens):,} tokens")
    return id


def _special_id(name: str, entries: Mapping[str, Any]) -> Any:
    """Id of a special token by the file, or by llama.cpp's defaults for SentencePiece; not checked."""
    usual = {"unknown": 0, "bos": 1, "eos": 2} if entries.get(f"{_TOKENS}model") == "llama" else {}
    id = entries.get(f"{_TOKENS}{name}_token_id")
    return usual.get(name) if id is None else id


def _list(path: Path, name: str, entries: Mapping[str, Any]) -> list[Any]:
    if not isinstance(values := entries.get(f"{_TOKENS}{name}"), list):
        raise InputError(f"{path} has no {_TOKENS}{name}, which its tokenizer needs")
    return values
