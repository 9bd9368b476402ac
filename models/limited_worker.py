"""Runs what comes with a model and may never end, in a process of its own, which `limited` starts.

It imports nothing of the project. In: one JSON object on stdin; a chat template: {"source", "conversations", "special"}; a
tokenizer: {"tokenizer", "texts", "special_tokens"}. Out: one on stdout, {"texts"}, {"ids"} or {"error"}. What takes too much
ends the process, without an answer.
"""

import json
import resource
import sys

MOST_S = 10
"""Seconds that it may compute, and as many for each MiB that it was asked of."""
MOST_MEMORY = 2**29
"""Bytes of memory that it may take, and 64 times what it was asked of beside them."""
TOKENIZER_MEMORY = 2**32
"""The same of a tokenizer, whose library maps more than it uses."""
MOST_TEXT = 2**24
"""Characters that a template may add to the conversations."""


class RefusedError(Exception):
    """What templates call `raise_exception` for."""


def main() -> None:
    """Answer one request."""
    asked = sys.stdin.buffer.read()
    request = json.loads(asked)
    tokenizes = "tokenizer" in request
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, seconds(len(asked)))
    _limit(resource.RLIMIT_AS, (TOKENIZER_MEMORY if tokenizes else MOST_MEMORY) + 64 * len(asked))
    try:
        answer: dict[str, object] = _ids(**request) if tokenizes else {"texts": _texts(MOST_TEXT + len(asked), **request)}
    except MemoryError:
        raise SystemExit(1) from None  # what ended it is said by whoever started it
    except Exception as error:  # whatever the expressions in a template can raise
        answer = {"error": str(error)[:500] or type(error).__name__}
    print(json.dumps(answer))


def seconds(size: int) -> int:
    """That it may compute for a request of so many bytes."""
    return MOST_S * (1 + (size >> 20))


def _limit(kind: int, most: int) -> None:
    """Lower one of this process's limits, and leave one alone that is lower."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (ValueError, OSError):  # a system that knows no such limit
        return


def _texts(most: int, source: str, conversations: list[list[dict[str, str]]], special: dict[str, str]) -> list[str]:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = _refuse
    template, texts = environment.from_string(source), []
    for messages in conversations:
        texts.append(template.render(messages=messages, add_generation_prompt=True, **special))
        if sum(map(len, texts)) > most:
            raise RefusedError(f"it makes more than {MOST_TEXT:,} characters")
        texts[-1].encode()
    return texts


def _ids(tokenizer: str, texts: list[str], special_tokens: bool) -> dict[str, object]:
    """Token ids of texts, by the file of a tokenizer."""
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(tokenizer)
    reader.no_truncation()
    reader.no_padding()
    return {"ids": [list(reader.encode(text, add_special_tokens=special_tokens).ids) for text in texts]}


def _refuse(reason: object) -> None:
    raise RefusedError(str(reason))


if __name__ == "__main__":
    main()
