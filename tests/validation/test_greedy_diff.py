"""The greedy diff: it sees what differs, excuses only near ties, and its figures are those of an independent computation."""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import bounds
import numpy as np
import pytest
import torch
from checkpoints import saying, write_checkpoint
from machines import has_only
from refusals import assert_refused
from small_models import SMALL, small_model

from haarkv.engine.session import Session
from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.text import ByteTokenizer
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.table import OP_NAMES
from haarkv.validation.fidelity import setup
from haarkv.validation.fidelity.greedy_diff import Scored, greedy_diff, score, summarize, teacher_forced
from haarkv.validation.fidelity.setup import (
    Contender,
    default_dtype,
    load_contenders,
    parse_contender,
    resolve_contenders,
)
from tq.cli import main
from tq.commands.diff import _head, _tail

CONFIG = replace(SMALL, vocab_size=256, max_position_embeddings=192)
MODEL = small_model(CONFIG)
PROMPTS = ["spam", "x", "eggs and bacon " * 3]
GARBAGE = 7
"""A token that none of these continuations holds."""


def session(kv="fp32", executor=None, eos=()):
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_ids = eos
    return Session("small", CONFIG, executor or ReferenceExecutor(MODEL), tokenizer, KVSpec(kv).plan(CONFIG.num_layers))


def table(**ops):
    return SimpleNamespace(**{name: ops.get(name, getattr(reference, name)) for name in OP_NAMES})


class Altered:
    """The reference, whose logits a function of (logits, tokens fed, sequence lengths) replaces."""

    name, description, config, device, ops = "altered", "an altered reference", CONFIG, torch.device("cpu"), None
    batches_alike = False
    simulated, compiled = False, {}

    def __init__(self, alter):
        self._alter, self._reference = alter, ReferenceExecutor(MODEL)

    def forward(self, token_ids, batch, cache):
        self._fed = token_ids, batch.seq_lens
        return self._reference.forward(token_ids, batch, cache)

    def head(self, hidden):
        return self._alter(self._reference.head(hidden).clone(), *self._fed)


def preferring(choose, *lengths):
    """After so many tokens, the token that `choose(logits of a sequence)` names is made the best by a little."""

    def alter(logits, _, seq_lens):
        for row, length in zip(logits, seq_lens.tolist(), strict=True):
            if length in lengths:
                row[choose(row)] = row.max() + 1e-4
        return logits

    return Altered(alter)


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
    found = diff(session(kv), session(kv))
    assert found.first_divergence is None
    assert not found.faulty
    fidelity = found.fidelity
    assert (fidelity.positions, fidelity.top1_agreement) == (18, 1)
    assert fidelity.kl_mean == fidelity.kl_median == fidelity.kl_p999 == fidelity.logit_error == 0
    for row, alone in zip(found.prompts, session(kv).generate(PROMPTS, max_new_tokens=6).completions, strict=True):
        assert row.a.token_ids == row.b.token_ids == alone.token_ids
        assert row.text_a == "".join(f"<{token}>" for token in alone.token_ids)


def test_formats_differ_and_nothing_is_excused(bound):
    bound(1e9)
    found = diff(session("fp32"), session("tq4"), max_new_tokens=16)
    assert not found.same_format
    first = found.first_divergence
    assert first is not None
    assert not first.near_tie
    assert found.near_ties == 0
    assert len(found.unexplained) == round((1 - found.fidelity.top1_agreement) * found.fidelity.positions) > 0
    assert (first.prompt, first.position) in found.unexplained
    assert not found.faulty
    assert 0 < found.fidelity.top1_agreement < 1
    assert 0 < found.fidelity.kl_median <= found.fidelity.kl_mean <= found.fidelity.kl_p999
    row = found.prompts[first.prompt]
    assert row.a.token_ids[: first.position] == row.b.token_ids[: first.position]
    assert (row.a.token_ids[first.position], row.b.token_ids[first.position]) == (first.token_a, first.token_b)
    assert (first.scored.top_a[0][0], first.scored.top_b[0][0]) == (first.token_a, first.token_b)


