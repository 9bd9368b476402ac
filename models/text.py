"""Text to token ids and back, by a model's tokenizer and chat template, or by bytes for a random model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from haarkv.models.catalog import open_source
from haarkv.models.config import ModelConfig
from haarkv.models.gguf_metadata import ends_a_part
from haarkv.models.source import Source
from haarkv.models.templates import Messages, render
from haarkv.tq_ops.errors import InputError

_WITHOUT_TOKENIZER = ("tiny-draft", "tiny-hybrid")
"""Shipped models whose tokenizer is that of `tiny`."""
_ANSWER = "haarkv-answer"
_TURNS = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", _ANSWER), ("user", "2"))]
_TAG = re.compile("</?(?!think>)[a-z][a-z0-9]*>")
_MARKS = range(0xE000, 0xF900)
"""Characters of private use."""
_UNFINISHED = "\ufffd"
"""How a decoder shows bytes that are no whole character."""


class TextStream:
    """Decodes tokens one by one; the pieces, joined, are the text.

    What a token adds is the difference that it makes behind the tokens of the piece before.

    Args:
        hidden: ids that text does not show.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Container[int] = ()) -> None:
        self._decode, self._hidden = decode, hidden
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is complete now."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._before + self._pending)
        return "" if text.endswith(_UNFINISHED) else self._piece(text)

    def end(self) -> str:
        """Text of an incomplete character after the last token."""
        return self._piece(self._decode(self._before + self._pending))

    def _piece(self, text: str) -> str:
        before, pending = self._decode(self._before), self._pending
        self._before, self._pending = pending, []
        # A byte that begins no character spoils the whole run of byte tokens before it.
        return text[len(before) :] if text.startswith(before) else self._decode(pending)


