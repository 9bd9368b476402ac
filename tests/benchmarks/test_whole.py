"""Whole prompts and steps in turns: what counts, what a cut keeps, and a peer that fails."""

import json
import math

import pytest
import torch
from small_models import SMALL, small_model

from haarkv.benchmarks import whole
from haarkv.benchmarks.beside import SideError
from haarkv.benchmarks.decode import Request
from haarkv.benchmarks.decode_cost import Case, attention_cost, step_cost, whole_prompt_cost
from haarkv.benchmarks.timing import Machine
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.plan import KVSpec

pytestmark = pytest.mark.usefixtures("glance")
MACHINE = Machine(copy_gbps=10, fp32_gflops=50, bf16_gflops=100)
BOTH = ("prompt", "step")


class FakeSide(whole.Side):
    """Writes down what it is asked, and takes the next of its times."""

    def __init__(self, name, log, prompts, fails_at=None):
        super().__init__(name, [4.0] * SMALL.num_layers)
        self.log, self.prompts, self.fails_at = log, iter(prompts), fails_at

    def open(self, context):
        self.log.append((self.name, "open", context))

    def shut(self):
        self.log.append((self.name, "shut"))

    def prompt(self, ids):
        self.log.append((self.name, "prompt", len(ids)))
        if self.fails_at == "prompt" and len(ids) > whole._WARM_UP:
            raise SideError("no room")
        return next(self.prompts) if len(ids) > whole._WARM_UP else 99.0

    def steps(self, ids):
        self.log.append((self.name, "steps", len(ids)))
        if self.fails_at == "step":
            raise SideError("its process ended with signal SIGABRT")
        return [50.0] + [0.001 * (k + 1) for k in range(len(ids) - 1)]


def request(kinds=BOTH, repeats=2, **more):
    return Request("small", ["reference"], ["tq4"], [64], [1], kinds=kinds, repeats=repeats, **more)


def case(sides):
    return whole.AtContext(request(), small_model(), sides, 64, {})


def test_sides_take_turns_and_the_first_step_of_a_turn_does_not_count():
    log = []
    measured = case([FakeSide("a", log, [5.0, 3.0]), FakeSide("b", log, [7.0, 9.0])])
    measured.measure(lambda _: None)
    calls = [entry[:2] for entry in log]
    warm = [("a", "open"), ("a", "prompt"), ("b", "open"), ("b", "prompt")]
    assert calls == warm + [(s, "prompt") for s in "abab"] + [(s, "steps") for s in "abab"] + [("a", "shut"), ("b", "shut")]
    # Two turns of one step that warms up and three that count: the prompt is shorter than the context by eight.
    assert [entry[2] for entry in log if entry[1] == "prompt"][2:] == [56] * 4
    rows = {(r.kind, r.who): r for r in measured.rows(MACHINE)}
    assert (rows["prompt", "a"].ms, rows["prompt", "a"].taken.low, rows["prompt", "a"].runs) == (4000.0, 3000.0, 2)
    assert rows["prompt", "b"].figures()["tokens_per_s"] == 56 / 8.0
    assert (rows["step", "a"].ms, rows["step", "a"].taken.high, rows["step", "a"].runs) == (2.0, 3.0, 6)


def test_prompts_that_take_long_are_not_repeated_as_often_as_asked_for():
    log = []
    measured = case([FakeSide("a", log, [40.0, 1.0]), FakeSide("b", log, [30.0, 1.0])])
    measured.measure(lambda _: None)
    assert [r.runs for r in measured.rows(MACHINE) if r.kind == "prompt"] == [1, 1]


@pytest.mark.parametrize("phase", ["prompt", "step"])
def test_a_peer_that_fails_is_left_out_and_named(phase):
    log = []
    measured = case([FakeSide("a", log, [5.0, 3.0]), FakeSide("b", log, [7.0, 9.0], fails_at=phase)])
    measured.measure(lambda _: None)
    rows = {(r.kind, r.who): r for r in measured.rows(MACHINE)}
    assert rows["step", "a"].ms == 2.0
    assert rows["step", "b"].ms is None
    assert "at 64 tokens" in rows["step", "b"].note
    assert sum(entry[:2] == ("b", "prompt") for entry in log) == (2 if phase == "prompt" else 3)


def test_a_prompt_reads_weights_once_and_multiplies_them_for_every_token():
    model = small_model()
    nbytes = [16.0, 8.0, 8.0]
    step, prompt = step_cost(model, Case(1, 0), nbytes), whole_prompt_cost(model, 40, nbytes)
    head = 2 * SMALL.vocab_size * SMALL.hidden_size
    pairs = sum(attention_cost(SMALL, Case(1, context), 0, 0).flops for context in range(1, 41))
    assert (prompt.weights, prompt.kv) == (step.weights, 40 * 32)
    assert math.isclose(prompt.flops, 40 * (step.flops - head) + head + SMALL.num_layers * pairs)


def test_our_side_computes_the_prompt_and_goes_on_from_it():
    model, ids = small_model(), list(range(20))
    side = whole.Ours("reference fp32", ReferenceExecutor(model), KVSpec("fp32").plan(SMALL.num_layers))
    side.open(24)
    for _ in range(2):  # the second prompt forgets the first
        assert side.prompt(ids[:-4]) > 0
        assert len(side.steps(ids[-4:])) == 4
        assert side._paging.length(side._sequence) == 20
    stored, _ = side._cache.read(1, side._paging.batch([side._sequence], [1]).block_table)
    other = whole.Ours("reference fp32", ReferenceExecutor(model), KVSpec("fp32").plan(SMALL.num_layers))
    other.open(24)
    other.prompt(ids)
    expected, _ = other._cache.read(1, other._paging.batch([other._sequence], [1]).block_table)
    torch.testing.assert_close(stored[:, :, :20], expected[:, :, :20])


def test_prompts_are_measured_without_llama_as_well(run):
    code, out, _ = run("decode", "--only", "prompt", "--only", "step", "--kv", "tq4,bf16", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [(r["kind"], r["who"]) for r in rows] == [(kind, f"reference {kv}") for kind in BOTH for kv in ("tq4", "bf16")]
    assert all(r["tokens_per_s"] > 0 and r["tokens"] == 36 for r in rows if r["kind"] == "prompt")
    code, out, _ = run("decode", "--only", "prompt", "--kv", "tq4")
    assert code == 0
    assert "tokens/s" in out
