"""The process of `limited`: renders chat templates and runs tokenizers within limits of time and memory.

It imports nothing of the project. In, a JSON object a line: {"source", "conversations", "special", "arguments"} of a template,
{"tokenizer", "texts", "special_tokens", "mark"} of a tokenizer. Out: {"texts"}, {"ids"}, {"error"}, or for arguments that the
template does not read {"unread", "read"}. A request beyond the limits ends the process without an answer.
"""

import json
import math
import re
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_S = 10
"""Seconds of computing for a request, and as many for each MiB of it."""
MOST_MEMORY, TOKENIZER_MEMORY = 2**29, 2**32
"""Bytes of memory, beside 64 times the request's; a tokenizer's library maps more than it uses."""
MOST_TEXT = 2**24
"""Characters that a template may add to the conversations."""


class RefusedError(Exception):
    """A template called `raise_exception`."""


def main() -> None:
    """Answer requests until there are no more."""
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        request, usage = json.loads(line), resource.getrusage(resource.RUSAGE_SELF)
        most_s, memory = allowance(request, len(line))
        # The system counts from the process's beginning.
        _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + most_s)
        _limit(resource.RLIMIT_AS, memory)
        try:
            answer = _ids(**request) if "tokenizer" in request else _texts(MOST_TEXT + len(line), **request)
        except MemoryError:
            raise SystemExit(1) from None
        except Exception as error:  # whatever the expressions in a template can raise
            answer = {"error": str(error)[:500] or type(error).__name__}
        print(json.dumps(answer), flush=True)


def allowance(request: object, size: int) -> tuple[int, int]:
    """Seconds of computing and bytes of memory for a request of `size` bytes."""
    memory = TOKENIZER_MEMORY if isinstance(request, dict) and "tokenizer" in request else MOST_MEMORY
    return MOST_S * (1 + (size >> 20)), memory + 64 * size


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    try:
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (ValueError, OSError):  # a system that knows no such limit
        return


def _texts(
    most: int, source: str, conversations: list[list[dict[str, str]]], special: dict[str, str], arguments: dict[str, object]
) -> dict[str, object]:
    from jinja2.meta import find_undeclared_variables

    environment = _environment()
    if arguments and (unread := arguments.keys() - (read := find_undeclared_variables(environment.parse(source)))):
        return {"unread": sorted(unread), "read": sorted(read - environment.globals.keys() - special.keys())}
    template, texts = environment.from_string(source), []
    for messages in conversations:
        # As transformers: a template sees that there are no tools and documents, as `none`.
        variables: dict[str, object] = {"tools": None, "documents": None, **special, **arguments}
        texts.append(template.render(messages=messages, add_generation_prompt=True, **variables))
        if sum(map(len, texts)) > most:
            raise RefusedError(f"it makes more than {MOST_TEXT:,} characters")
        texts[-1].encode()
    return {"texts": texts}


def _environment() -> Any:
    """transformers' filters and functions, and `{% generation %}`, which adds no text."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja's own

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block that is called has a scope of its own: what is set inside is not seen behind it.
            return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

        def _as_it_is(self, caller: Callable[[], str]) -> str:
            return caller()

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _ids(tokenizer: str, texts: list[str], special_tokens: bool, mark: str) -> dict[str, object]:
    """Token ids of texts, by the file of a tokenizer."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_buffer(Path(tokenizer).read_bytes().removeprefix("\ufeff".encode()))
    reader.no_truncation()
    reader.no_padding()
    if mark:
        return {"ids": list(map(MarkedTokenizer(reader, mark).ids, texts))}
    return {"ids": [list(reader.encode(text, add_special_tokens=special_tokens).ids) for text in texts]}


class MarkedTokenizer:
    """A tokenizer that reads marked spellings of added tokens as text.

    Its added tokens have a mark behind their first character. `ids` puts that mark into those that are tokens and drops it
    from the marked ones, so that one pass cuts and merges the text as the original tokenizer would.

    Args:
        mark: a character that no text and no token holds.
    """

    def __init__(self, tokenizer: "Tokenizer", mark: str) -> None:
        from tokenizers import Tokenizer

        state = json.loads(tokenizer.to_str())
        model, added_tokens, self._tokenizer, self._mark = state["model"], state["added_tokens"], tokenizer, mark
        # As JSON and Python write the mark where a template asks for letters alone.
        self._marks = re.compile(f"{mark}|{re.escape(json.dumps(mark)[1:-1])}")
        names = {text: text[0] + mark + text[1:] for text in (token["content"] for token in added_tokens) if visible(text)}
        for token in added_tokens:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if "merges" in model:  # no added token comes of merging
            model["merges"] = [pair for pair in model["merges"] if names.keys().isdisjoint((*pair, "".join(pair)))]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        self._again = Tokenizer.from_str(json.dumps(state | {"post_processor": None}))
        old = dict(tokenizer.get_vocab())
        self._names = {old[token]: (token, name) for token, name in names.items()}
        self._old = {self._again.token_to_id(name): old[token] for token, name in names.items()}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text with marks."""
        encoding, pieces, end = self._tokenizer.encode(text, add_special_tokens=False), list[str](), 0
        for id, (begin, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token, name = self._names.get(id, ("", ""))
            before, spelling, after = text[begin:stop].partition(token) if token else ("", "", "")
            # Else it stands for a character that no token is of, or is that one character.
            if spelling and text[begin + len(before) + len(token) :][:1] != self._mark:
                pieces += [self._marks.sub("", text[end:begin]), before, name, after]
                end = stop
        pieces.append(self._marks.sub("", text[end:]))
        ids = self._again.encode("".join(pieces), add_special_tokens=False).ids
        return [self._old.get(id, id) for id in ids]


def visible(token: str) -> bool:
    """Whether a token is more than spaces and line ends."""
    return bool(token.replace("▁", " ").strip())


def _refuse(reason: object) -> None:
    raise RefusedError(str(reason))


if __name__ == "__main__":
    main()
