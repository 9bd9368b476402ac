"""A report says what its prompts did not exercise, and the prompts that are chosen exercise everything.

Each fault here needs a second block, sequence, chunk, layer or an unusual length to show: a short prompt is right to the last
bit, and says that it did not exercise it; the chosen prompts are red.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from planted import run as model_logits
from small_models import SMALL, random_tokens, resize_config, small_model
from validation_reports import validation_report

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import table_with
from haarkv.validation.layers.exercise import HUGE_SCALES, TINY_SCALES, covering_prompts_for, with_extreme_scales
from haarkv.validation.layers.report import join_reports

CONFIG = resize_config(
    SMALL, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=32, intermediate_size=48,
    max_position_embeddings=1024,
)  # fmt: skip
MODEL = small_model(CONFIG)
ONE_LAYER = small_model(resize_config(CONFIG, num_layers=1))
STEPS = 2


@cache
def covering_prompts():
    tiny = load_model("tiny")
    ids = covering_prompts_for(load_tokenizer("tiny", tiny.config), CONFIG, KVSpec("tq4").plan(2), STEPS)
    return [[token % CONFIG.vocab_size for token in prompt] for prompt in ids]


def run(ops, prompts, steps, model=MODEL, kv="tq4", modes=("teacher-forced",)):
    return validation_report(ReferenceExecutor(model, table_with(ops)), model, prompts, steps, kv, modes=modes)


def spoilt_where(which):
    """Attention of zero for the tokens that `which` picks of a layer's view."""

    def paged_attention(q, at, scale):
        out = reference.paged_attention(q, at, scale)
        return torch.where(which(at)[:, None, None], 0.0, out)

    return {"paged_attention": paged_attention}


def all_where(condition):
    """All tokens of a forward, where a condition of the layer's view holds."""
    return lambda at: torch.full((len(at.batch.positions),), bool(condition(at)))


def decodes(at):
    return len(at.batch.positions) == len(at.batch.seq_lens)


def differ_in_blocks(at):
    return len((at.batch.block_table >= 0).sum(1).unique()) > 1


def follow_stored(at):
    """Each sequence's tokens stand behind some that an earlier forward stored."""
    return (at.batch.positions[at.batch.query_start_loc[:-1].long()] > 0).all()


def last_of_full_blocks(at):
    mask = torch.zeros(len(at.batch.positions), dtype=torch.bool)
    mask[at.batch.query_start_loc[1:].long() - 1] = (at.batch.seq_lens % 128 == 0) & (not decodes(at))
    return mask


FAULTS = {
    "positions from 128 on (a second block)": lambda at: at.batch.positions >= 128,
    "positions from 256 on (a third block)": lambda at: at.batch.positions >= 256,
    "a second sequence": lambda at: torch.arange(len(at.batch.positions)) >= at.batch.query_start_loc[1],
    "padding (sequences of unequally many blocks)": all_where(differ_in_blocks),
    "a second chunk of a prompt (over 512 tokens)": all_where(lambda at: follow_stored(at) and not decodes(at)),
    "a prompt that fills its last block": last_of_full_blocks,
    "decode": all_where(decodes),
    # Several tokens of each of several sequences: no prompt's second chunk is so.
    "drafted tokens, taken back": all_where(lambda at: follow_stored(at) and len(at.batch.positions) > len(at.batch.rows) > 1),
    "a decode step into a new block": lambda at: (at.batch.positions % 128 == 0) & decodes(at),
    "a second layer": all_where(lambda at: at.layer > 0),
}
"""Where attention is spoilt, by what a prompt must exercise to see it."""


def test_the_chosen_prompts_exercise_everything():
    assert [len(prompt) for prompt in covering_prompts()] == [128, 129, PREFILL_CHUNK + 3]
    report = run({}, covering_prompts(), STEPS)
    assert report.passed
    assert set(report.not_exercised) == {"whole forwards", TINY_SCALES, HUGE_SCALES}
    assert set(FAULTS) <= set(report.exercised)


@pytest.mark.parametrize("what", FAULTS)
def test_a_short_prompt_says_what_it_cannot_see_and_the_chosen_prompts_are_red(what):
    one, more = (ONE_LAYER, MODEL) if "layer" in what else (MODEL, ONE_LAYER)
    report = run(spoilt_where(FAULTS[what]), [random_tokens(CONFIG, 7)], 0, one, modes=("teacher-forced", "free-running"))
    assert report.passed
    assert report.first_divergence is None
    assert what in report.not_exercised
    report = run(spoilt_where(FAULTS[what]), covering_prompts(), STEPS, more)
    assert not report.passed
    assert report.first_divergence.reason == "fault"
    assert what in report.exercised


