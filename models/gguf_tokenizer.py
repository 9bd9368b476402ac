"""Tokenizers of GGUF files: the same tokens as llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from haarkv.models.source import Words, checked_templates
from haarkv.tq_ops.errors import InputError

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
        vocabulary = {token: id for id, token in enumerate(tokens) if isinstance(token, str)}
        ids += [vocabulary[name] for name in _ENDS if name in vocabulary and not ends_a_part(name, vocabulary.get)]
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
    pairs = [tuple(_require_text(path, "merges", merge).split(" ", 1)) for merge in _list(path, "merges", entries)]
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
    merges = [pair for _, pair in sorted(_merges(vocabulary, scores), key=lambda merge: merge[0])]
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


def _merges(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    """(sort key, pair) of every two tokens that make a token."""
    for token, id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield (-scores[id], vocabulary[left], vocabulary[right]), (left, right)


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


def _require_text(path: Path, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{path}: {_TOKENS}{name} holds {shown(value)}, which is no text")
    return value