@pytest.mark.parametrize("kv", ["k=fp32,v=tq4", "k=tq4,v=fp32"])
def test_another_format_of_one_side_of_the_cache_is_another_format(kv):
    assert not diff(session("fp32"), session(kv), ["x"], max_new_tokens=1).same_format
    assert diff(session(kv), session(kv), ["x"], max_new_tokens=1).same_format


def late_rope(x, cos, sin):
    return reference.rope(x, cos.roll(1, 0), sin.roll(1, 0))


def v_for_k(k, v, cache, layer, batch):
    reference.store_kv(v, k, cache, layer, batch)


def next_slot(k, v, cache, layer, batch):
    reference.store_kv(k, v, cache, layer, replace(batch, slot_mapping=batch.slot_mapping ^ 1))


def other_scale(q, cache, layer, batch, softmax_scale):
    return reference.paged_attention(q, cache, layer, batch, softmax_scale * 1.5)


FAULTS = {
    "rope_of_another_token": {"rope": late_rope},
    "k_and_v_swapped": {"store_kv": v_for_k},
    "slots_swapped": {"store_kv": next_slot},
    "softmax_scale": {"paged_attention": other_scale},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_and_leaves_the_other_side_alone(fault):
    faulty = session("tq4", ReferenceExecutor(MODEL, table(**FAULTS[fault])))
    found = diff(session("tq4"), faulty)
    assert found.faulty
    assert found.first_divergence is not None
    assert not found.first_divergence.near_tie
    assert found.fidelity.kl_mean > 1e-3
    alone = session("tq4").generate(PROMPTS, max_new_tokens=6).completions
    assert [row.a.token_ids for row in found.prompts] == [c.token_ids for c in alone]


@pytest.mark.parametrize("a_ends", [False, True])
def test_an_end_of_text_on_one_side_is_a_divergence(a_ends):
    plain = session(eos=(GARBAGE,))
    ending = session(executor=preferring(garbage, len("spam") + 3), eos=(GARBAGE,))
    found = diff(ending, plain, PROMPTS[:1]) if a_ends else diff(plain, ending, PROMPTS[:1])
    first, row = found.first_divergence, found.prompts[0]
    assert first.position == 3
    assert (first.token_a if a_ends else first.token_b) == GARBAGE
    assert ((row.a if a_ends else row.b).finish, (row.b if a_ends else row.a).finish) == ("eos", "length")
    assert len(row.scored) == found.fidelity.positions == (4 if a_ends else 6)
    assert found.faulty


def test_both_ending_alike_is_no_divergence_and_the_end_is_scored():
    sides = [session(executor=preferring(garbage, len("spam") + 3), eos=(GARBAGE,)) for _ in "ab"]
    found = diff(*sides, PROMPTS[:1])
    assert found.first_divergence is None
    assert found.prompts[0].a.finish == found.prompts[0].b.finish == "eos"
    assert found.fidelity.positions == 4


def test_two_tokens_that_both_end_the_text_are_told_apart():
    ends = (GARBAGE, GARBAGE + 1)
    a, b = (session(executor=preferring(lambda _, e=end: e, len("spam") + 3), eos=ends) for end in ends)
    first = diff(a, b, PROMPTS[:1]).first_divergence
    assert (first.position, first.token_a, first.token_b) == (3, *ends)


def test_a_prompt_is_compared_alike_alone_and_beside_others():
    together = diff(session("fp32"), session("k=fp32,v=bf16"))
    for index, prompt in enumerate(PROMPTS):
        alone = diff(session("fp32"), session("k=fp32,v=bf16"), [prompt])
        assert alone.prompts[0].a.token_ids == together.prompts[index].a.token_ids
        expected = [position.top_a[0] for position in together.prompts[index].scored]
        assert [token for token, _ in expected] == alone.prompts[0].a.token_ids
        for (_, logit), position in zip(expected, alone.prompts[0].scored, strict=True):
            assert abs(logit - position.top_a[0][1]) < bounds.REORDERED_LOGITS


def test_a_full_context_ends_both():
    prompt = "a" * (CONFIG.max_position_embeddings - 2)
    found = diff(session(), session(), [prompt, "b"])
    assert found.prompts[0].a.finish == found.prompts[0].b.finish == "context"
    assert [len(row.scored) for row in found.prompts] == [3, 6]


def test_what_is_fed_may_need_one_more_block():
    found = diff(session(), session(), ["a" * (BLOCK_SIZE - 1)])
    assert len(found.prompts[0].scored) == 6


# -- What it excuses ------------------------------------------------------------------------------------------------------


def test_the_same_format_is_excused_within_the_bound_and_no_further(bound):
    altered = session(executor=preferring(second, len("spam") + 2))
    scored = diff(session(), altered, PROMPTS[:1]).first_divergence.scored
    assert scored.gap_a == scored.margin > 0
    relative = scored.gap_a / scored.spread
    for value, near in ((relative * 1.001, True), (relative * 0.999, False)):
        bound(value)
        found = diff(session(), altered, PROMPTS[:1])
        assert found.first_divergence.position == 2
        assert found.first_divergence.near_tie == near
        assert (found.near_ties, found.unexplained) == ((1, []) if near else (0, [(0, 2)]))
        assert found.faulty != near


def test_a_token_that_a_does_not_want_is_no_near_tie_although_two_others_tie(bound):
    altered = session(executor=preferring(garbage, len("spam") + 2))
    scored = diff(session(), altered, PROMPTS[:1]).first_divergence.scored
    assert scored.margin < scored.gap_a
    bound((scored.margin + scored.gap_a) / 2 / scored.spread)
    found = diff(session(), altered, PROMPTS[:1])
    assert not found.first_divergence.near_tie
    assert found.faulty


def test_a_tie_of_a_does_not_excuse_a_b_that_is_decided(bound):
    tying = session(executor=preferring(garbage, len("spam") + 2))
    bound(0.01)
    found = diff(tying, session(), PROMPTS[:1])
    scored = found.first_divergence.scored
    assert scored.gap_a < 0.001 * scored.spread < scored.gap_b
    assert not found.first_divergence.near_tie
    assert found.faulty


def test_a_near_tie_does_not_hide_what_comes_after_it(bound):
    swapped = diff(session(), session(executor=preferring(second, len("spam") + 2)), PROMPTS[:1])
    scored = swapped.first_divergence.scored
    bound(scored.gap_a / scored.spread * 1.001)

    def alter(logits, _, seq_lens):
        length = int(seq_lens)
        if length == len("spam") + 2:
            logits[0, second(logits[0])] = logits.max() + 1e-4
        elif length == len("spam") + 5:
            logits[0, GARBAGE] = logits.max() + 1e-4
        return logits

    found = diff(session(), session(executor=Altered(alter)), PROMPTS[:1])
    assert found.first_divergence.near_tie
    assert (found.near_ties, found.unexplained) == (1, [(0, 5)])
    assert found.faulty


def test_of_several_divergences_the_first_that_is_no_near_tie_is_named(bound):
    length = len("spam") + 1
    altered = session(executor=preferring(second, length))
    first = diff(session(), altered, ["spam"]).first_divergence
    bound(first.scored.gap_a / first.scored.spread * 1.001)

    def alter(logits, _, seq_lens):
        for row, now in zip(logits, seq_lens.tolist(), strict=True):
            if now == length:
                row[second(row)] = row.max() + 1e-4
            elif now == 150 + 4:
                row[GARBAGE] = row.max() + 1e-4
        return logits

    found = diff(session(), session(executor=Altered(alter)), ["spam", "b" * 150])
    assert [(row.divergence.position, row.divergence.near_tie) for row in found.prompts] == [(1, True), (4, False)]
    assert (found.first_divergence.prompt, found.first_divergence.position) == (1, 4)


def test_the_bounds_leave_room_for_what_was_measured_and_not_much_more():
    assert 0.180 < bounds.EXECUTOR_LOGITS["bfloat16"] < 2 * 0.180
    assert 0.024 < bounds.EXECUTOR_LOGITS["float32"] < 4 * 0.024


# -- What it refuses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", "AB")
def test_a_side_that_does_not_repeat_itself_is_refused(side):
    calls = []

    def alter(logits, *_):
        calls.append(None)
        if len(calls) > 8:  # six steps to generate, then others when the same tokens are fed again
            logits[:, GARBAGE] = 1e3
        return logits

    sides = {"A": session(), "B": session()} | {side: session(executor=Altered(alter))}
    with pytest.raises(InputError, match=f"side {side}, prompt 1, new token 3.*not repeatable"):
        diff(sides["A"], sides["B"], PROMPTS[:1])


def test_a_is_to_repeat_itself_also_after_the_divergence():
    calls = []

    def alter(logits, *_):
        calls.append(None)
        if len(calls) == 6 + 6:  # the last of six steps when fed again
            logits[:, GARBAGE] = 1e3
        return logits

    other = session(executor=preferring(second, len("spam")))
    assert diff(session(), other, PROMPTS[:1]).first_divergence.position == 0
    with pytest.raises(InputError, match=r"side A, prompt 1, new token 6.*not repeatable"):
        diff(session(executor=Altered(alter)), other, PROMPTS[:1])


def test_logits_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        score(torch.zeros(5), torch.zeros(6))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_is_not_made_of_what_is_not_finite(value):
    good, bad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, value, 3.0])
    for sides, name in (((bad, good), "A"), ((good, bad), "B")):
        with pytest.raises(NonFiniteError, match=f"side {name}"):
            score(*sides)


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
    ops = table(paged_attention=other_scale)
    found = diff(session(), session(executor=ReferenceExecutor(MODEL, ops)), max_new_tokens=16)
    of_a, of_b = [], []
    for prompt, row in zip(PROMPTS, found.prompts, strict=True):
        ids = [*prompt.encode(), *row.a.token_ids[:-1]]
        of_a.append(whole(reference, ids)[len(prompt) - 1 :])
        of_b.append(whole(ops, ids)[len(prompt) - 1 :])
        assert of_a[-1].argmax(-1).tolist() == row.a.token_ids
    a, b = np.concatenate(of_a), np.concatenate(of_b)
    scored = [position for row in found.prompts for position in row.scored]
    kl, atol = numpy_kl(a, b), bounds.REORDERED_LOGITS
    assert len(scored) == len(kl) == 48
    assert np.median(kl) > 1e-3
    np.testing.assert_allclose([s.kl for s in scored], kl, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose([s.logit_error for s in scored], abs(a - b).max(-1), atol=2 * atol)
    np.testing.assert_allclose([s.spread for s in scored], a.std(-1), atol=atol)
    np.testing.assert_allclose([[x for _, x in s.top_a] for s in scored], -np.sort(-a, -1)[:, :5], atol=atol)
    np.testing.assert_allclose([[x for _, x in s.top_b] for s in scored], -np.sort(-b, -1)[:, :5], atol=atol)
    every = np.arange(48)
    np.testing.assert_allclose([s.gap_a for s in scored], a.max(-1) - a[every, b.argmax(-1)], atol=2 * atol)
    np.testing.assert_allclose([s.gap_b for s in scored], b.max(-1) - b[every, a.argmax(-1)], atol=2 * atol)
    fidelity = found.fidelity
    assert fidelity.positions == 48
    assert fidelity.top1_agreement == (a.argmax(-1) == b.argmax(-1)).mean() < 1
    np.testing.assert_allclose(
        [fidelity.kl_mean, fidelity.kl_median, fidelity.kl_p999], [kl.mean(), np.median(kl), kl.max()], rtol=1e-3
    )
    np.testing.assert_allclose(fidelity.logit_error, abs(a - b).max(), atol=2 * atol)
    np.testing.assert_allclose(fidelity.relative_logit_error, (abs(a - b).max(-1) / a.std(-1)).max(), rtol=1e-3)


def test_divergence_is_of_b_from_a():
    a, b = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([2.0, -1.0, 0.5])
    assert score(a, b).kl == pytest.approx(numpy_kl(a.double().numpy(), b.double().numpy()), rel=1e-12)
    assert score(b, a).kl != pytest.approx(score(a, b).kl, rel=0.01)
    assert score(a, a + 5).kl < 1e-15


@pytest.mark.parametrize("count", [1, 2, 47, 999, 1000, 1001, 2500])
def test_the_quantiles_are_nearest_rank_and_median(count):
    kl = np.random.default_rng(count).permutation(count).astype(float)
    one = Scored(((0, 1.0), (1, 0.5)), ((0, 1.0), (1, 0.5)), 0.0, 0.0, 0.0, 1.0, 0.0)
    fidelity = summarize([replace(one, kl=value) for value in kl])
    assert fidelity.kl_median == np.median(kl)
    assert fidelity.kl_p999 == np.quantile(kl, 0.999, method="inverted_cdf")
    assert (fidelity.kl_p999 == kl.max()) == (count < 1000)


def test_the_lowest_id_comes_first_among_equal_logits():
    logits = torch.zeros(40)
    logits[30] = 1
    assert [token for token, _ in score(logits, logits).top_a] == [30, 0, 1, 2, 3]


def test_teacher_forcing_with_nothing_to_feed_scores_the_prompt():
    [[position], [_, _]] = teacher_forced(session(), session("tq4"), [[65, 66], [67]], [[], [68]])
    assert position.kl > 0


# -- Sides ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "executor", "kv"),
    [
        ("bf16", "auto", "bf16"),
        ("auto", "auto", "tq4"),
        ("auto:tq2", "auto", "tq2"),
        ("reference", "reference", "tq4"),
        ("reference:tq4_seed", "reference", "tq4_seed"),
        ("k=bf16,v=tq4", "auto", "k=bf16,v=tq4"),
        ("v=tq4, k=bf16", "auto", "k=bf16,v=tq4"),
        ("reference:k=tq4,v=tq4", "reference", "tq4"),
    ],
)
def test_a_side_is_executor_format_or_both(spec, executor, kv):
    assert parse_contender(spec) == Contender(executor, kv)


