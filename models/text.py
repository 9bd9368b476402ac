"""Text to token ids and back, by a model's tokenizer and chat template, or by bytes for a random model."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from haarkv.models.catalog import open_source, tokenizer_source_of
from haarkv.models.config import ModelConfig
from haarkv.models.gguf_tokenizer import LINEAR, ends_a_part
from haarkv.models.limited import Messages, Spellings, TooMuchError, answer, render
from haarkv.models.limited_worker import MarkedTokenizer
from haarkv.models.source import Source
from haarkv.tq_ops.errors import InputError

_SIGNS = sorted(ByteLevel.alphabet())
_LATIN1_BYTES = {sign: ord(sign) for sign in _SIGNS if ord(sign) < 256}
_BYTES = _LATIN1_BYTES | dict(
    zip(_SIGNS[len(_LATIN1_BYTES) :], sorted(set(range(256)) - set(_LATIN1_BYTES.values())), strict=True)
)
"""Byte of each character of a byte-level token: its code point, or beyond 255 one of the remaining bytes, in order."""
_ANSWER = "haarkv-answer"
_TURNS = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", _ANSWER), ("user", "2"))]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextStream(Protocol):
    """Decodes tokens one by one; the pieces, joined, are `Tokenizer.decode`."""

    def push(self, token_id: int) -> str:
        """Text that is complete now."""

    def end(self) -> str:
        """Text of an incomplete character after the last token."""


class Tokenizer(Protocol):
    """What generation needs of a tokenizer; `unused_ids` are rows of the embedding without a token."""

    has_chat_template: bool
    unused_ids: tuple[int, ...]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def encode_chat(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any] | None = None, parse_special: bool = False
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of conversations, each up to where the answer begins.

        Args:
            conversations: messages, each a `role` and a `content`.
            arguments: of the chat template.
            parse_special: added tokens that messages and arguments spell are these tokens; else they are text.
        Raises:
            InputError: no chat template, or one that refuses a conversation, a system message or an argument.
        """

    def vocabulary(self) -> Mapping[str, int]:
        """Id of every token by name."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""

    def stream(self) -> TextStream:
        """A decoder of one text, token by token."""


class SourceTokenizer:
    """The tokenizer of a source; an InputError if it cannot be read, or has tokens that the model lacks."""

    def __init__(self, source: Source, config: ModelConfig) -> None:
        words = source.words()
        self._tokenizer, self._words = words.tokenizer, words
        self._patterns = any(map(_has_pattern, (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer)))
        if _has_pattern(self._tokenizer.decoder):
            raise InputError(f"{words.path}: its decoder has a regular expression, which might run for ever; none is built")
        # What training may have left switched on would shorten prompts in silence, or lengthen them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        largest = max(vocabulary.values(), default=0)
        if largest >= config.vocab_size:
            raise InputError(f"{words.path} has a token {largest}, the model has only {config.vocab_size} of them")
        self._pieces = _Pieces(self._tokenizer)
        self.has_chat_template = bool(words.templates)
        self._spellings, self._respelled = dict[str, Spellings](), dict[str, MarkedTokenizer]()  # those used last
        self._named_ends = (*config.eos_token_ids, *words.ends)
        tokens = (id for token, id in vocabulary.items() if not token.startswith("[PAD") or token != f"[PAD{id}]")
        self.unused_ids = tuple(sorted(set(range(config.vocab_size)).difference(tokens)))

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ends by the model's files and by the chat template, which is rendered once."""
        return tuple(dict.fromkeys((*self._named_ends, *self._turn_end())))

    def _turn_end(self) -> list[int]:
        """The token behind an answer in the chat template, if it is one."""
        if self._words.template is None:
            return []
        try:
            text = render(self._words.template, [_TURNS], self._words.special, {})[0]
        except InputError:  # it says so where it is used
            return []
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        suffix = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
        first = [
            (len(token.content), id)
            for id, token in added_tokens.items()
            if token.content and suffix.startswith(token.content)
        ]
        return [id for _, id in sorted(first)[-1:] if not ends_a_part(added_tokens[id].content, self._tokenizer.token_to_id)]

    def encode(self, text: str) -> list[int]:
        return self._encode([text], special_tokens=True)[0]

    def encode_chat(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any] | None = None, parse_special: bool = False
    ) -> list[list[int]]:  # fmt: skip
        arguments = arguments or {}
        source, mark = self._template(with_tools=arguments.get("tools") is not None), ""
        if not parse_special:
            spellings = self._spellings.get(source)  # threads may share a tokenizer
            if spellings is None:
                normalizes = not _has_pattern(self._tokenizer.normalizer)
                spellings = Spellings(self._tokenizer, source, normalizes=normalizes)
                self._spellings = {source: spellings}
            mark, conversations, arguments = spellings.mark_spellings(conversations, arguments)
        texts = render(source, conversations, self._words.special, arguments)
        for messages, text in zip(conversations, texts, strict=True):
            first, content = messages[0], messages[0]["content"]
            if first["role"] == "system" and content.strip() not in text:
                # Some take a switch out of it and read the rest; to one that is deaf any other says the same.
                other = [{**first, "content": f"{content} x"}, *messages[1:]]
                if render(source, [other], self._words.special, arguments) == [text]:
                    raise InputError(
                        "this model's chat template ignores system messages; drop --system, or say it in the prompt"
                    )
        return self._encode(texts, special_tokens=False, mark=mark)

    def _template(self, *, with_tools: bool) -> str:
        templates = self._words.templates
        if (source := (templates.get("tool_use") if with_tools else None) or self._words.template) is None:
            several = (
                f"{self._words.path}: none of its chat templates is the default: {', '.join(templates)}; --no-chat uses none"
            )
            raise InputError(several if templates else "this model has no chat template; drop --chat")
        return source

    def _encode(self, texts: Sequence[str], *, special_tokens: bool, mark: str = "") -> list[list[int]]:
        """Token ids, by a limited process where a regular expression may not end; `mark` as of `Spellings`."""
        if not self._patterns or self._words.file is None:
            if mark:
                if (marked_tokenizer := self._respelled.get(mark)) is None:
                    marked_tokenizer = MarkedTokenizer(self._tokenizer, mark)  # it takes seconds for a large vocabulary
                    self._respelled = {mark: marked_tokenizer}
                return list(map(marked_tokenizer.ids, texts))
            return [list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids) for text in texts]
        file = str(self._words.file.absolute())
        request = {"tokenizer": file, "texts": list(texts), "special_tokens": special_tokens, "mark": mark}
        try:
            reply = answer(request)
        except TooMuchError as error:
            raise InputError(
                f"{self._words.path} cannot be used: its regular expression fails on this text, or {error}"
            ) from None
        if "error" in reply:
            raise InputError(f"{self._words.path} cannot be used: {reply['error']}")
        return [[int(token) for token in ids] for ids in reply["ids"]]

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.end()

    def stream(self) -> TextStream:
        return _Stream(self._pieces)


