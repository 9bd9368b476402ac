"""`tq chat`: a conversation line by line; earlier turns are not computed again, nor after a restart."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from haarkv.tq_ops.errors import InputError, count_noun
from tq import options
from tq.groups import Command
from tq.output import err, say, warn

if TYPE_CHECKING:
    from haarkv.engine.result import Result
    from haarkv.engine.sampling import Sampling
    from haarkv.engine.session import Session
    from haarkv.engine.text import Chat
    from haarkv.models.config import ModelConfig
    from haarkv.models.text import Tokenizer
    from haarkv.tq_ops.kv.stored import StoredSequence

_MOST_LINE = 2**20
"""Most characters of a line."""
_PROMPT = "> "
_HELP = """\
/help      this list
/exit      end the conversation; so does Ctrl-D
Ctrl-C     stop an answer, or drop the line that you are writing
up, down   earlier lines"""


@click.command("chat", cls=Command)
@options.model_option()
@options.session_options
@options.count("--max-new-tokens", default=512, metavar="N")
@options.max_context_option
@options.sampling_options
@options.draft_options
@options.message_options
@options.file("--session", "Keep the conversation in this file after each answer, and go on with it if it exists.", "file")
def command(
    max_new_tokens: int, max_context: int | None, seed: int, system: str | None, template_args: dict[str, Any],
    parse_special: bool, file: Path | None, **args: Any,
) -> None:  # fmt: skip
    """Talk with a model. Each line of stdin is a message; the end of the input ends the conversation.

    A model without a chat template goes on with the text as it is. Only what is new is computed at each turn. In a terminal,
    arrow keys edit a line and bring back earlier ones, Ctrl-C stops an answer, whose text stays, and /help lists the rest.
    """
    from haarkv.engine.text import Chat
    from haarkv.tq_ops.output_files import check_writable

    if file is not None:
        check_writable(file)
    chat = Chat(None, system, template_args, parse_special)

    def room(tokenizer: Tokenizer, _: ModelConfig) -> tuple[int, int]:
        chat.encode(tokenizer, ["hi"])  # what is wrong with the template is said before weights are read
        return 1, max_context or max_new_tokens

    session = options.open_session(args, room=room)
    if max_context is not None and max_context > (limit := session.config.max_position_embeddings):
        raise click.UsageError(f"this model has a context of {limit} tokens; --max-context must lie in 1 … {limit}")
    sampling = session.sampling_with(seed=seed, **options.sampling_settings(args))
    talk = _Talk(session, chat, sampling, max_new_tokens, max_context, file, *_open_conversation(session, file, system))
    if talk.messages and file is not None:
        earlier = count_noun(len(talk.user_messages), "earlier message")
        print(f"{file}: {earlier}", file=err().file)
    for line in _terminal_lines(talk) if _in_terminal() else _read():
        talk.answer(line)


@dataclass
class _Talk:
    """A conversation: its messages, and their stored cache."""

    session: Session
    chat: Chat
    sampling: Sampling
    max_new_tokens: int
    max_context: int | None
    file: Path | None
    messages: list[dict[str, str]] = field(default_factory=list)
    stored: StoredSequence | None = None

    @property
    def user_messages(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def answer(self, line: str) -> None:
        """Print the answer to a message. On a terminal Ctrl-C ends it there, and keeps what was computed."""
        self.messages.append({"role": "user", "content": line})
        pieces = list[str]()

        def show(_: int, text: str) -> None:
            pieces.append(text)
            print(text, end="", flush=True)

        result = None
        try:
            with _ended_by_ctrl_c() as on_token:
                result = self.session.generate(
                    [self._ids()], stored=self.stored, keep=True, max_new_tokens=self.max_new_tokens,
                    max_context=self.max_context, sampling=self.sampling, on_token=on_token, on_text=show, on_warning=warn,
                )  # fmt: skip
        except KeyboardInterrupt:
            if not _in_terminal():
                raise
        except InputError as error:
            if not _in_terminal():
                raise
            say(str(error))  # another message may do
            self.messages.pop()
            return
        print(flush=True)
        if result is None and not pieces:
            self.messages.pop()  # as if it had never been said
            return
        self.messages.append({"role": "assistant", "content": result.texts[0] if result else "".join(pieces)})
        if result is not None:
            self.stored = result.stored[0]
            _say_if_cut(result)
        if self.file is not None and self.stored is not None:
            self.session.save_cache(self.file, self.stored, json.dumps(self.messages))

    def _ids(self) -> list[int]:
        if self.session.tokenizer.has_chat_template:
            return self.chat.encode_messages(self.session.tokenizer, [self.messages])[0]
        return self.session.tokenizer.encode("".join(f"{m['content']}\n" for m in self.messages))


@contextmanager
def _ended_by_ctrl_c() -> Iterator[Callable[[int, int], bool]]:
    """On a terminal, Ctrl-C ends an answer at a token; before the first token, or again, it interrupts. Yields `on_token`."""
    has_begun = was_pressed = False

    def press(*_: object) -> None:
        nonlocal was_pressed
        if was_pressed or not has_begun:
            raise KeyboardInterrupt
        was_pressed = True

    def on_token(*_: int) -> bool:
        nonlocal has_begun
        has_begun = True
        return was_pressed

    before = signal.signal(signal.SIGINT, press) if _in_terminal() else None
    try:
        yield on_token
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _say_if_cut(result: Result) -> None:
    done = result.completions[0]
    if done.finish == "length":
        say(f"the answer was cut after {count_noun(len(done.token_ids), 'token')}; --max-new-tokens allows more")
    elif done.finish == "context":
        say("the answer was cut where the context ends; begin a new conversation, or give a larger --max-context")


def _open_conversation(
    session: Session, file: Path | None, system: str | None
) -> tuple[list[dict[str, str]], StoredSequence | None]:
    """Messages and stored sequence of a file, or of a new conversation."""
    from haarkv.tq_ops.input_files import parse_json
    from haarkv.tq_ops.kv.cache_file import read_note

    new = [] if system is None else [{"role": "system", "content": system}]
    if file is None or not file.exists():
        return new, None
    sequence = session.load_cache(file)
    try:
        messages = parse_json(read_note(file))
        if not all(set(m) == {"role", "content"} and all(isinstance(text, str) for text in m.values()) for m in messages):
            raise ValueError
    except (ValueError, TypeError):
        raise InputError(f"{file} is a stored cache without a conversation; name another file") from None
    if system is not None and messages[:1] != new:
        raise InputError(f"{file} began with another system message; drop --system, or name another file")
    return list(messages), sequence


# -- Where lines come from -------------------------------------------------------------------------------------------------


def _in_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _read() -> Iterator[str]:
    """Non-empty lines of stdin, with a prompt on stderr if that is a terminal."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline(_MOST_LINE)
            line.encode()
        except UnicodeError:
            raise click.UsageError("a message on stdin is not UTF-8; convert it first") from None
        if not line:
            return
        if text := line.strip("\r\n"):
            yield text


def _terminal_lines(talk: _Talk) -> Iterator[str]:
    """Messages typed on a terminal, with history and commands, until /exit or the end of input."""
    session = talk.session
    with suppress(ImportError):  # not every Python has it; lines are then edited as the terminal does
        import readline

        readline.set_auto_history(True)
        for line in talk.user_messages:
            readline.add_history(line)
    print(f"{session.name} on {session.executor.description}, KV cache {session.plan.summary()}", file=err().file)
    print("/help lists what you can do, /exit ends", file=err().file)
    while True:
        try:
            line = input(_PROMPT)[:_MOST_LINE]
            line.encode()
        except EOFError:
            print(file=err().file)
            return
        except KeyboardInterrupt:
            print("\n(/exit ends the conversation)", file=err().file)
            continue
        except UnicodeError:
            say("that line is not UTF-8; write it again")
            continue
        command = line.strip()
        if command == "/exit":
            return
        if command == "/help":
            print(_HELP, file=err().file)
        elif re.fullmatch(r"/[a-z]+", command):
            print(f"there is no {command}; /help lists what there is", file=err().file)
        elif command:
            yield line
