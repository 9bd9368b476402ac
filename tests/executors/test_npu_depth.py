"""Whole models on the NPU's programs, in PyPTO's interpreter: as many layers as Qwen3-14B has, and greedy text of `tiny`."""

import pytest
from npu_programs import needs_pypto

from haarkv.executors import catalog
from haarkv.models.catalog import TINY, load_model
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.greedy_diff import greedy_diff
from haarkv.validation.fidelity.setup import Contender, load_contenders
from haarkv.validation.layers.runner import validate

pytestmark = [pytest.mark.npu_long, needs_pypto[1]]


def test_forty_layers_stay_within_their_bounds():
    model = load_model("random:narrow", "bfloat16")
    layers = model.config.num_layers
    plan = KVSpec("tq4").plan(layers)
    trusted, on_trial = (catalog.create(name, model, plan, device) for name, device in (("reference", None), ("npu", "sim")))
    tokens = [(7 * i * i + 3) % model.config.vocab_size for i in range(140)]
    report = validate(trusted, on_trial, model, [tokens], 1, plan)
    assert report.passed, report.first_divergence
    assert {(row.mode, row.layer) for row in report.rows} == {
        (mode, layer) for mode in ("teacher-forced", "free-running") for layer in range(40)
    }


@pytest.mark.parametrize(
    ("kv", "lengths"), [("tq4", [5]), ("tq4", [129]), ("tq4", [300, 5, 128]), ("bf16", [5]), ("tq4_seed", [5])],
    ids=str,
)  # fmt: skip
def test_prompts_give_the_references_tokens_but_for_near_ties(kv, lengths):
    """Around a block, and as a ragged batch."""
    sides = load_contenders("tiny", Contender("reference", kv), Contender("npu", kv), dtype="bfloat16", device="sim")
    text = (TINY / "held_out.txt").read_text(encoding="utf-8")
    prompts = [prompt_of(sides[0], text[100 * at :], tokens) for at, tokens in enumerate(lengths)]
    diff = greedy_diff(*sides, prompts, dtype="bfloat16", max_new_tokens=16)
    assert [prompt.a.prompt_tokens for prompt in diff.prompts] == lengths
    assert not diff.faulty, diff.unexplained
    # Near ties are rare: a wrong layer would make everything one.
    assert diff.near_ties <= diff.fidelity.positions // 4


def prompt_of(session, text, tokens):
    """The beginning of a text that encodes to so many tokens."""
    return next(text[:end] for end in range(1, 12 * tokens) if len(session.encode([text[:end]])[0]) == tokens)