def test_no_word_is_both_an_executor_and_a_format():
    assert not {catalog.AUTO, *catalog.NAMES} & set(formats.names())


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        # One executor for both, or two formats would be told apart by who ran them.
        ("kivi2", "tq4", ("cpu", "cpu")),
        ("bf16", "tq4", ("cpu", "cpu")),
        ("tq4", "tbq4_0", ("cpu", "cpu")),
        ("reference", "auto", ("reference", "cpu")),
        ("onnx", "reference:tq2", ("onnx", "reference")),
    ],
)
def test_auto_is_the_fastest_that_reads_both_sides(monkeypatch, a, b, names):
    has_only(monkeypatch, "cpu", "reference")
    sides = resolve_contenders("tiny", parse_contender(a), parse_contender(b), KVSpec())
    assert tuple(side.executor for side in sides) == names
    assert tuple(side.kv for side in sides) == (parse_contender(a).kv, parse_contender(b).kv)


def test_the_dtype_is_one_that_both_executors_run():
    reference, npu = Contender("reference"), Contender("npu")
    assert default_dtype(reference, Contender("reference", "bf16")) == "float32"
    assert default_dtype(reference, npu) == default_dtype(npu, reference) == "bfloat16"


def test_both_sides_share_one_loaded_model_and_the_device_is_not_the_references(monkeypatch):
    made, loaded = [], []
    monkeypatch.setattr(setup, "load_model", lambda *_, **how: loaded.append(how) or MODEL)
    monkeypatch.setattr(catalog, "create", lambda *args: made.append(args) or ReferenceExecutor(args[1]))
    a, b = load_contenders("random:0.6b", Contender("reference", "bf16"), Contender("npu"), dtype="bfloat16", device="sim")
    assert len(loaded) == 1
    assert all(args[1] is MODEL for args in made)
    assert [(args[0], args[-1]) for args in made] == [("reference", None), ("npu", "sim")]
    assert (a.plan.describe(), b.plan.describe()) == ("bf16", "tq4")


