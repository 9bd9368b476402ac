"""Text in and out: prompts as token ids, and text from tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from reprlib import repr as shown
from typing import Any

from haarkv.models.templates import RESERVED_NAMES
from haarkv.models.text import TextStream, Tokenizer
from haarkv.tq_ops.errors import InputError, count_noun

# -- Prompts -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """How texts become messages.

    Attributes:
        chat: apply the chat template; None if the tokenizer has one.
        template_args: further JSON-like names that the template reads, such as `enable_thinking`.
        parse_special: let a message spell added tokens, such as `<|im_end|>`; else that is text.
    """

    chat: bool | None = None
    system: str | None = None
    template_args: Mapping[str, Any] | None = None
    parse_special: bool = False

    def encode(self, tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts.

        Raises:
            InputError: an option needs a template that is missing or fails; or a text is not valid Unicode.
        """
        wrap = tokenizer.has_chat_template if self.chat is None else self.chat
        for what, option in self._template_requests():
            if not wrap:
                why = "--no-chat leaves it out" if tokenizer.has_chat_template else "this model has none"
                raise InputError(f"{what} needs a chat template, and {why}; drop {option}")
        _require_unicode(self.system or "", "the system message")
        self._require_arguments()
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        conversations = [[*first, {"role": "user", "content": text}] for text in texts]
        if wrap and (texts or self.template_args):
            return self.encode_messages(tokenizer, conversations)
        return list(map(tokenizer.encode, texts))

    def encode_messages(self, tokenizer: Tokenizer, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        """Token ids of conversations of messages."""
        return tokenizer.encode_chat(conversations, self.template_args, self.parse_special)

    def require_nothing_said(self) -> None:
        """Refuse template options for a stored sequence that goes on without a prompt."""
        for _, option in (*self._template_requests(), *[("", "--chat")] * bool(self.chat)):
            why = "the stored text itself goes on, which no chat template wraps"
            raise InputError(f"{why}; leave out {option}, or give a prompt")

    def _template_requests(self) -> list[tuple[str, str]]:
        """Template options in use: (what, option)."""
        requests = [("a system message", "--system")] * (self.system is not None)
        requests += [("an argument of the chat template", "--template-arg")] * bool(self.template_args)
        return requests + [("a token that a message spells", "--parse-special")] * self.parse_special

    def _require_arguments(self) -> None:
        try:
            arguments = dict(self.template_args or {})
            text = json.dumps(arguments, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"arguments of a chat template are names with values that JSON can hold: {error}") from None
        for name in arguments:
            if not isinstance(name, str) or name in RESERVED_NAMES:
                raise InputError(f"{shown(name)} is no argument of a chat template: prompts and messages say it")
        _require_unicode(text, "an argument of the chat template")


def encode(tokenizer: Tokenizer, vocab_size: int, prompts: Sequence[str | Sequence[int]], chat: Chat) -> list[list[int]]:
    """Token ids of prompts; lists of ids stay as they are.

    Raises:
        InputError: an empty prompt, or neither text nor valid token ids; or as `Chat.encode`.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    prompt_ids = [_token_ids(prompt, f"prompt {number}", vocab_size) for number, prompt in enumerate(prompts, 1)]
    text_ids = iter(chat.encode(tokenizer, texts))
    encoded = [next(text_ids) if isinstance(prompt, str) else ids for prompt, ids in zip(prompts, prompt_ids, strict=True)]
    if [] in encoded:
        raise InputError(f"prompt {encoded.index([]) + 1} is empty; give at least one token of text")
    return encoded


def _token_ids(prompt: object, what: str, vocab_size: int) -> list[int]:
    """Checked ids of a prompt of token ids; [] for a text, which is checked too."""
    if isinstance(prompt, str):
        _require_unicode(prompt, what)
        ids, empty = [], not prompt
    else:
        try:
            ids = [index(token) for token in prompt]  # type: ignore[attr-defined]
        except TypeError:
            raise InputError(f"{what} is neither a text nor a list of token ids: {shown(prompt)}") from None
        empty = not ids
    if empty:
        raise InputError(f"{what} is empty; give at least one character")
    if not all(0 <= token < vocab_size for token in ids):
        raise InputError(f"{what} has a token that is none of this model's {vocab_size:,}")
    return ids


def context_for(
    ids: Sequence[Sequence[int]], limit: int, max_new_tokens: int, max_context: int | None = None,
    on_warning: Callable[[str], object] | None = None,
) -> int:  # fmt: skip
    """Tokens that the cache must hold for each prompt.

    Args:
        limit: the model's positions.
        max_context: requested tokens; by default as many as needed, up to `limit`.
        on_warning: called if the context cuts a text short.
    Raises:
        InputError: a prompt that does not fit, or an invalid number.
    """
    require_count("max_new_tokens", max_new_tokens)
    if max_context is not None:
        require_count("max_context", max_context, least=0)
    longest = max(map(len, ids), default=0)
    if max_context is not None and not 1 <= max_context <= limit:
        raise InputError(f"this model has a context of {limit} tokens; --max-context must lie in 1 … {limit}")
    if longest > limit:
        raise InputError(f"the longest prompt has {longest} tokens, this model's context only {limit}; shorten it")
    context = max_context or min(limit, longest + max_new_tokens)
    if longest > context:
        raise InputError(f"a prompt has {count_noun(longest, 'token')}, the cache holds {context}; raise --max-context")
    # The last token is predicted and never stored.
    if on_warning and longest <= context < longest + max_new_tokens - 1:
        tokens = f"{context - longest + 1} of {count_noun(max_new_tokens, 'new token')}"
        on_warning(
            f"the context ends after {tokens}: the prompt has {count_noun(longest, 'token')}, the context {context}; "
            + ("raise --max-context" if context < limit else "shorten the prompt or lower --max-new-tokens")
        )
    return context


def _require_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid UTF-8; convert it first") from None


# -- What comes --------------------------------------------------------------------------------------------------------------


class GrowingText:
    """Emits text once it is certain: no half character, and no possible beginning of a stop string.

    Attributes:
        text: all so far, without a stop string and what follows it.
        stopped: a stop string has come.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = stream, stops
        self.text, self._given = "", 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Newly certain text after one more token."""
        return "" if self.stopped else self._grow(self._stream.push(token), at_end=False)

    def end(self) -> str:
        """The rest after the last token."""
        return "" if self.stopped else self._grow(self._stream.end(), at_end=True)

    def _grow(self, piece: str, *, at_end: bool) -> str:
        looked_at = max(0, len(self.text) - max(map(len, self._stops), default=0) + 1)
        self.text += piece
        if (end := _first(self.text, self._stops, looked_at)) is not None:
            self.stopped, self.text = True, self.text[:end]
        certain = len(self.text) - (0 if self.stopped or at_end else self._pending_length())
        start, self._given = self._given, max(self._given, certain)
        return self.text[start : self._given]

    def _pending_length(self) -> int:
        """Length of the longest suffix that begins a stop string."""
        text = self.text
        beginnings = (stop[:n] for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)))
        return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


class Texts:
    """The growing texts of one `Session.generate`."""

    def __init__(
        self, tokenizer: Tokenizer, count: int, stops: Sequence[str], on_token: Callable[[int, int], object] | None,
        on_text: Callable[[int, str], object] | None,
    ) -> None:  # fmt: skip
        self._on_token, self._on_text = on_token, on_text
        self._growing = [GrowingText(tokenizer.stream(), stops) for _ in range(count)]

    def push(self, number: int, token: int) -> bool:
        """Take a token; whether its text ends there."""
        ends = self._on_token is not None and self._on_token(number, token) is True
        growing = self._growing[number]
        if (text := growing.push(token)) and self._on_text:
            self._on_text(number, text)
        return growing.stopped or ends

    def finish(self) -> list[str]:
        """The whole texts; emits what was held back."""
        for number, growing in enumerate(self._growing):
            if (rest := growing.end()) and self._on_text:
                self._on_text(number, rest)
        return [growing.text for growing in self._growing]


def stop_list(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings from one or several; empty ones and non-texts are refused."""
    try:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        stops = (stop,)  # type: ignore[assignment]
    if strange := [text for text in stops if not isinstance(text, str)]:
        raise InputError(f"a stop is a text, or several, not {strange[0]!r}")
    if not all(stops):
        raise InputError("a stop text is empty; give at least one character after --stop")
    return stops


def _first(text: str, stops: Sequence[str], begin: int) -> int | None:
    """Start of the stop string that completes first, or None; the longest of those that end together."""
    places = [(at + len(stop), at) for stop in stops if (at := text.find(stop, begin)) >= 0]
    return min(places)[1] if places else None


# -- Arguments -----------------------------------------------------------------------------------------------------------
def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse an argument that is no integer, or below `least`."""
    try:
        count = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None
    if count < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