class Tokenizer:
    """The tokenizer of a source; an InputError if it cannot be read, or has tokens that the model lacks.

    Attributes:
        unused_ids: rows of the embedding without a token.
    """

    def __init__(self, source: Source, config: ModelConfig) -> None:
        words = source.words()
        self._tokenizer, self._words = words.tokenizer, words
        # What training may have left switched on would shorten prompts in silence, or lengthen them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        largest = max(vocabulary.values(), default=0)
        if largest >= config.vocab_size:
            raise InputError(f"{words.path} has a token {largest}, the model has only {config.vocab_size} of them")
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._hidden = {id for id, token in self._added.items() if token.special}
        self.has_chat_template = bool(words.templates)
        self._spellings = dict[str, tuple[re.Pattern[str], re.Pattern[str]]]()  # of the template used last
        self._named_ends = (*config.eos_token_ids, *words.ends)
        tokens = (id for token, id in vocabulary.items() if not token.startswith("[PAD") or token != f"[PAD{id}]")
        self.unused_ids = tuple(sorted(set(range(config.vocab_size)).difference(tokens)))

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by the model's files and by the chat template, which is rendered once."""
        return tuple(dict.fromkeys((*self._named_ends, *self._turn_end())))

    def _turn_end(self) -> list[int]:
        """The token behind an answer in the chat template, if it is one."""
        if self._words.template is None:
            return []
        try:
            text = render(self._words.template, [_TURNS], self._words.special, {})[0]
        except InputError:  # it says so where it is used
            return []
        suffix = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
        first = [(len(token.content), id) for id, token in self._added.items() if suffix.startswith(token.content or "\0")]
        return [id for _, id in sorted(first)[-1:] if not ends_a_part(self._added[id].content, self._tokenizer.token_to_id)]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self._encode(text, special_tokens=True)

    def encode_chat(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any] | None = None, parse_special: bool = False
    ) -> list[list[int]]:
        """Token ids of conversations, each up to where the answer begins.

        Args:
            conversations: messages, each a `role` and a `content`.
            arguments: of the chat template.
            parse_special: added tokens that messages and arguments spell are these tokens; else they are text.
        Raises:
            InputError: no chat template, or one that refuses a conversation, a system message or an argument.
        """
        arguments = arguments or {}
        source, mark = self._template(with_tools=arguments.get("tools") is not None), ""
        if not parse_special:
            mark, conversations, arguments = self._mark_spellings(source, conversations, arguments)
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
        # The second as JSON writes it where a template asks for ASCII.
        cuts = re.compile(rf"{mark}|\\u{ord(mark):04x}" if mark else "(?!)")
        return [[id for part in cuts.split(text) for id in self._encode(part)] for text in texts]

    def _template(self, *, with_tools: bool) -> str:
        templates = self._words.templates
        if (source := (templates.get("tool_use") if with_tools else None) or self._words.template) is None:
            several = (
                f"{self._words.path}: none of its chat templates is the default: {', '.join(templates)}; --no-chat uses none"
            )
            raise InputError(several if templates else "this model has no chat template; drop --chat")
        return source

    def _mark_spellings(
        self, source: str, conversations: Sequence[Messages], arguments: Mapping[str, Any]
    ) -> tuple[str, Sequence[Messages], Mapping[str, Any]]:
        """(mark, conversations, arguments) with the mark behind the first character of each control token that they spell.

        Text that is cut at the marks holds none of those tokens. Not looked at: normalizers that make one of other letters,
        and templates that print two texts side by side, where the end of one and the start of the next may spell one.
        """
        if (patterns := self._spellings.get(source)) is None:  # threads may share a tokenizer
            patterns = self._spelling_patterns(source)
            self._spellings = {source: patterns}
        json_text = json.dumps([conversations, arguments], ensure_ascii=False) + source
        # Neither it nor what JSON writes for it.
        marks = (chr(code) for code in _MARKS if chr(code) not in json_text and f"\\u{code:04x}" not in json_text)
        if (mark := next(marks, None)) is None:
            raise InputError("the messages hold every character of private use; leave some out, or give --parse-special")
        marked_conversations = [
            [{key: value if key == "role" else _mark_each(value, patterns[message.get("role") == "assistant"], mark)
              for key, value in message.items()} for message in messages] for messages in conversations
        ]  # fmt: skip
        return mark, marked_conversations, _mark_each(arguments, patterns[False], mark)

    def _spelling_patterns(self, source: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of the first character of control tokens: of all, and of special ones.

        Control tokens are added tokens that are more than spaces, without plain tags such as `<table>` that are not special
        and that the template does not spell. In the model's answers special ones count alone: templates look for `<think>`.
        """
        visible = [token for token in self._added.values() if token.content.replace("▁", " ").strip()]
        special = [token.content for token in visible if token.special]
        others = [
            token.content
            for token in visible
            if not token.special and (token.content in source or not _TAG.fullmatch(token.content))
        ]

        def pattern(tokens: Sequence[str]) -> re.Pattern[str]:
            return re.compile(f"(?={'|'.join(map(re.escape, tokens)) or '(?!)'})(.)", re.DOTALL)

        return pattern(special + others), pattern(special)

    def _encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
        except BaseException as error:  # the library's panic is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(f"{self._words.path} cannot be used: its regular expression fails on this text") from None

    def vocabulary(self) -> Mapping[str, int]:
        """Id of every token by name."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.end()

    def stream(self) -> TextStream:
        """A decoder of one text, token by token."""
        return TextStream(self._tokenizer.decode, self._hidden)


def _mark_each(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """A value with the mark behind each match in its texts."""
    if isinstance(value, str):
        return pattern.sub(rf"\1{mark}", value)
    if isinstance(value, Mapping):
        return {key: _mark_each(item, pattern, mark) for key, item in value.items()}
    return [_mark_each(item, pattern, mark) for item in value] if isinstance(value, list | tuple) else value


class ByteTokenizer(Tokenizer):
    """For random models: a token is a UTF-8 byte; output shows numbers."""

    eos_token_ids = ()

    def __init__(self) -> None:
        self.has_chat_template, self.unused_ids = False, ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any] | None = None, parse_special: bool = False
    ) -> list[list[int]]:
        raise InputError("a random model has no chat template; drop --chat")

    def vocabulary(self) -> Mapping[str, int]:
        return {f"<{byte}>": byte for byte in range(256)}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{id}>" for id in ids)

    def stream(self) -> TextStream:
        return TextStream(self.decode)


def load_tokenizer(name: str | Path, config: ModelConfig) -> Tokenizer:
    """Tokenizer of a model by name."""
    source = open_source("tiny" if str(name) in _WITHOUT_TOKENIZER else name)
    return ByteTokenizer() if source is None else Tokenizer(source, config)


def generation_settings(name: str) -> dict[str, float]:
    """`Source.sampling` of a model by name."""
    source = open_source(name)
    return {} if source is None else source.sampling()
