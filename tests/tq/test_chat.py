"""`tq chat` in a terminal and without one: keys, commands, interruptions, and what is kept."""

import io
import json
import sys

import pytest
from checkpoints import TEMPLATE, saying, write_checkpoint
from terminal import Terminal

from haarkv.engine.session import Session
from haarkv.tq_ops.kv.cache_file import read_note

CTRL_C, CTRL_D, UP, LEFT, BACKSPACE = "\x03", "\x04", "\x1b[A", "\x1b[D", "\x7f"


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory):
    """After a line's end comes `abc`, and the end of the text."""
    return write_checkpoint(tmp_path_factory.mktemp("alphabet") / "m", mutate=saying("\nabc"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """After a line's end comes `xy` and another one, for ever."""
    config = {"max_position_embeddings": 30_000}
    folder = tmp_path_factory.mktemp("endless") / "m"
    return write_checkpoint(folder, config=config, mutate=saying("\nxy", endless=True))


class Conversation(Terminal):
    """A conversation in a terminal, up to its first prompt."""

    def __init__(self, folder, *args, cwd):
        super().__init__("chat", "--model", folder, "--threads", 1, *args, cwd=cwd)
        self.until("> ")

    def say(self, keys, *words, again=None):
        """Type, and wait for these words and the next prompt; the last that came."""
        self.type(keys)
        for word in words:
            self.until(word, again=again)
        return self.until("> ")

    def leave(self, keys="/exit\n"):
        self.type(keys)
        assert self.end() == 0
        assert "Traceback" not in self.shown


@pytest.fixture
def chat(tmp_path):
    return lambda folder, *args: Conversation(folder, *args, cwd=tmp_path)


def test_a_conversation_in_a_terminal(chat, alphabet):
    with chat(alphabet, "--kv", "tq4") as terminal:
        banner = terminal.shown
        assert f"{alphabet} on the reference" in banner.replace("\r\n", "")
        assert "KV cache tq4" in banner
        assert "/help lists what you can do, /exit ends" in banner
        answer = terminal.say("hi\n")
        assert "abc\r\n" in answer
        assert "computed" not in answer  # what an answer costs is for those who ask
        assert "Ctrl-C" in terminal.say("/help\n")
        assert "there is no /hepl; /help lists what there is" in terminal.say("/hepl\n")
        terminal.say("\n")  # no message
        terminal.leave()


def test_keys_edit_a_line_and_bring_back_earlier_ones(chat, alphabet, tmp_path):
    with chat(alphabet, "--session", "talk") as terminal:
        terminal.say("hj" + BACKSPACE + "i\n", "abc")
        terminal.say(UP + "!" + LEFT + "-\n", "abc")
        terminal.leave(CTRL_D)
    contents = [message["content"] for message in json.loads(read_note(tmp_path / "talk"))]
    assert contents == ["hi", "abc", "hi-!", "abc"]
    with chat(alphabet, "--session", "talk") as terminal:
        assert "talk: 2 earlier messages" in terminal.shown
        terminal.say(UP + UP + "?\n", "abc")  # those of the file as well
        terminal.leave()
    assert json.loads(read_note(tmp_path / "talk"))[4]["content"] == "hi?"


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, endless, tmp_path):
    with chat(endless, "--session", "talk", "--max-new-tokens", 25_000) as terminal:
        terminal.type("hi\n")
        terminal.until("xy\r\nxy")
        terminal.say(CTRL_C)
        terminal.type("half a li")
        terminal.until("half a li")
        terminal.say("", "(/exit ends the conversation)", again=CTRL_C)
        terminal.type("again\n")
        terminal.until("xy\r\nxy")
        terminal.say(CTRL_C)
        terminal.leave()
    messages = json.loads(read_note(tmp_path / "talk"))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_what_does_not_fit_is_said_and_the_conversation_goes_on(chat, alphabet):
    with chat(alphabet) as terminal:
        terminal.say("a" * 1100 + "\n", "this model's context only 1024; shorten it")
        terminal.say("hi\n", "abc")
        terminal.say(b"\xff\xfe\n", "not UTF-8")
        terminal.leave(CTRL_D)


# -- Without a terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe_chat(run, monkeypatch):
    """A conversation whose messages come by a pipe."""

    def chat(lines, model, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run("chat", "--model", model, *args)

    return chat


def test_lines_of_a_pipe_are_messages_whatever_they_say(pipe_chat, alphabet):
    assert pipe_chat("/help\n\nhi\n", alphabet).shows() == "abc\nabc\n"


@pytest.mark.parametrize(
    ("option", "number", "words"),
    [
        ("--max-new-tokens", 5, "the answer was cut after 5 tokens; --max-new-tokens allows more"),
        ("--max-context", 9, "the answer was cut where the context ends"),
    ],
)
def test_an_answer_that_was_cut_says_so(pipe_chat, endless, option, number, words):
    assert words in pipe_chat("hi\n", endless, option, number).notes().splitlines()[-1]


FEW = ("--max-new-tokens", 4)


@pytest.mark.parametrize("template", [{"chat_template": TEMPLATE}, None])
def test_a_conversation_goes_on_after_a_restart(pipe_chat, tmp_path, template):
    """Three lines at once, and the third in another process: the same answers."""
    model = write_checkpoint(tmp_path / "m", tokenizer_config=template)
    whole = pipe_chat("spam\n\neggs and ham\nbacon\n", model, *FEW)
    first = pipe_chat("spam\neggs and ham\n", model, *FEW, "--session", "s")
    rest = pipe_chat("bacon\n", model, *FEW, "--session", "s")
    assert first.ended() + rest.ended() == whole.ended()
    assert rest.err.splitlines()[0] == "s: 2 earlier messages"


def test_what_was_said_is_not_computed_again(pipe_chat, tmp_path, monkeypatch):
    turns, generate = [], Session.generate

    def record(self, *args, **kwargs):
        result = generate(self, *args, **kwargs)
        turns.append(result.completions[0])
        return result

    monkeypatch.setattr(Session, "generate", record)
    model = write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": TEMPLATE})
    pipe_chat("spam " * 40 + "\neggs\n", model, *FEW, "--system", "You are a knight.").ended()
    assert turns[0].reused_tokens == 0
    assert turns[0].prompt_tokens <= turns[1].reused_tokens
    assert turns[1].prompt_tokens - turns[1].reused_tokens < 60
