"""The greedy diff: it sees what differs, excuses only near ties, and its figures are those of an independent computation."""

from dataclasses import replace

import bounds
import numpy as np
import pytest
import torch
from small_models import SMALL, small_model

from haarkv.engine.session import Session
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.text import ByteTokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import with_ops
from haarkv.validation.faults.layer import published_faults
from haarkv.validation.fidelity.greedy_diff import PositionScore, greedy_diff, summarize

CONFIG = replace(SMALL, vocab_size=256, max_position_embeddings=192)
MODEL = small_model(CONFIG)
PROMPTS = ["spam", "x", "eggs and bacon " * 3]
GARBAGE = 7
"""A token that none of these continuations holds."""


def session(kv="fp32", executor=None, eos=()):
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_ids = eos
    return Session("small", CONFIG, executor or ReferenceExecutor(MODEL), tokenizer, KVSpec(kv).plan(CONFIG.num_layers))


class AlteredExecutor(ReferenceExecutor):
    """The reference, whose logits a function of (logits, tokens fed, sequence lengths) replaces."""

    def __init__(self, alter):
        super().__init__(MODEL)
        self._alter = alter

    def forward(self, token_ids, batch, cache):
        self._fed = token_ids, batch.seq_lens
        return super().forward(token_ids, batch, cache)

    def head(self, hidden):
        return self._alter(super().head(hidden).clone(), *self._fed)


def preferring(choices):
    """By the tokens so far, the token that a choice of the logits of a sequence names is made the best by a little."""

    def alter(logits, _, seq_lens):
        for row, length in zip(logits, seq_lens.tolist(), strict=True):
            if length in choices:
                row[choices[length](row)] = row.max() + 1e-4
        return logits

    return AlteredExecutor(alter)


def diff(a, b, prompts=PROMPTS, max_new_tokens=6, dtype="float32"):
    return greedy_diff(a, b, prompts, dtype=dtype, max_new_tokens=max_new_tokens)


def second(row):
    return row.argsort(descending=True)[1]


def garbage(_):
    return GARBAGE


@pytest.fixture
def bound(monkeypatch):
    """Sets how far apart two tokens' logits may lie, in standard deviations, and still be a near tie."""
    return lambda value: monkeypatch.setitem(bounds.EXECUTOR_LOGITS, "float32", value)


# -- What it sees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "tq4"])
def test_a_side_is_identical_to_itself(kv):
    result = diff(session(kv), session(kv))
    assert result.first_divergence is None
    assert not result.faulty
    fidelity = result.fidelity
    assert (fidelity.positions, fidelity.top1_agreement) == (18, 1)
    assert fidelity.kl_mean == fidelity.kl_median == fidelity.kl_p999 == fidelity.logit_error == 0
    for row, alone in zip(result.prompts, session(kv).generate(PROMPTS, max_new_tokens=6).completions, strict=True):
        assert row.a.token_ids == row.b.token_ids == alone.token_ids
        assert row.text_a == "".join(f"<{token}>" for token in alone.token_ids)


def test_formats_differ_and_nothing_is_excused(bound):
    bound(1e9)
    result = diff(session("fp32"), session("tq4"), max_new_tokens=16)
    assert not result.same_format
    first = result.first_divergence
    assert first is not None
    assert not first.scores.near_tie
    assert result.near_ties == 0
    assert len(result.unexplained) == round((1 - result.fidelity.top1_agreement) * result.fidelity.positions) > 0
    assert (first.prompt, first.position) in result.unexplained
    assert not result.faulty
    assert 0 < result.fidelity.top1_agreement < 1
    assert 0 < result.fidelity.kl_median <= result.fidelity.kl_mean <= result.fidelity.kl_p999
    row = result.prompts[first.prompt]
    assert row.a.token_ids[: first.position] == row.b.token_ids[: first.position]
    assert (row.a.token_ids[first.position], row.b.token_ids[first.position]) == (first.token_a, first.token_b)
    assert (first.scores.top_a[0][0], first.scores.top_b[0][0]) == (first.token_a, first.token_b)


@pytest.mark.parametrize("kv", ["k=fp32,v=tq4", "k=tq4,v=fp32"])
def test_another_format_of_one_side_of_the_cache_is_another_format(kv):
    assert not diff(session("fp32"), session(kv), ["x"], max_new_tokens=1).same_format
    assert diff(session(kv), session(kv), ["x"], max_new_tokens=1).same_format


def other_scale(q, at, softmax_scale):
    return reference.paged_attention(q, at, softmax_scale * 1.5)


