"""More conversations than fit: each is answered as if it were alone, memory stays within its budget, files may be lost."""

import random

import pytest
from checkpoints import write_checkpoint

import tq
from haarkv.engine.conversations import Conversations
from haarkv.tq_ops.errors import InputError


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("m"), config={"head_dim": 64})
    return tq.load(folder, kv=tq.KVSpec("tq4", tail=8, sink=2), executor="cpu", balance=False)


def talk(session, conversations, names, turns, seed=0, alone=True):
    """Random turns of a few tokens; every answer must be that of the same conversation alone."""
    draw, histories = random.Random(seed), {name: [] for name in names}
    for _ in range(turns):
        name = draw.choice(names)
        if len(histories[name]) > 90:
            histories[name].clear()  # begun anew, with nothing in common
        histories[name] += [draw.randrange(1, 255) for _ in range(draw.randint(1, 6))]
        answer = conversations.generate(name, histories[name], max_new_tokens=3)
        if alone:
            expected = session.generate([histories[name]], max_new_tokens=3)
            assert answer.completions[0].token_ids == expected.completions[0].token_ids
        histories[name] += answer.completions[0].token_ids
    return histories


def test_every_answer_is_that_of_the_conversation_alone(session, tmp_path):
    block = 2 * 128 * session.plan.bytes_per_token(session.config.kv_shapes)
    one = Conversations(session, 10**9)._working_bytes(128)
    budget = 4 * one
    conversations = Conversations(session, budget, tmp_path / "c")
    talk(session, conversations, [f"user {i}" for i in range(9)], 40)
    counters = conversations.counters
    assert conversations.nbytes <= budget
    assert counters.peak_bytes <= budget + block
    assert min(counters.evicted, counters.restored, counters.reused_tokens) > 3
    assert counters.computed_tokens < counters.reused_tokens
    assert not counters.damaged


@pytest.mark.fuzz
def test_64_conversations_in_memory_for_8(session, tmp_path):
    one = Conversations(session, 10**9)._working_bytes(128)
    conversations = Conversations(session, 8 * one, tmp_path / "c")
    talk(session, conversations, [str(i) for i in range(64)], 2000)
    assert conversations.counters.peak_bytes <= 8 * one + one
    assert conversations.counters.evicted > 500


def test_a_new_process_finds_them(session, tmp_path):
    first = Conversations(session, 10**9, tmp_path / "c")
    histories = talk(session, first, ["a", "b"], 6, alone=False)
    first.save()
    first.save()  # nothing is left to write
    second = Conversations(session, 10**9, tmp_path / "c")
    for name, tokens in histories.items():
        answer = second.generate(name, [*tokens, 7], max_new_tokens=2)
        assert answer.completions[0].reused_tokens >= len(tokens) - 1
        assert answer.completions[0].token_ids == session.generate([[*tokens, 7]], max_new_tokens=2).completions[0].token_ids
    assert second.counters.restored == 2


def test_a_file_that_is_lost_or_damaged_costs_time_alone(session, tmp_path):
    first = Conversations(session, 10**9, tmp_path / "c")
    histories = talk(session, first, ["a", "b"], 6, alone=False)
    first.save()
    damaged_file, missing_file = sorted((tmp_path / "c").iterdir())
    damaged_file.write_bytes(damaged_file.read_bytes()[:-9])
    missing_file.unlink()
    second = Conversations(session, 10**9, tmp_path / "c")
    with pytest.warns(UserWarning, match=r"is no stored cache.*computed again"):
        answers = [second.generate(name, tokens, max_new_tokens=2).completions[0] for name, tokens in histories.items()]
    for answer, tokens in zip(answers, histories.values(), strict=True):
        assert answer.token_ids == session.generate([tokens], max_new_tokens=2).completions[0].token_ids
        assert not answer.reused_tokens
    assert (second.counters.damaged, second.counters.restored) == (1, 0)
    second.forget("a")
    second.forget("nobody")


def test_without_a_folder_they_are_computed_again(session):
    one = Conversations(session, 10**9)._working_bytes(128)
    conversations = Conversations(session, 2 * one)
    talk(session, conversations, ["a", "b", "c"], 12)
    assert conversations.counters.evicted
    assert not conversations.counters.restored


def test_a_refused_call_leaves_the_conversation_as_it_was(session):
    conversations = Conversations(session, 10**9)
    conversations.generate("a", [1, 2, 3], max_new_tokens=4)
    for settings in ({"top_k": 5}, {"max_context": 2}, {"max_new_tokens": 0}, {"stop": ""}):
        with pytest.raises(InputError):
            conversations.generate("a", [1, 2, 3, 4], **settings)
    assert conversations.generate("a", [1, 2, 3, 4], max_new_tokens=1).completions[0].reused_tokens == 3


@pytest.mark.parametrize("tokens", [0, 2])
def test_an_interrupted_call_leaves_the_conversation_as_it_was_and_one_that_is_ended_goes_on(session, tokens):
    """In the prompt, or after some tokens."""
    conversations, came = Conversations(session, 10**9), []

    def interrupt(*_):
        came.append(0)
        if len(came) > tokens:
            raise KeyboardInterrupt

    first = conversations.generate("a", [1, 2, 3], max_new_tokens=4)
    sequence = conversations._held["a"]
    with pytest.raises(KeyboardInterrupt):
        conversations.generate("a", [1, 2, 3, 4], **{"on_token" if tokens else "on_prefill": interrupt})
    assert conversations._held == {"a": sequence}
    answer = conversations.generate("a", [1, 2, 3, 4], on_token=lambda *_: True)
    assert (answer.completions[0].reused_tokens, answer.completions[0].finish) == (3, "stop")
    prompt = [1, 2, 3, 4, *answer.completions[0].token_ids, 5]
    assert conversations.generate("a", prompt, max_new_tokens=2).completions[0].reused_tokens == 4
    assert first.stored[0] is sequence


def test_room_that_is_asked_for_counts(session):
    """A cache of `max_context` tokens is allocated whole, however short the text."""
    block, whole = (Conversations(session, 10**9)._working_bytes(tokens) for tokens in (128, 1024))
    assert whole > 2 * block
    with pytest.raises(InputError, match=r"1,024 tokens take .* more than the budget"):
        Conversations(session, whole - 1).generate("a", [1, 2, 3], max_new_tokens=4, max_context=1024)
    conversations = Conversations(session, whole)
    result = conversations.generate("a", [1, 2, 3], max_new_tokens=4, max_context=1024)
    assert conversations.counters.peak_bytes == whole == result.kv.bytes + result.stored[0].earlier.nbytes
    assert conversations.nbytes <= block


def test_what_can_never_fit_is_refused(session, tmp_path):
    with pytest.raises(InputError, match="more than the budget of 1,000"):
        Conversations(session, 1000).generate("a", [1, 2, 3])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot hold conversations"):
        Conversations(session, 1000, tmp_path / "file")
    with pytest.raises(InputError, match=r"has a token that is none of this model's"):
        session.generate([[10**6]])
