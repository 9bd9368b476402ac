"""A text piece by piece: the pieces add up, leaving the loop stops the model, and sessions show themselves in a line."""

import signal
import threading
import time

import numpy as np
import pytest
import torch
from checkpoints import byte_pieces, saying, write_checkpoint

import tq
from haarkv.engine.sampling import Sampling


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream") / "m"
    model = write_checkpoint(folder, config={"max_position_embeddings": 30_000}, mutate=saying("abé€z", endless=True))
    return tq.load(model, kv="tq4")


def test_pieces_add_up_to_the_text(session):
    stream = session.stream("a", max_new_tokens=12)
    pieces = list(stream)
    whole = session.generate("a", max_new_tokens=12)
    assert len(pieces) > 5
    assert "".join(pieces) == whole.texts[0]
    assert stream.result.texts == whole.texts
    assert stream.result.completions == whole.completions
    assert list(stream) == []  # once
    assert stream.result.texts == whole.texts


def test_bytes_that_are_no_character_are_signs_and_end_no_stream(tmp_path):
    """A vocabulary with byte fallback says `é`, a lone first byte, `b`, half of another character, and ends."""
    files = {"tokenizer.json": byte_pieces().to_str()}
    session = tq.load(write_checkpoint(tmp_path / "m", mutate=saying(b"a\xc3\xa9\xe2b\xf0\x9f"), files=files))
    assert "".join(session.stream("a")) == session.generate("a").texts[0] == "é\ufffdb\ufffd\ufffd"
    texts = {"b": "é\ufffd", "\ufffd": "é", "\ufffdb\ufffd": "é", "é": "", "\ufffdx": "é\ufffdb\ufffd\ufffd"}
    for stop, text in texts.items():
        stream = session.stream("a", stop=stop)
        assert "".join(stream) == stream.result.texts[0] == text


def test_a_stream_that_is_closed_keeps_what_was_computed(session):
    stream = session.stream("a", max_new_tokens=25_000, keep=True)
    pieces = [next(stream) for _ in range(3)]
    stream.close()
    text, done, sequence = stream.result.texts[0], stream.result.completions[0], stream.result.stored[0]
    assert text.startswith("".join(pieces))
    assert (done.finish, sequence.length) == ("stop", done.prompt_tokens + len(done.token_ids) - 1)
    assert list(stream) == []
    again = session.generate([], stored=sequence, max_new_tokens=5)
    assert again.completions[0].reused_tokens == sequence.length
    assert session.generate("a", max_new_tokens=len(done.token_ids) + 5).texts[0].startswith(text.rstrip("\ufffd"))


def test_whoever_leaves_the_loop_stops_the_model(session):
    before = threading.active_count()
    for _ in session.stream("a", max_new_tokens=25_000):
        break
    until = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert session.generate("a", max_new_tokens=1).texts == ["b"]  # the session is free


def test_a_stream_that_is_interrupted_in_the_prompt_reads_no_further(session):
    progress = []

    def interrupt(done, total):
        progress.append(done)
        if done:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)

    with pytest.raises(KeyboardInterrupt):
        next(session.stream("a" * 5000, on_prefill=interrupt))
    assert max(progress) < 5000
    assert session.generate("a", max_new_tokens=1).texts == ["b"]


def test_an_unknown_argument_is_refused(session):
    for call in (session.generate, session.stream):
        with pytest.raises(TypeError, match="'temprature'"):
            list(call("a", temprature=1))
    with pytest.raises(TypeError, match="'on_text'"):
        next(session.stream("a", on_text=print))


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([], {}, "no prompt was given"),
        ([[1, 2.5]], {}, "prompt 1 is neither a text nor a list of token ids"),
        ([1, 2], {}, "prompt 1 is neither a text nor a list of token ids: 1"),
        (["a", [b"b"]], {}, "prompt 2 is neither a text nor a list of token ids"),
        (["a", []], {}, "prompt 2 is empty"),
        (5, {}, "a prompt is a text or a list of token ids, not 5"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        ("a", {"max_new_tokens": None}, "max_new_tokens must be a whole number, not None"),
        ("a", {"max_context": 8.5}, "max_context must be a whole number, not 8.5"),
        ("a", {"top_k": 2.5, "temperature": 1.0}, "top-k must be a whole number, not 2.5"),
        ("a", {"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ("a", {"temperature": "x"}, "temperature must be a number, not 'x'"),
        ("a", {"stop": 0}, "a stop is a text, or several, not 0"),
        ("a", {"stop": ["b", 0]}, "a stop is a text, or several, not 0"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_or_number_is_refused_in_a_line(session, prompts, settings, words):
    with pytest.raises(tq.InputError, match=f"^{words}") as error:
        session.generate(prompts, **settings)
    assert "\n" not in str(error.value)


def test_token_ids_of_other_libraries_are_token_ids(session):
    expected = session.generate([[97, 98]], max_new_tokens=2).completions
    for ids in (np.array([97, 98]), torch.tensor([97, 98]), (97, 98)):
        assert session.generate([ids], max_new_tokens=2).completions == expected


# -- Settings, and lines ----------------------------------------------------------------------------------------------------


def test_settings_of_sampling_are_arguments(session):
    result = session.generate("a", max_new_tokens=2, temperature=0.7, top_k=3, seed=5)
    assert result.sampling == Sampling(0.7, 3, seed=5)
    assert "".join(session.stream("a", max_new_tokens=2, temperature=0.7, top_k=3, seed=5)) == result.texts[0]
    with pytest.raises(tq.InputError, match="sampling says all of how tokens are drawn; leave out temperature"):
        session.generate("a", temperature=1.0, sampling=Sampling())
    with pytest.raises(tq.InputError, match="top-k chooses among tokens, and this model takes the likeliest"):
        session.generate("a", top_k=3)
    assert session.generate("a", max_new_tokens=1, top_k=0, top_p=1.0).sampling == Sampling()  # they say nothing
    assert session.generate("a", max_new_tokens=1, top_k=3, temperature=0).sampling.top_k == 3  # who says 0 knows


def test_a_session_and_a_result_are_one_line(session):
    assert repr(session) == f"Session({session.name!r} on reference, tq4: 144 bytes of K and V a token)"
    assert "…], 3 new tokens, tq4: " in repr(session.generate(["a", "b", "z"], max_new_tokens=1))
    long = repr(session.generate("a", max_new_tokens=500))
    assert len(long) < 160
    assert "\n" not in long
