"""`tq chat`: a conversation, line by line; what was said is not computed again, nor after a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.output import err, warn

if TYPE_CHECKING:
    from haarkv.engine.session import Session
    from haarkv.tq_ops.kv.stored import StoredSequence

_MOST_LINE = 2**20
"""Characters of a line: more than any context holds."""


@click.command("chat")
@options.model_option()
@options.session_options
@options.new_tokens()
@options.sampling_options
@options.draft_options
@options.system_option
@options.file("--session", "Keep the conversation in this file after each answer, and go on with it if it exists.", "file")
def command(max_new_tokens: int, seed: int, system: str | None, file: Path | None, **given: Any) -> None:
    """Talk with a model. Each line of stdin is a message; the end of the input ends the conversation.

    A model without a chat template goes on with the text as it is. Only what is new is computed at each turn.
    """
    from haarkv.tq_ops.output_files import check_writable

    if file is not None:
        check_writable(file)
    session = options.open_session(given, room=lambda *_: (1, max_new_tokens))
    if system is not None and not session.tokenizer.has_chat_template:
        raise click.UsageError("a system message needs a chat template, and this model has none; drop --system")
    sampling = session.sampling_with(seed=seed, **options.sampling_of(given))
    messages, stored = _begun(session, file, system)
    if messages and file is not None:
        print(f"{file}: {sum(m['role'] == 'user' for m in messages)} earlier messages", file=err().file)
    while (line := _next_line()) is not None:
        messages.append({"role": "user", "content": line})
        result = session.generate(
            [_ids(session, messages)], stored=stored, keep=True, max_new_tokens=max_new_tokens, sampling=sampling,
            on_text=lambda _, text: print(text, end="", flush=True), on_warning=warn,
        )  # fmt: skip
        print(flush=True)
        stored, done = result.stored[0], result.completions[0]
        messages.append({"role": "assistant", "content": result.texts[0]})
        if file is not None:
            session.save_cache(file, stored, json.dumps(messages))
        if err().is_terminal:
            memory = result.ranks[0].describe() if result.ranks else ""
            computed = f"{done.prompt_tokens - done.reused_tokens} of {done.prompt_tokens} tokens computed"
            print(f"[{computed}; {memory}]", file=err().file)
            if result.drafting:
                print(f"[draft {result.drafting.describe()}]", file=err().file)


def _begun(session: Session, file: Path | None, system: str | None) -> tuple[list[dict[str, str]], StoredSequence | None]:
    """Messages and stored sequence of a file, if it exists; else those of a new conversation.

    Raises:
        InputError: the file is none of a conversation, or of another model or cache.
    """
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.input_files import parse_json
    from haarkv.tq_ops.kv.cache_file import read_note

    new = [] if system is None else [{"role": "system", "content": system}]
    if file is None or not file.exists():
        return new, None
    stored = session.load_cache(file)
    try:
        messages = parse_json(read_note(file))
        if not all(set(m) == {"role", "content"} and all(isinstance(text, str) for text in m.values()) for m in messages):
            raise ValueError
    except (ValueError, TypeError):
        raise InputError(f"{file} is a stored cache without a conversation; name another file") from None
    if system is not None and messages[:1] != new:
        raise InputError(f"{file} began with another system message; drop --system, or name another file")
    return list(messages), stored


def _next_line() -> str | None:
    """The next line that is not empty; None at the end of the input."""
    if sys.stdin is None:
        return None
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline(_MOST_LINE)
        if not line:
            return None
        if text := line.strip("\r\n"):
            return text


def _ids(session: Session, messages: list[dict[str, str]]) -> list[int]:
    if session.tokenizer.has_chat_template:
        return session.tokenizer.encode_messages(messages)
    return session.tokenizer.encode("".join(f"{m['content']}\n" for m in messages))
