"""Drafted tokens: text, greedy or drawn by a seed, and what is stored are those without them."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from samplers import Sampler

import tq
from haarkv.engine.draft_choice import LONGEST_MATCH, SHORTEST_MATCH, DraftSpec, Target, choose, looked_up
from haarkv.engine.drafters import ModelSource
from haarkv.engine.drafts import Pace
from haarkv.engine.generation import GenerationRequest, generate
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import find_model
from haarkv.models.parallel import SINGLE_RANK
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation.fidelity.greedy_diff import greedy_diff


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """Drafts as many as may be: what they cost is no matter here."""
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most)


# -- Looking up --------------------------------------------------------------------------------------------------------------


def looked_up_slowly(tokens, most):
    """Every end of the text, the longest first, at every place before, the latest first."""
    for size in range(min(LONGEST_MATCH, len(tokens)), SHORTEST_MATCH - 1, -1):
        for at in range(len(tokens) - 1, size - 1, -1):
            if tokens[at - size : at] == tokens[-size:]:
                following = tokens[at:]
                return [following[i % len(following)] for i in range(most)]
    return []


def test_the_longest_end_of_the_text_is_looked_up_where_it_stood_last():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        tokens = generator.integers(0, generator.integers(1, 7), generator.integers(1, 40)).tolist()
        expected = looked_up_slowly(tokens, 5)
        assert looked_up(np.array(tokens), 5) == expected, tokens
        hits += bool(expected)
    assert 100 < hits < 400


# -- Greedy ------------------------------------------------------------------------------------------------------------------

PROMPTS = ["def main(", "class Foo:\n    def __init__(self", "import os\nimport sys\nimport"]


NEW = 28


@pytest.fixture(scope="module")
def tiny():
    return tq.load("tiny", executor="cpu", kv=KVSpec("k=tq5,v=tq4", tail=20, sink=4))


@pytest.fixture(scope="module")
def expected(tiny):
    return tiny.generate(PROMPTS, max_new_tokens=NEW, keep=True, sampling=Sampling())


def drafting(session, spec):
    """The session with a draft."""
    model = Target(session.name, session.config, session.executor.name, None, "float32", SINGLE_RANK)
    return replace(session, draft=choose(spec, model)(session.executor), draft_tokens=spec.tokens)


def same(one, other):
    return one.tensors.keys() == other.tensors.keys() and all(torch.equal(t, other.tensors[n]) for n, t in one.tensors.items())


SPECS = [
    DraftSpec("ngram"),
    DraftSpec("ngram", 13),
    DraftSpec("tiny-draft", 3),
    DraftSpec("tiny", 5, "tq2"),
    DraftSpec("tiny", 2, "bf16"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name} {s.tokens} {s.kv}")
def test_greedy_text_and_what_is_stored_are_those_without_drafts(tiny, expected, spec):
    result = drafting(tiny, spec).generate(PROMPTS, max_new_tokens=NEW, keep=True, sampling=Sampling())
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in expected.completions]
    assert [c.finish for c in result.completions] == [c.finish for c in expected.completions]
    assert all(map(same, result.stored, expected.stored))
    assert [s.length for s in result.stored] == [s.length for s in expected.stored]
    assert result.drafting.same_text
    assert 0 < result.drafting.accepted <= result.drafting.proposed
    assert result.timing.decode_tokens == expected.timing.decode_tokens
    assert result.timing.decode_steps < expected.timing.decode_steps


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.name} {s.tokens} {s.kv}")
@pytest.mark.parametrize("hopeful", [True, False], ids=["from the first step", "late"])
def test_drafts_may_pause_and_begin_late(tiny, expected, monkeypatch, spec, hopeful):
    """Some steps draft, in any number; a draft that did not pay before reads nothing until it is asked."""
    draw = random.Random(spec.tokens)
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: draw.choice([0, 0, 0, 1, self._most]))
    session = drafting(tiny, spec)
    if not hopeful:
        session.draft.experience.add(9.0, [(spec.tokens, 0)] * 9, spec.tokens)
    result = session.generate(PROMPTS, max_new_tokens=NEW, keep=True, sampling=Sampling())
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in expected.completions]
    assert all(map(same, result.stored, expected.stored))
    assert 0 < result.drafting.accepted <= result.drafting.proposed
    if spec.kv == "bf16":  # whatever it missed, it reads: it is the model itself
        assert result.drafting.acceptance > 0.97


def test_a_draft_that_did_not_pay_reads_no_prompt(tiny, monkeypatch):
    session, read = drafting(tiny, DraftSpec("tiny", 2, "bf16")), []
    session.draft.experience.add(9.0, [(2, 0)] * 9, 2)
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: 0)
    monkeypatch.setattr("haarkv.engine.drafters.prefill_in_chunks", lambda *given: read.append(given))
    session.generate(PROMPTS, max_new_tokens=5, sampling=Sampling())
    assert not read


@pytest.mark.parametrize("stop", [{"stop": "("}, {"max_context": 30}, {"max_new_tokens": 7}, {"max_new_tokens": 1}, "eos"])
def test_a_text_ends_where_it_would_without_drafts(tiny, expected, monkeypatch, stop):
    """In the middle of drafted tokens as well: behind the end nothing is stored, and nothing streamed."""
    options, streams = {"max_new_tokens": 25, "keep": True, "sampling": Sampling()}, []
    if stop == "eos":
        monkeypatch.setattr(tiny.tokenizer, "eos_token_ids", (expected.completions[0].token_ids[9],))
    else:
        options |= stop
    for session in (tiny, drafting(tiny, DraftSpec("tiny", 6))):
        tokens = []
        result = session.generate(PROMPTS, on_token=lambda *token, seen=tokens: seen.append(token), **options)
        streams.append((result, sorted(tokens, key=lambda token: token[0])))
    (plain, one), (speculative, other) = streams
    assert one == other
    assert [c.finish for c in plain.completions] == [c.finish for c in speculative.completions]
    assert stop != "eos" or plain.completions[0].finish == "eos"
    assert plain.texts == speculative.texts
    assert all(map(same, plain.stored, speculative.stored))


def test_a_reused_prefix_and_drafts_go_together(tiny):
    prompt = "import os\n" * 12
    sequence = tiny.generate(prompt, max_new_tokens=5, keep=True, sampling=Sampling()).stored[0]
    plain = tiny.generate(prompt + "def ", max_new_tokens=12, sampling=Sampling())
    for spec in SPECS[1:4]:
        result = drafting(tiny, spec).generate(prompt + "def ", stored=sequence, max_new_tokens=12, sampling=Sampling())
        assert result.completions[0].reused_tokens > 0
        assert result.texts == plain.texts


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_seed_draws_the_same_text_over_any_drafts(tiny, penalty):
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=5, repetition_penalty=penalty)
    plain = tiny.generate(PROMPTS, max_new_tokens=20, keep=True, sampling=sampling)
    for spec in SPECS:
        result = drafting(tiny, spec).generate(PROMPTS, max_new_tokens=20, keep=True, sampling=sampling)
        assert result.texts == plain.texts
        assert all(map(same, result.stored, plain.stored))
        if spec.kv:
            assert 0 < result.drafting.accepted < result.drafting.proposed


def test_where_sums_follow_the_batch_texts_part_at_near_ties_alone():
    session = tq.load("tiny", executor="reference")
    diff = greedy_diff(session, drafting(session, DraftSpec("ngram")), PROMPTS, dtype="float32", max_new_tokens=16)
    assert not diff.faulty, diff.unexplained


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_the_model_as_its_own_draft_is_taken_nearly_always(tiny, penalty):
    """With a penalty the draft has to count the same tokens as said."""
    sampling = Sampling(repetition_penalty=penalty)
    result = drafting(tiny, DraftSpec("tiny", 4)).generate(PROMPTS, max_new_tokens=NEW, sampling=sampling)
    assert result.drafting.acceptance > 0.7
    assert result.drafting.tokens_per_step > 3


# -- Sampled -----------------------------------------------------------------------------------------------------------------

VOCAB = 5
MANY = 800


class Table:
    """A model whose logits follow from the last token alone, so that every probability is known."""

    name, device, simulated = "table", torch.device("cpu"), False
    decode_step = None

    def __init__(self, seed, vocab=VOCAB):
        self.config = SimpleNamespace(
            kv_shapes=(KVShape(1, 64),), state_shapes={}, state_bytes=0, vocab_size=vocab, max_position_embeddings=64,
            num_layers=1,
        )  # fmt: skip
        self.logits = 1.5 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))

    def batch_invariant(self, plan):
        return True

    def forward(self, token_ids, batch, cache):
        return token_ids

    def head(self, hidden):
        return self.logits[hidden]


PLAN = KVSpec("bf16").plan(1)


def count_texts(model, draft, sampling, new_tokens, prompt, count=MANY):
    """How often each continuation came, of many sequences."""
    cache = PagedKVCache(PLAN, KVShape(1, 64), num_blocks=count, num_rows=count, block_size=8)
    paging = PagedSequences(count, 8, num_rows=count)
    request = GenerationRequest(
        prompts=[prompt] * count, max_new_tokens=new_tokens, max_context=8, sampling=sampling, draft=draft, draft_tokens=3
    )
    done, timing = generate(model, cache, paging, request)
    return Counter(tuple(c.token_ids) for c in done), timing.drafts


def exact(model, sampling, new_tokens, prompt):
    """The probability of each continuation, token by token."""
    chances = {(): 1.0}
    for _ in range(new_tokens):
        longer = {}
        for tokens, p in chances.items():
            text = [*prompt, *tokens]
            after = Sampler(sampling, prompt=text).probabilities(model.logits[text[-1]]).tolist()
            longer |= {(*tokens, token): p * q for token, q in enumerate(after)}
        chances = longer
    return chances


def chi_squared(counts, expected, count=MANY):
    """Pearson's statistic in standard deviations above its mean; cells that expect fewer than 5 are one."""
    assert all(expected[tokens] > 0 for tokens in counts)
    large = {tokens: count * p for tokens, p in expected.items() if count * p >= 5}
    rest = count - sum(large.values())
    cells = [(counts[tokens], mean) for tokens, mean in large.items()]
    if rest > 1:
        cells.append((count - sum(counts[tokens] for tokens in large), rest))
    statistic, freedom = sum((n - mean) ** 2 / mean for n, mean in cells), len(cells) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


