"""A tokenizer in Hugging Face's format as the entries of a GGUF file, by which llama.cpp makes the same tokens of a text.

llama.cpp knows a way of cutting text by its name alone, and merges SentencePiece's tokens by their scores. So what is written
is read again, as `gguf_words` reads any file, and compared: a tokenizer that would then give other tokens is refused. What it
does to some texts before it cuts them, such as to compose characters (NFC), llama.cpp does to none: that is told of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from haarkv.models.gguf_words import (
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
    named_ends,
    pre_tokenizer_of,
    words_of,
)  # fmt: skip
from haarkv.models.source import Words
from haarkv.models.text import has_patterns
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.warn import warn


def entries_of(words: Words, rows: int, ids: Mapping[str, int | None]) -> dict[str, Any]:
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
    known = words.tokenizer.get_vocab(with_added_tokens=True)
    if max(known.values(), default=0) >= rows:
        raise InputError(f"{words.path} has more tokens than the embedding's {rows:,}")
    tokens = [f"[PAD{id}]" for id in range(rows)]
    for token, id in known.items():
        tokens[id] = token
    pieces = bool(state["model"].get("byte_fallback"))
    found: dict[str, Any] = {"model": "llama" if pieces else "gpt2", "pre": "default" if pieces else _pre(words, state)}
    found |= {"tokens": tokens, "token_type": _kinds(state, tokens, set(known))}
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in state["model"]["merges"]]
    if not merges:
        raise InputError(f"{words.path}: its tokenizer merges nothing, and llama.cpp has none without merges")
    if pieces:
        found |= {"scores": _scores(tokens, merges), "add_space_prefix": "Prepend" in json.dumps(state["normalizer"])}
    else:
        found["merges"] = [" ".join(merge) for merge in merges]
    around = words.tokenizer.encode("").ids
    found |= {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    found |= {"add_bos_token": ids.get("bos") in around, "add_eos_token": bool(around) and around[-1] != ids.get("bos")}
    entries = {f"{TOKENS}{key}": value for key, value in found.items()}
    entries |= {TEMPLATE + f".{name}" * (name != "default"): source for name, source in words.templates.items()}
    if others := [name for name in words.templates if name != "default"]:
        entries[f"{TEMPLATE}s"] = others
    _compare(words, words_of(words.path, entries, rows).tokenizer)
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


def _kinds(state: Mapping[str, Any], tokens: Sequence[str], known: set[str]) -> list[int]:
    added = {of["content"]: CONTROL if of["special"] else USER_DEFINED for of in state["added_tokens"]}
    unknown, pieces = state["model"].get("unk_token"), bool(state["model"].get("byte_fallback"))

    def kind(token: str) -> int:
        if token not in known:
            return UNUSED
        if token == unknown:
            return UNKNOWN
        is_byte = pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return added.get(token, BYTE if is_byte else NORMAL)

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


def special_ids(words: Words, ends: Sequence[int], said: Mapping[str, Any], path: Path) -> dict[str, int | None]:
    """Ids of special tokens, by llama.cpp's names: BOS, up to three that end a text, padding.

    Args:
        ends: tokens that end a text.
        said: the model's `config.json`, which may name a BOS that the tokenizer does not.
    Raises:
        InputError: more tokens end a text than a file can say, beside those that are known by name.
    """
    ids = words.tokenizer.token_to_id
    named = {name: ids(words.special[key]) for name, key in SPECIAL.items() if name != "eos" and key in words.special}
    if named.get("bos") is None and isinstance(said.get("bos_token_id"), int):
        named["bos"] = said["bos_token_id"]
    by_name = named_ends(words.tokenizer.get_vocab(with_added_tokens=True))
    order = [*ends[:1], *sorted(ends[1:], key=by_name.__contains__)]
    if not set(order[3:]) <= set(by_name):
        raise InputError(f"{path}: {len(ends)} tokens end a text, and a GGUF file names three; {_ELSE}")
    return named | dict(zip(("eos", "eot", "eom"), order, strict=False))