# -- The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    def run(*args):
        code = main(["diff", *map(str, args)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("diff") / "checkpoint")


BOTH = ("--a", "tq4", "--b", "tq4")


def test_json_has_the_promised_keys(run, checkpoint):
    args = ("--model", checkpoint, "--a", "fp32", "--b", "tq4", "--prompt", "spam", "--prompt", "x" * 200, "--json")
    code, out, err = run(*args, "--max-new-tokens", 40)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.keys() == {
        "a", "b", "model", "dtype", "same_format", "first_divergence", "positions", "top1_agreement", "kl", "logit_error",
        "relative_logit_error", "near_ties", "unexplained", "prompts",
    }  # fmt: skip
    assert (found["a"], found["b"], found["dtype"]) == ("reference:fp32", "reference:tq4", "float32")
    assert found["kl"].keys() == {"mean", "median", "p999"}
    first = found["first_divergence"]
    assert first.keys() == {
        "prompt", "position", "token_a", "token_b", "text_a", "text_b", "margin", "gap_a", "gap_b", "spread", "logit_error",
        "kl", "near_tie", "top_a", "top_b",
    }  # fmt: skip
    assert {name: first[name] for name in ("prompt", "position")} in found["unexplained"]
    row = found["prompts"][first["prompt"]]
    assert row["divergence"] == first
    assert row["a"]["token_ids"][first["position"]] == first["token_a"] != first["token_b"]
    assert row["b"]["token_ids"][first["position"]] == first["token_b"]
    assert first["margin"] == first["top_a"][0]["logit"] - first["top_a"][1]["logit"]
    assert len(first["top_a"]) == len(first["top_b"]) == 5
    assert found["positions"] == sum(len(r["a"]["token_ids"]) + (r["a"]["finish"] == "eos") for r in found["prompts"])


def test_the_same_side_twice_is_identical_in_words_and_json(run, checkpoint):
    common = (*BOTH, "--model", checkpoint, "--max-new-tokens", 5)
    code, out, err = run(*common, "--prompt", "spam")
    assert (code, err) == (0, "")
    assert "prompt 1: the same 5 tokens" in out
    assert "Identical: every token of every prompt." in out
    code, out, _ = run(*common, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["first_divergence"] is None
    assert (found["top1_agreement"], found["kl"]) == (1, {"mean": 0, "median": 0, "p999": 0})
    assert (found["near_ties"], found["unexplained"]) == (0, [])
    assert len(found["prompts"]) == 4


def plant(monkeypatch, ops):
    """Side B of the next diff runs with this table."""
    right = catalog.create

    def create(name, model, *args):
        made.append(name)
        return ReferenceExecutor(model, ops) if len(made) == 2 else right(name, model, *args)

    made = []
    monkeypatch.setattr(catalog, "create", create)


def test_a_fault_exits_with_1(run, checkpoint, monkeypatch):
    plant(monkeypatch, table(rope=lambda x, cos, sin: x.float()))
    code, out, err = run(*BOTH, "--model", checkpoint, "--prompt", "spam and eggs")
    assert (code, err) == (1, "")
    assert "differs" in out
    assert "where no rounding explains it" in out


def test_the_end_of_text_is_shown_in_words(run, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "abc", mutate=saying("abc"))
    code, out, _ = run(*BOTH, "--model", folder, "--prompt", "a")
    assert "the same 2 tokens and the end of text" in out
    # The head's rows 0 and up: a fault in the last norm makes B say something else where A ends.
    plant(monkeypatch, table(rms_norm=lambda x, w, eps: -reference.rms_norm(x, w, eps)))
    code, out, _ = run(*BOTH, "--model", folder, "--prompt", "c")
    assert code == 1
    assert "A     » end of text (256)\n" in out
    assert "new token 1 differs" in out
    assert "both    nothing" in out


def test_lines_fit_a_terminal_and_show_where_texts_part(run):
    args = ("--a", "fp32", "--b", "tq4", "--model", "tiny", "--max-new-tokens", 16, "--threads", 1)
    code, out, err = run(*args, "--prompt", "import os\nimport sys\n\n", "--prompt", "\n" * 99, "--prompt", "x" * 99 + "END")
    assert (code, err) == (0, "")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert "prompt  'import os\\nimport sys\\n\\n'" in out
    assert "xEND'\n" in out
    assert "differs" in out
    assert "Between formats that is no fault." in out


@pytest.mark.parametrize("text", ["0123456789" * 9, "\n" * 90, "'\"" * 40], ids=["digits", "escapes", "quotes"])
def test_long_texts_are_cut_at_the_far_end(text):
    text = f"first {text} last"
    for shown, cut in ((_head(text), text.startswith), (_tail(text), text.endswith)):
        assert 40 < len(shown) <= 57
        assert cut(ast.literal_eval(shown.strip("…")))
    assert _head(text)[-1] == _tail(text)[0] == "…"
    assert _head("short") == _tail("short") == "'short'"


REFUSED = {
    "unknown_word": (["--a", "abacus"], ["abacus", "EXECUTOR:FORMAT", "reference", "tq4_seed", "k=NAME,v=NAME"]),
    "unknown_executor": (["--b", "abacus:tq4"], ["abacus:tq4", "executor of auto, reference"]),
    "unknown_format": (["--b", "reference:tq9"], ["tq9", "format of tq4"]),
    "no_format_after_the_colon": (["--b", "reference:"], ["reference:", "EXECUTOR:FORMAT"]),
    "no_executor_before_the_colon": (["--b", ":tq4"], [":tq4", "EXECUTOR:FORMAT"]),
    "empty": (["--a", ""], ["''", "EXECUTOR"]),
    "half_a_pair": (["--a", "k=tq4"], ["k=tq4", "k=NAME,v=NAME"]),
    "unknown_in_a_pair": (["--a", "reference:k=tq4,v=tq9"], ["tq9", "tq4"]),
    "no_such_model": (["--model", "nothing/here"], ["no such model", "nothing/here"]),
    "prompt_beyond_the_model": (["--prompt", "a" * 1025], ["1025 tokens", "only 1024"]),
    "empty_prompt": (["--prompt", ""], ["prompt 1", "empty"]),
    "prompt_file_missing": (["--prompt-file", "nothing.txt"], ["nothing.txt"]),
    "device": (["--device", "moon"], ["moon", "cpu, cuda"]),
    "device_of_another": (["--device", "sim"], ["npu cannot run this"]),
    "dtype": (["--dtype", "int3"], ["int3", "bfloat16"]),
    "layers_of_a_checkpoint": (["--layers", "1"], ["--layers"]),
    "no_new_tokens": (["--max-new-tokens", "0"], ["--max-new-tokens"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_2(run, checkpoint, case):
    args, words = REFUSED[case]
    assert_refused(run(*BOTH, "--model", checkpoint, *args), *words)


@pytest.mark.parametrize(("given", "missing"), [("--a", "--b"), ("--b", "--a")])
def test_both_sides_must_be_named(run, given, missing):
    assert_refused(run(given, "tq4"), missing)


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom tq.cli import main\nassert main(['diff', '--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'validation' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EXECUTOR:FORMAT" in done.stdout
