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
"""How keys of a tokenizer begin."""
_TEMPLATE = "tokenizer.chat_template"
"""Key of the usual chat template; a dot and its name follow for another."""
_SPECIAL = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token", "padding": "pad_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
"""Names of special tokens: as llama.cpp's keys spell them, and for chat templates."""
_MOST_TOKENS, _LONGEST_TOKEN = 2**22, 2**10
"""Several times what any vocabulary has; a token's characters, whose every cut in two is looked up."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = range(1, 5)
"""Kinds of tokens by tokenizer.ggml.token_type."""
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "<|return|>",
    "<|call|>", "<|flush|>", "<|calls|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Tokens that end an answer, whatever a file says of them; llama.cpp goes by the same names, and by </s>, which ends a text
only where the file says so here: in Qwen's and Gemma's vocabularies it is HTML."""
_PART_ENDS = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""Beside these <|end|> ends a part of an answer."""
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
"""llama.cpp's regular expressions, by tokenizer.ggml.pre: they cut a text one after the other, and what is left is merged."""
LINEAR = frozenset(pattern for patterns in _SPLITS.values() for pattern in patterns)
"""All of them: each looks at every character a few times at most."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
"""Those of `_SPLITS` where a piece that is a token stays whole, and each text begins with BOS unless the file says no."""


def end_token_ids(entries: Mapping[str, Any]) -> list[Any]:
    """Ids of the tokens that end a text: those that the entries of a file name, and those known by name; not checked."""
    tokens = entries.get(f"{_TOKENS}tokens")
    ids = [id for name in ("eos", "eot", "eom") if (id := _special_id(name, entries)) is not None]
    if isinstance(tokens, list):
        vocabulary = {token: id for id, token in enumerate(tokens) if isinstance(token, str)}
        ids += [vocabulary[name] for name in _ENDS if name in vocabulary and not ends_a_part(name, vocabulary.get)]
    return [id for at, id in enumerate(ids) if id not in ids[:at]]


def ends_a_part(token: str, find_id: Callable[[str], int | None]) -> bool:
    """Whether a token that ends other models' answers ends only a part of this one's, by the ids in its vocabulary."""
    return token == "<|end|>" and any(all(find_id(other) is not None for other in others) for others in _PART_ENDS)


def build_words(path: Path, entries: Mapping[str, Any], rows: int | None = None) -> Words:
    """The tokenizer and the chat template.

    Raises:
        InputError: there is no tokenizer, one of a kind that is not built, by name, or one that cannot be.
    """
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
    return Words(tokenizer, path, None, checked_templates(sources, path), special)


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
    """BPE whose merges are what the vocabulary implies: of two neighbours that make a token, those of the highest score."""
    scores = _list(path, "scores", entries)
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise InputError(f"{path}: {_TOKENS}scores has no number for each of {len(tokens):,} tokens")
    # Runs of spaces that are tokens are stored as spaces, and met by that spelling before a space is anything else.
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
    """Every pair of tokens that together are a token, with what it is sorted by."""
    for token, id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield (-scores[id], vocabulary[left], vocabulary[right]), (left, right)


def _add_special(path: Path, tokenizer: Tokenizer, tokens: Sequence[str], entries: Mapping[str, Any]) -> None:
    """Tokens that are met whole wherever a text spells them: control tokens, which no text shows, and the user's own."""
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
    path: Path,
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    ids: Mapping[str, int | None],
    entries: Mapping[str, Any],
    *,
    bos: bool,
) -> None:
    """Begin and end every text as the file says: `bos` says whether one begins with BOS where the file does not."""
    add_flags = {"bos": bool(entries.get(f"{_TOKENS}add_bos_token", bos)), "eos": bool(entries.get(f"{_TOKENS}add_eos_token"))}
    around: dict[str, list[str]] = {"bos": [], "eos": []}
    special: list[tuple[str, int]] = []
    for name in around:
        if add_flags[name]:
            if (id := ids[name]) is None:
                raise InputError(f"{path}: it asks for {name.upper()} around each text, and names no {_TOKENS}{name}_token_id")
            around[name].append(f"<{name}>")
            special.append((tokens[id], id))
    if special:
        # The template's own words are cut at spaces and colons, which a token may have in it; these names have none.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*around["bos"], "$A", *around["eos"]],
            special_tokens=[
                {"id": f"<{name}>", "ids": [ids[name]], "tokens": [tokens[ids[name]]]}  # type: ignore[index]
                for name in around
                if around[name]
            ],
        )


def _token(path: Path, name: str, tokens: Sequence[str], entries: Mapping[str, Any]) -> int | None:
    if (id := _special_id(name, entries)) is not None and (not isinstance(id, int) or not 0 <= id < len(tokens)):
        raise InputError(f"{path}: {_TOKENS}{name}_token_id {shown(id)} is none of {len(tokens):,} tokens")
    return id


def _special_id(name: str, entries: Mapping[str, Any]) -> Any:
    """Id of a special token as the file has it, or llama.cpp takes it for SentencePiece's; None if there is none."""
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