def _has_pattern(part: Any) -> bool:
    """Whether a part of a tokenizer has a regular expression that is none of `LINEAR`."""
    if part is None:
        return False
    state = part.__getstate__().decode()
    return '"Regex"' in state and any(pattern not in LINEAR for pattern in _regular_expressions(json.loads(state)))


def _regular_expressions(state: Any) -> Iterator[object]:
    """Every `Regex` in a part of `tokenizer.json`."""
    if isinstance(state, dict):
        if "Regex" in state:
            yield state["Regex"]
        state = list(state.values())
    if isinstance(state, list):
        for value in state:
            yield from _regular_expressions(value)


class _Pieces:
    """UTF-8 bytes that each token adds to a text."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        decoder = tokenizer.decoder
        decoder_json = "" if decoder is None else decoder.__getstate__().decode()
        self._byte_level, self._fallback = '"type":"ByteLevel"' in decoder_json, '"type":"ByteFallback"' in decoder_json
        # Behind bytes, a space may be spelled by them.
        self._spaces = 0 <= decoder_json.find('"type":"ByteFallback"') < decoder_json.find('"type":"Metaspace"')
        self._text = " ".join if decoder is None else decoder.decode
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def spelling(self, token_id: int) -> str | None:
        """The token in the vocabulary; None if text does not show it."""
        return None if token_id in self._special else self._tokenizer.id_to_token(token_id)

    def shown(self, text: str) -> str:
        """Decoded bytes as the decoder shows them."""
        return text.replace("▁", " ") if self._spaces else text

    def piece(self, token: str, before: str | None) -> bytes:
        """Bytes of a token behind the token `before`, or at the beginning."""
        if self._byte_level:
            codes = [_BYTES.get(sign) for sign in token]
            return token.encode() if None in codes else bytes(codes)  # type: ignore[arg-type]
        if self._fallback and (byte := _BYTE.fullmatch(token)) and (before is not None or byte[1] > "7F"):
            return bytes.fromhex(byte[1])
        if before is None:
            return self._text([token]).encode()
        # What the decoder makes of a token depends on the one before it at most: whether there is one, and how it ends.
        return self._text([before, token])[len(self._text([before])) :].encode()


class _Stream:
    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._before: str | None = None
        self._characters = getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if (token := self._pieces.spelling(token_id)) is None:
            return ""
        piece, self._before = self._pieces.piece(token, self._before), token
        return self._pieces.shown(self._characters.decode(piece))

    def end(self) -> str:
        return self._characters.decode(b"", final=True)


class ByteTokenizer:
    """For random models: a token is a UTF-8 byte; output shows numbers."""

    has_chat_template = False
    eos_token_ids: tuple[int, ...] = ()
    unused_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any] | None = None, parse_special: bool = False
    ) -> list[list[int]]:  # fmt: skip
        raise InputError("a random model has no chat template; drop --chat")

    def vocabulary(self) -> Mapping[str, int]:
        return {f"<{byte}>": byte for byte in range(256)}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.push(i) for i in ids)

    def stream(self) -> TextStream:
        return self

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def end(self) -> str:
        return ""


def load_tokenizer(name: str | Path, config: ModelConfig) -> Tokenizer:
    """Tokenizer of a model by name."""
    source = tokenizer_source_of(name)
    return ByteTokenizer() if source is None else SourceTokenizer(source, config)


def generation_settings(name: str) -> dict[str, float]:
    """`Source.sampling` of a model by name."""
    source = open_source(name)
    return {} if source is None else source.sampling()
