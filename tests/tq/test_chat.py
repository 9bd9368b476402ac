"""`tq chat` in a terminal and without one: keys, commands, interruptions, and what is kept."""

import io
import json
import sys

import pytest
from checkpoints import TEMPLATE, saying, write_checkpoint
from refusals import assert_refused
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


@pytest.fixture
def chat(tmp_path):
    """A conversation in a terminal, up to its first prompt."""

    def start(folder, *args):
        terminal = Terminal("chat", "--model", folder, "--threads", 1, *args, cwd=tmp_path)
        terminal.until("> ")
        return terminal

    return start


def test_a_conversation_in_a_terminal(chat, alphabet):
    with chat(alphabet) as terminal:
        banner = terminal.shown
        assert f"{alphabet} on the reference" in banner.replace("\r\n", "")
        assert "KV cache tq4" in banner
        assert "/help lists what you can do, /exit ends" in banner
        terminal.type("hi\n")
        answer = terminal.until("> ")
        assert "abc\r\n" in answer
        assert "computed" not in answer  # what an answer costs is for those who ask
        terminal.type("/help\n")
        assert "Ctrl-C" in terminal.until("> ")
        terminal.type("/hepl\n")
        assert "there is no /hepl; /help lists what there is" in terminal.until("> ")
        terminal.type("\n")  # no message
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_keys_edit_a_line_and_bring_back_earlier_ones(chat, alphabet, tmp_path):
    with chat(alphabet, "--session", "talk") as terminal:
        terminal.type("hj" + BACKSPACE + "i\n")
        terminal.until("abc")
        terminal.until("> ")
        terminal.type(UP + "!" + LEFT + "-\n")
        terminal.until("abc")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    contents = [message["content"] for message in json.loads(read_note(tmp_path / "talk"))]
    assert contents == ["hi", "abc", "hi-!", "abc"]
    with chat(alphabet, "--session", "talk") as terminal:
        assert "talk: 2 earlier messages" in terminal.shown
        terminal.type(UP + UP + "?\n")  # those of the file as well
        terminal.until("abc")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
    assert json.loads(read_note(tmp_path / "talk"))[4]["content"] == "hi?"


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, endless, tmp_path):
    with chat(endless, "--session", "talk", "--max-new-tokens", 25_000) as terminal:
        terminal.type("hi\n")
        terminal.until("xy\r\nxy")
        terminal.type(CTRL_C)
        terminal.until("> ")
        terminal.type("half a li")
        terminal.until("half a li")
        terminal.until("(/exit ends the conversation)", again=CTRL_C)
        terminal.until("> ")
        terminal.type("again\n")
        terminal.until("xy\r\nxy")
        terminal.type(CTRL_C)
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
    messages = json.loads(read_note(tmp_path / "talk"))
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_what_does_not_fit_is_said_and_the_conversation_goes_on(chat, alphabet):
    with chat(alphabet) as terminal:
        terminal.type("a" * 1100 + "\n")
        terminal.until("this model's context only 1024; shorten it")
        terminal.until("> ")
        terminal.type("hi\n")
        terminal.until("abc")
        terminal.until("> ")
        terminal.type(b"\xff\xfe\n")
        terminal.until("not UTF-8")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


# -- Without a terminal ----------------------------------------------------------------------------------------------------


def test_lines_of_a_pipe_are_messages_whatever_they_say(run, alphabet, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n\nhi\n"))
    code, out, err = run("chat", "--model", alphabet)
    assert (code, out, err) == (0, "abc\nabc\n", "")


def test_an_answer_that_was_cut_says_so(run, endless, monkeypatch):
    for options, words in (
        (("--max-new-tokens", 5), "the answer was cut after 5 tokens; --max-new-tokens allows more"),
        (("--max-context", 9), "the answer was cut where the context ends"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        code, _, err = run("chat", "--model", endless, *options)
        assert code == 0
        assert words in err.splitlines()[-1]


@pytest.fixture
def pipe_chat(run, monkeypatch, tmp_path):
    """A conversation whose messages come by a pipe, with a model that has a chat template and with one that has none."""
    write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": TEMPLATE})
    write_checkpoint(tmp_path / "plain")

    def chat(lines, *args, model="m"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run("chat", "--model", model, "--max-new-tokens", 4, *args)

    return chat


@pytest.mark.parametrize("model", ["m", "plain"])
def test_a_conversation_goes_on_after_a_restart(pipe_chat, model):
    """Three lines at once, and the third in another process: the same answers."""
    whole = pipe_chat("spam\n\neggs and ham\nbacon\n", model=model)
    first = pipe_chat("spam\neggs and ham\n", "--session", "s", model=model)
    rest = pipe_chat("bacon\n", "--session", "s", model=model)
    assert (whole.code, rest.code, first.out + rest.out) == (0, 0, whole.out)
    assert rest.err.splitlines()[0] == "s: 2 earlier messages"


def test_what_was_said_is_not_computed_again(pipe_chat, monkeypatch):
    turns, generate = [], Session.generate

    def record(self, *args, **kwargs):
        result = generate(self, *args, **kwargs)
        turns.append(result.completions[0])
        return result

    monkeypatch.setattr(Session, "generate", record)
    assert pipe_chat("spam " * 40 + "\neggs\n", "--system", "You are a knight.").code == 0
    assert turns[0].reused_tokens == 0
    assert turns[0].prompt_tokens <= turns[1].reused_tokens
    assert turns[1].prompt_tokens - turns[1].reused_tokens < 60


def test_chats_that_cannot_go_on_are_refused(run, pipe_chat):
    assert pipe_chat("spam\n", "--session", "s", "--system", "You are a knight.").code == 0
    assert run("generate", "--model", "m", "--prompt", "spam", "--max-new-tokens", 1, "--save-cache", "c").code == 0
    for args, words in (
        (("--session", "s", "--system", "You are a king."), "another system message"),
        (("--session", "s", "--kv", "tq3"), "in tq4, and this run in tq3"),
        (("--session", "m"), "not a regular file"),
        (("--session", "m/config.json"), "is no stored cache"),
        (("--session", "c"), "without a conversation"),
    ):
        assert_refused(pipe_chat("eggs\n", *args), words)
    assert_refused(pipe_chat("eggs\n", "--system", "You are a knight.", model="plain"), "--system")