SAMPLINGS = {
    "filters": Sampling(0.8, top_k=4, top_p=0.95, min_p=0.03, seed=7),
    "penalty": Sampling(1.2, repetition_penalty=1.6, seed=7),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_text_is_distributed_as_without_drafts(name):
    """Chi-squared over whole continuations of four tokens, the plain step among them, against the exact probabilities."""
    model, sampling, prompt = Table(1), SAMPLINGS[name], [2, 0, 1, 0]
    counts, cost = count_texts(model, ModelSource(name="other", executor=Table(2), plan=PLAN), sampling, 4, prompt)
    expected = exact(model, sampling, 4, prompt)
    assert sum(expected.values()) == pytest.approx(1)
    assert cost.proposed > MANY / 2
    assert 0.05 < cost.accepted / cost.proposed < 0.95
    assert abs(chi_squared(counts, expected)) < 4
    # The test would see the draft's own distribution.
    assert chi_squared(counts, exact(Table(2), replace(sampling, top_k=0, top_p=1.0, min_p=0.0), 4, prompt)) > 20


# -- What fits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "context"), [(3, 64), (9, 64), (VOCAB, 5)])
def test_a_smaller_vocabulary_or_context_ends_drafts_where_it_ends(vocab, context):
    """Models of one tokenizer may round up the size of their vocabulary differently."""
    model, other = Table(1), Table(4, vocab)
    other.config.max_position_embeddings = context
    plain, _ = count_texts(model, None, Sampling(), 6, [0, 1], count=3)
    counts, cost = count_texts(model, ModelSource(name="other", executor=other, plan=PLAN), Sampling(), 6, [0, 1], count=3)
    assert counts == plain
    assert cost.steps


def test_the_draft_that_ships_has_two_layers_and_takes_the_models_embedding(tiny):
    session = drafting(tiny, DraftSpec("tiny-draft"))
    config = session.draft.executor.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 256, 4096)
    assert session.draft.executor.weights.embedding.data_ptr() == session.executor.weights.embedding.data_ptr()
    folder = find_model("tiny-draft")
    assert sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".json", ".safetensors")) < 1_600_000
    with pytest.raises(InputError, match=r"lacks the tensor model\.embed_tokens\.weight"):
        tq.load("tiny-draft", executor="reference")
