"""The process of `templates`: renders chat templates within limits of time and memory.

It imports nothing of the project. In, a JSON object a line: {"source", "conversations", "special", "arguments"}. Out:
{"texts"}, {"error"}, or for arguments that the template does not read {"unread", "read"}. A request beyond the limits ends the
process without an answer.
"""

import json
import math
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

MOST_S, MOST_MEMORY = 10, 2**29
"""Seconds of computing for a request, and as many for each MiB of it; bytes of memory, beside 64 times the request's."""
MOST_TEXT = 2**24
"""Characters that a template may add to the conversations."""


class RefusedError(Exception):
    """A template called `raise_exception`."""


def main() -> None:
    """Answer requests until there are no more."""
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        request, usage = json.loads(line), resource.getrusage(resource.RUSAGE_SELF)
        most_s, memory = allowance(len(line))
        # The system counts from the process's beginning.
        _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + most_s)
        _limit(resource.RLIMIT_AS, memory)
        try:
            answer = _texts(MOST_TEXT + len(line), **request)
        except MemoryError:
            raise SystemExit(1) from None
        except Exception as error:  # whatever the expressions in a template can raise
            answer = {"error": str(error)[:500] or type(error).__name__}
        print(json.dumps(answer), flush=True)


def allowance(size: int) -> tuple[int, int]:
    """Seconds of computing and bytes of memory for a request of `size` bytes."""
    return MOST_S * (1 + (size >> 20)), MOST_MEMORY + 64 * size


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
    # jinja's own escapes HTML. No other argument of json.dumps: a template must not choose what is called.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: object) -> None:
    raise RefusedError(str(reason))


if __name__ == "__main__":
    main()