@pytest.mark.parametrize("name", ["a transposed rotation", "K stored as V", "a slot off by one", "an MLP left out"])
def test_a_planted_fault_is_seen_and_leaves_the_other_side_alone(name):
    fault = next(fault for fault in published_faults(MODEL, 1) if fault.name == name)
    result = diff(session("tq4"), session("tq4", ReferenceExecutor(MODEL, fault.table())))
    assert result.faulty
    assert result.first_divergence is not None
    assert not result.first_divergence.scores.near_tie
    assert result.fidelity.kl_mean > 1e-3
    alone = session("tq4").generate(PROMPTS, max_new_tokens=6).completions
    assert [row.a.token_ids for row in result.prompts] == [c.token_ids for c in alone]


@pytest.mark.parametrize("a_ends", [False, True])
def test_an_end_of_text_on_one_side_is_a_divergence(a_ends):
    plain = session(eos=(GARBAGE,))
    ending = session(executor=preferring({len("spam") + 3: garbage}), eos=(GARBAGE,))
    result = diff(ending, plain, PROMPTS[:1]) if a_ends else diff(plain, ending, PROMPTS[:1])
    first, row = result.first_divergence, result.prompts[0]
    assert first.position == 3
    assert (first.token_a if a_ends else first.token_b) == GARBAGE
    assert ((row.a if a_ends else row.b).finish, (row.b if a_ends else row.a).finish) == ("eos", "length")
    assert len(row.scores) == result.fidelity.positions == (4 if a_ends else 6)
    assert result.faulty


def test_two_tokens_that_both_end_the_text_are_told_apart():
    ends = (GARBAGE, GARBAGE + 1)
    a, b = (session(executor=preferring({len("spam") + 3: lambda _, e=end: e}), eos=ends) for end in ends)
    first = diff(a, b, PROMPTS[:1]).first_divergence
    assert (first.position, first.token_a, first.token_b) == (3, *ends)


def test_a_full_context_ends_both():
    prompt = "a" * (CONFIG.max_position_embeddings - 2)
    result = diff(session(), session(), [prompt, "b"])
    assert result.prompts[0].a.finish == result.prompts[0].b.finish == "context"
    assert [len(row.scores) for row in result.prompts] == [3, 6]


# -- What it excuses ------------------------------------------------------------------------------------------------------


def test_the_same_format_is_excused_within_the_bound_and_no_further(bound):
    altered_session = session(executor=preferring({len("spam") + 2: second}))
    score = diff(session(), altered_session, PROMPTS[:1]).first_divergence.scores
    assert score.gap_a == score.margin > 0
    relative = score.gap_a / score.spread
    for value, near in ((relative * 1.001, True), (relative * 0.999, False)):
        bound(value)
        result = diff(session(), altered_session, PROMPTS[:1])
        assert result.first_divergence.position == 2
        assert result.first_divergence.scores.near_tie == near
        assert (result.near_ties, result.unexplained) == ((1, []) if near else (0, [(0, 2)]))
        assert result.faulty != near


@pytest.mark.parametrize("garbage_side", "AB")
def test_a_token_that_one_side_does_not_want_is_no_near_tie(garbage_side, bound):
    """Although A's two best, or A's own choice and B's, lie as close as the bound."""
    altered_session = session(executor=preferring({len("spam") + 2: garbage}))
    sides = (session(), altered_session) if garbage_side == "B" else (altered_session, session())
    score = diff(*sides, PROMPTS[:1]).first_divergence.scores
    near, far = (score.margin, score.gap_a) if garbage_side == "B" else (score.gap_a, score.gap_b)
    assert near < far
    bound((near + far) / 2 / score.spread)
    result = diff(*sides, PROMPTS[:1])
    assert not result.first_divergence.scores.near_tie
    assert result.faulty


def test_a_near_tie_does_not_hide_what_comes_after_it_and_what_is_none_is_named(bound):
    """Neither in its own text nor in another."""
    end = len("spam")
    score = diff(session(), session(executor=preferring({end + 1: second})), PROMPTS[:1]).first_divergence.scores
    bound(score.gap_a / score.spread * 1.001)
    result = diff(session(), session(executor=preferring({end + 1: second, end + 5: garbage})), PROMPTS[:1])
    assert result.first_divergence.scores.near_tie
    assert (result.near_ties, result.unexplained) == (1, [(0, 5)])
    assert result.faulty
    result = diff(session(), session(executor=preferring({end + 1: second, 150 + 4: garbage})), ["spam", "b" * 150])
    assert [(row.divergence.position, row.divergence.scores.near_tie) for row in result.prompts] == [(1, True), (4, False)]
    assert (result.first_divergence.prompt, result.first_divergence.position) == (1, 4)


