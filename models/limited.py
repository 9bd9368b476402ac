"""Chat templates and regular expressions of a model run in a process with limited time and memory, and without control tokens
in messages.

jinja2's sandbox keeps a template from files and Python's internals, not from endless loops or huge strings. The process stays
for the next request.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from haarkv.models import limited_worker
from haarkv.models.limited_worker import visible
from haarkv.tq_ops.errors import InputError

_WAITS = 3
"""Seconds of waiting for each second that the process may compute."""
# -P: no module where the file or the user stands can take the place of Python's own.
_COMMAND = (sys.executable, "-P", limited_worker.__file__)
_LOCK = threading.Lock()
_RUNNING: dict[int, subprocess.Popen[bytes]] = {}
"""The process by its parent's id: a fork must not use its parent's pipes."""


class TooMuchError(Exception):
    """A request took more time or memory than allowed."""


def answer(request: Mapping[str, object]) -> dict[str, Any]:
    """The reply of `limited_worker`; a TooMuchError if it was killed, and the next request starts another."""
    line = json.dumps(request).encode()
    most, memory = limited_worker.allowance(request, len(line))
    with _LOCK:
        if (process := _RUNNING.get(os.getpid())) is None:
            pipe = subprocess.PIPE
            # In a group of its own: Ctrl-C is not meant for it.
            process = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
            _RUNNING[os.getpid()] = process
        assert process.stdin
        assert process.stdout
        clock, reply = threading.Timer(_WAITS * most, process.kill), b""
        clock.start()
        try:
            with suppress(BrokenPipeError):  # it was ended between two requests
                process.stdin.write(line + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
        finally:
            clock.cancel()
            if not reply:
                process.kill()
                process.wait()
                del _RUNNING[os.getpid()]
    if not reply:
        raise TooMuchError(f"it takes more than {most} s or {memory >> 20} MiB")
    return json.loads(reply)  # type: ignore[no-any-return]


RESERVED_NAMES = ("messages", "add_generation_prompt")
"""Names in chat templates that are no arguments."""


def render(
    source: str, conversations: Sequence[Sequence[Mapping[str, str]]], special: Mapping[str, str],
    arguments: Mapping[str, object],
) -> list[str]:  # fmt: skip
    """Texts of conversations by a chat template, each up to where the answer begins.

    Args:
        special: texts of special tokens by name, such as `eos_token`.
        arguments: such as `enable_thinking`; they replace special tokens of the same name.
    Raises:
        InputError: the template cannot be read, reads no such argument, refuses a conversation, or does not end.
    """
    try:
        reply = answer({"source": source, "conversations": conversations, "special": special, "arguments": arguments})
    except TooMuchError as error:
        reply = {"error": error}
    if "unread" in reply:
        name, read = reply["unread"][0], [name for name in reply["read"] if name not in RESERVED_NAMES]
        near, read_names = get_close_matches(name, read, n=1), ", ".join(read) or "none"
        meant = f"did you mean {near[0]}?" if near else f"it reads {read_names}"
        raise InputError(f"the chat template reads no argument {name}; {meant}")
    if "error" in reply:
        raise InputError(f"the chat template cannot be used: {reply['error']}; --no-chat goes without it")
    return [str(text) for text in reply["texts"]]


# Private use; and letters, where a normalizer drops what is none.
_MARKS = tuple(map(chr, chain(range(0xE000, 0xE080), range(0x13000, 0x13400), range(0xF0000, 0xFFFFE))))

_TAG = re.compile("</?(?!think>)[a-z][a-z0-9]*>")

Messages = Sequence[Mapping[str, Any]]


class Spellings:
    """Finds control tokens that messages and arguments of a chat template spell, and marks them as text.

    Control tokens are added tokens, without spaces and without plain tags such as `<table>` that are not special and that the
    template does not spell. In the model's own answers only special ones count: a template looks for `<think>` there.

    Args:
        source: of the chat template.
        normalizes: the tokenizer's normalizer may be called.
    """

    def __init__(self, tokenizer: FastTokenizer, source: str, *, normalizes: bool) -> None:
        added_tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if visible(token.content)]
        control = [each for each in added_tokens if each.special or each.content in source or not _TAG.fullmatch(each.content)]
        self._all = {token.content: token.special for token in control}
        self._beginnings = {token[:length] for token in self._all for length in range(1, len(token))}
        self._longest = max(map(len, self._all), default=1)
        self._elsewhere = source + "".join(token.content for token in added_tokens)
        normalizer = tokenizer.normalizer if normalizes else None
        self._normalize = normalizer.normalize_str if normalizer else str
        self._normalized = {normalizer.normalize_str(token.content) for token in control if normalizer and token.normalized}

    def mark_spellings(
        self, conversations: Sequence[Messages], arguments: Mapping[str, Any]
    ) -> tuple[str, Sequence[Messages], Mapping[str, Any]]:
        """(mark, conversations, arguments) with the mark behind the first character of each spelling; "" marks nothing.

        Raises:
            InputError: every character that may be a mark is in use.
        """
        json_text = json.dumps([conversations, arguments], ensure_ascii=False)
        mark = next((mark for mark in _MARKS if self._is_free(mark, json_text)), None)
        if mark is None:
            raise InputError("the messages hold every character of private use; leave some out, or give --parse-special")
        marked_conversations = [
            [{key: text if key == "role" else self._each(text, mark, message.get("role") == "assistant")
              for key, text in message.items()} for message in messages] for messages in conversations
        ]  # fmt: skip
        with_marks = self._each(arguments, mark)
        if mark not in json.dumps([marked_conversations, with_marks], ensure_ascii=False) and not self._spelled_otherwise(
            json_text
        ):
            return "", conversations, arguments
        return mark, marked_conversations, with_marks

    def _is_free(self, mark: str, json_text: str) -> bool:
        spellings = (mark, json.dumps(mark)[1:-1])  # the second by a template that asks for ASCII
        in_use = any(form in text for form in spellings for text in (json_text, self._elsewhere))
        return not in_use and mark in self._normalize(f"a{mark}a")

    def _spelled_otherwise(self, json_text: str) -> bool:
        """Whether the normalizer makes a spelling of other text."""
        return bool(self._normalized) and any(token in self._normalize(json_text) for token in self._normalized)

    def _each(self, value: Any, mark: str, answer: bool = False) -> Any:
        """A value with its texts marked."""
        if isinstance(value, str):
            places = set(self._places(value, answer))
            return "".join(sign + mark * (at in places) for at, sign in enumerate(value)) if places else value
        if isinstance(value, Mapping):
            return {key: self._each(item, mark, answer) for key, item in value.items()}
        return [self._each(item, mark, answer) for item in value] if isinstance(value, list | tuple) else value

    def _places(self, text: str, answer: bool) -> Iterator[int]:
        """Positions of spellings, and of beginnings of one at the text's end."""
        for token, special in self._all.items():
            if (special or not answer) and token in text:
                yield from (match.start() for match in re.finditer(f"(?={re.escape(token)})", text))
        end = text.rstrip()
        yield from (at for at in range(max(0, len(end) - self._longest), len(end)) if end[at:] in self._beginnings)