def wrong_lengths(wrong):
    """Vectors of some lengths are stored too short."""

    def store_kv(k, v, at):
        k, v = (torch.where(wrong(x.norm(dim=-1, keepdim=True)), 0.9 * x, x) for x in (k, v))
        reference.store_kv(k, v, at)

    return {"store_kv": store_kv}


@pytest.mark.parametrize("kv", ["tq4", "k=tq8,v=tq2"])
@pytest.mark.parametrize(("what", "wrong"), [(TINY_SCALES, lambda n: n < 0.01), (HUGE_SCALES, lambda n: n > 1000)])
def test_tiny_and_huge_scales_are_exercised_by_a_scaled_model(kv, what, wrong):
    prompt = random_tokens(CONFIG, 9)
    ordinary = run(wrong_lengths(wrong), [prompt], 1, kv=kv)
    assert ordinary.passed
    assert what in ordinary.not_exercised
    scaled_model = with_extreme_scales(MODEL, KVSpec(kv).plan(2), prompt)
    right = run({}, [prompt], 1, scaled_model, kv)
    assert right.passed
    assert what in right.exercised
    report = join_reports(ordinary, run(wrong_lengths(wrong), [prompt], 1, scaled_model, kv), "scaled")
    assert not report.passed
    assert what in report.exercised
    assert what not in report.not_exercised
    assert report.first_divergence.phase == "scaled prefill"
    assert len(report.rows) == 2 * len(ordinary.rows)


def test_a_scaled_model_computes_the_same():
    prompt = random_tokens(CONFIG, 9)
    plan = KVSpec("tq4").plan(2)
    scaled_model = with_extreme_scales(MODEL, plan, prompt)
    assert not scaled_model.weights.layers[0]["q_norm"].equal(MODEL.weights.layers[0]["q_norm"])
    assert model_logits(MODEL, prompt, kv="fp32").equal(model_logits(scaled_model, prompt, kv="fp32"))
    unscaled_model = with_extreme_scales(MODEL, KVSpec("bf16").plan(2), prompt)
    assert unscaled_model.weights.layers[0]["q_norm"].equal(MODEL.weights.layers[0]["q_norm"])


def test_an_executor_whose_decode_takes_keys_in_steps_is_run_beyond_one():
    """A short prompt names what it left out; the chosen ones are longer then, and find a fault that lies there."""
    tokenizer = load_tokenizer("tiny", load_model("tiny").config)
    plan = KVSpec("tq4").plan(1)
    beyond_a_step = all_where(lambda at: decodes(at) and at.batch.seq_lens.max() > 600)
    candidate = ReferenceExecutor(ONE_LAYER, table_with(spoilt_where(beyond_a_step)))
    candidate.decode_step = 600
    ids = covering_prompts_for(tokenizer, CONFIG, plan, STEPS, candidate.decode_step)
    assert [len(prompt) for prompt in ids] == [128, 129, 601]
    reports = [
        validation_report(candidate, ONE_LAYER, prompts, STEPS, modes=("teacher-forced",))
        for prompts in ([random_tokens(CONFIG, 7)], [[token % CONFIG.vocab_size for token in prompt] for prompt in ids])
    ]
    what = "decode over a second step of keys (over 600 tokens)"
    assert reports[0].passed
    assert what in reports[0].not_exercised
    assert not reports[1].passed
    assert what in reports[1].exercised
    assert not any("step of keys" in item for item in run({}, [[1, 2, 3]], 1).not_exercised)


def test_a_format_without_scales_asks_for_none():
    assert not {TINY_SCALES, HUGE_SCALES} & set(run({}, [[1, 2, 3]], 0, kv="bf16").not_exercised)


def test_a_short_context_shortens_what_is_chosen():
    tokenizer = load_tokenizer("tiny", load_model("tiny").config)
    plan = KVSpec("tq4").plan(2)
    config = replace(CONFIG, max_position_embeddings=100)
    assert [len(prompt) for prompt in covering_prompts_for(tokenizer, config, plan, 4)] == [93, 93, 93]
    with pytest.raises(InputError, match="--steps"):
        covering_prompts_for(tokenizer, config, plan, 99)