# -- What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", "AB")
def test_a_side_that_does_not_repeat_itself_is_refused(side):
    calls = []

    def alter(logits, *_):
        calls.append(None)
        if len(calls) > 8:  # six steps to generate, then others when the same tokens are fed again
            logits[:, GARBAGE] = 1e3
        return logits

    sides = {"A": session(), "B": session()} | {side: session(executor=AlteredExecutor(alter))}
    with pytest.raises(InputError, match=f"side {side}, prompt 1, new token 3.*not repeatable"):
        diff(sides["A"], sides["B"], PROMPTS[:1])


@pytest.mark.parametrize("prompts", [[], [""], ["a" * 600]], ids=["none", "empty", "too_long"])
def test_prompts_that_cannot_be_used_are_refused(prompts):
    with pytest.raises(InputError, match="prompt"):
        diff(session(), session(), prompts)


# -- The figures ----------------------------------------------------------------------------------------------------------


def whole(ops, ids):
    """Logits [T, vocab] float64 after every token, from one forward of the whole sequence with a cache of its own."""
    fresh = session()
    cache, paging = fresh.new_cache(1, len(ids))
    batch = paging.batch([paging.add()], [len(ids)])
    hidden = MODEL.layers(MODEL.embed(torch.tensor(ids)), range(CONFIG.num_layers), batch, cache, ops)
    return MODEL.head(hidden, ops).double().numpy()


def numpy_kl(a, b):
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (a, b))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def test_figures_equal_an_independent_computation():
    ops = with_ops(reference, {"paged_attention": other_scale})
    result = diff(session(), session(executor=ReferenceExecutor(MODEL, ops)), max_new_tokens=16)
    logits_a, logits_b = [], []
    for prompt, row in zip(PROMPTS, result.prompts, strict=True):
        ids = [*prompt.encode(), *row.a.token_ids[:-1]]
        logits_a.append(whole(reference, ids)[len(prompt) - 1 :])
        logits_b.append(whole(ops, ids)[len(prompt) - 1 :])
        assert logits_a[-1].argmax(-1).tolist() == row.a.token_ids
    a, b = np.concatenate(logits_a), np.concatenate(logits_b)
    scores = [position for row in result.prompts for position in row.scores]
    kl, atol = numpy_kl(a, b), bounds.REORDERED_LOGITS
    assert len(scores) == len(kl) == 48
    assert np.median(kl) > 1e-3
    np.testing.assert_allclose([s.kl for s in scores], kl, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose([s.logit_error for s in scores], abs(a - b).max(-1), atol=2 * atol)
    np.testing.assert_allclose([s.spread for s in scores], a.std(-1), atol=atol)
    np.testing.assert_allclose([[x for _, x in s.top_a] for s in scores], -np.sort(-a, -1)[:, :5], atol=atol)
    np.testing.assert_allclose([[x for _, x in s.top_b] for s in scores], -np.sort(-b, -1)[:, :5], atol=atol)
    every = np.arange(48)
    np.testing.assert_allclose([s.gap_a for s in scores], a.max(-1) - a[every, b.argmax(-1)], atol=2 * atol)
    np.testing.assert_allclose([s.gap_b for s in scores], b.max(-1) - b[every, a.argmax(-1)], atol=2 * atol)
    fidelity = result.fidelity
    assert fidelity.positions == 48
    assert fidelity.top1_agreement == (a.argmax(-1) == b.argmax(-1)).mean() < 1
    np.testing.assert_allclose(
        [fidelity.kl_mean, fidelity.kl_median, fidelity.kl_p999], [kl.mean(), np.median(kl), kl.max()], rtol=1e-3
    )
    np.testing.assert_allclose(fidelity.logit_error, abs(a - b).max(), atol=2 * atol)
    np.testing.assert_allclose(fidelity.relative_logit_error, (abs(a - b).max(-1) / a.std(-1)).max(), rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 47, 999, 1000, 1001, 2500])
def test_the_quantiles_are_nearest_rank_and_median(count):
    kl = np.random.default_rng(count).permutation(count).astype(float)
    one = PositionScore(((0, 1.0), (1, 0.5)), ((0, 1.0), (1, 0.5)), 0.0, 0.0, 0.0, False, 1.0, 0.0)
    fidelity = summarize([replace(one, kl=value) for value in kl])
    assert fidelity.kl_median == np.median(kl)
    assert fidelity.kl_p999 == np.quantile(kl, 0.999, method="inverted_cdf")
    assert (fidelity.kl_p999 == kl.max()) == (count < 1000)
