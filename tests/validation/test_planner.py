"""The planner: an exact choice within a budget, of costs that are what an evaluation measures, judged on another text."""

import itertools
import math
from dataclasses import replace

import pytest
from checkpoints import layer_tensor, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.evaluation import FidelityRow, evaluate, make_workload
from haarkv.validation.fidelity.setup import load_setup
from haarkv.validation.planning.search import (
    Frontier,
    Knapsack,
    Verification,
    bits_per_value,
    choices_within,
    compare,
    measure,
    places,
    uniform_rivals,
    verify,
)

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
# FP32 sums in another order change logits of size 1 by a few 1e-6: relative, of figures that quantization makes.
REORDER_TOLERANCE = 2e-3


def workload_of_text(text, window=30, **kwargs):
    return make_workload(list(text.encode()), 1024, window=window, **kwargs)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Layer 0 attends by sharp scores, which errors of K upset; layer 1 to all tokens alike, whatever K is."""

    def mutate(tensors):
        tensors[layer_tensor(0, "self_attn.q_norm")] *= 3
        tensors[layer_tensor(1, "self_attn.q_norm")] *= 0.05

    folder = write_checkpoint(tmp_path_factory.mktemp("plan") / "checkpoint", mutate=mutate)
    return load_setup(str(folder), ["bf16"])


@pytest.fixture(scope="module")
def costs(setup):
    return measure(setup, workload_of_text(TEXT), ["tq2", "tq4", "tq6", "bf16"])


# -- The knapsack -----------------------------------------------------------------------------------------------------------
options = st.lists(st.tuples(st.integers(0, 12).map(lambda n: 3 * n + 2), st.integers(-9, 30)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(items=st.lists(options, min_size=1, max_size=4), budget=st.integers(0, 150))
def test_the_choice_is_the_best_of_all(items, budget):
    def total(choice):
        selection = [item[option] for item, option in zip(items, choice, strict=True)]
        return sum(loss for _, loss in selection), sum(size for size, _ in selection)

    fitting = [c for c in itertools.product(*(range(len(item)) for item in items)) if total(c)[1] <= budget]
    knapsack = Knapsack([[s for s, _ in item] for item in items], [[float(x) for _, x in item] for item in items])
    best_choice = knapsack.options(budget)
    assert (best_choice is None) == (not fitting)
    if best_choice is not None:
        assert total(best_choice) == min(map(total, fitting))
        # And the other way round: the smallest size of that loss, and of none below all losses.
        least = min(total(c)[0] for c in itertools.product(*(range(len(item)) for item in items)))
        assert knapsack.least_size(total(best_choice)[0]) == total(best_choice)[1]
        assert knapsack.least_size(least - 1) == math.inf


# -- Bytes ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sink", [0, 5])
@pytest.mark.parametrize("tail", [0, 7])
def test_a_budget_may_be_spent_to_the_last_byte_and_pays_for_sinks(tail, sink):
    only = KVSpec("tq3", tail=tail or None, sink=sink).plan(SMALL.num_layers)

    def choose_formats(costs, budget):
        return Frontier(costs, SMALL, tail=tail, sink=sink, context=512).within(budget)

    costs = {place: {"tq3": 1.0, "bf16": 0.0} for place in places(SMALL)}
    bits = bits_per_value(only, SMALL, 512)
    assert choose_formats(costs, bits).plan == only
    assert choose_formats(costs, bits - 1e-6) is None
    # bf16 keeps nothing twice: a place in it takes no tail either.
    one = replace(only, layers=(KVSpec("k=bf16,v=tq3").plan(1).layers[0], *only.layers[1:]))
    more = bits_per_value(one, SMALL, 512)
    assert bits_per_value(choose_formats(costs, more).plan, SMALL, 512) == more
    alone = {place: {"tq3": 1.0} for place in places(SMALL)}
    choices = choices_within(alone, SMALL, budget=bits, tails=(tail,), sinks=(0, sink, sink + 1), context=512)
    assert {choice.plan.sink for choice in choices} == {0, sink}


# -- Costs ------------------------------------------------------------------------------------------------------------------
def test_a_cost_is_what_an_evaluation_of_that_cache_measures(setup, costs):
    run = workload_of_text(TEXT)
    specs = {"k=tq2,v=bf16": "k", "k=bf16,v=tq2": "v"}
    for layer in range(2):
        plans = {kv: KVSpec("bf16", layers={layer: kv}).plan(2) for kv in specs}
        caches = {kv: replace(setup.base, plan=plan) for kv, plan in plans.items()}
        for row in evaluate(replace(setup, caches=caches), run):
            assert row.kl_mean > 1e-6
            assert costs[layer, specs[row.kv]]["tq2"] == pytest.approx(row.kl_mean, rel=REORDER_TOLERANCE)
    assert all(
        place_costs["bf16"] == 0 < place_costs["tq6"] < place_costs["tq4"] < place_costs["tq2"]
        for place_costs in costs.values()
    )


# -- Choices ----------------------------------------------------------------------------------------------------------------
def test_more_budget_is_never_worse_and_is_kept_to(setup, costs):
    budgets = [2.6, 3.5, 4.1, 5.0, 7.7, 12.0, 15.9]
    choices = [Frontier(costs, setup.base.config, tail=0, context=128).within(b) for b in budgets]
    assert [c.predicted_kl for c in choices] == sorted((c.predicted_kl for c in choices), reverse=True)
    assert choices[0].predicted_kl > 10 * choices[-2].predicted_kl
    for budget, choice in zip(budgets, choices, strict=True):
        assert bits_per_value(choice.plan, setup.base.config, 128) <= budget
        names = [f.name for pair in choice.plan.layers for f in pair]
        assert choice.predicted_kl == pytest.approx(sum(costs[place][n] for place, n in zip(costs, names, strict=True)))


def test_tails_take_their_bytes_from_the_formats(setup, costs):
    config = setup.base.config
    choices = choices_within(costs, config, budget=4.6, tails=(0, 16, 9000), context=1024)
    assert [choice.plan.recent for choice in choices] == [None, 16]
    assert all(bits_per_value(choice.plan, config, 1024) <= 4.6 for choice in choices)
    assert choices[1].predicted_kl > choices[0].predicted_kl
    rows = compare(setup, workload_of_text(TEXT * 2, window=128), choices)
    assert [row.kv for row in rows] == [choice.plan.describe() for choice in choices]
    assert rows[0].kl_mean == pytest.approx(choices[0].predicted_kl, rel=0.5)


def test_an_executor_that_cannot_run_a_candidate_says_so(setup, monkeypatch):
    monkeypatch.setattr(type(setup.base.executor), "supports", lambda *_: "it is too new")
    with pytest.raises(InputError, match=r"reference cannot run .*too new"):
        measure(setup, workload_of_text(TEXT), ["tq2"])


# -- Verification -----------------------------------------------------------------------------------------------------------
def test_rivals_stand_next_to_the_plan_in_bytes():
    names = ["tq2", "tq3", "tq4", "tbq4_0", "tq5"]
    plan = KVSpec("tq4", layers={0: "k=tq3,v=tq4"}).plan(3)
    assert list(uniform_rivals(plan, SMALL, 512, names)) == ["tq3", "tq4", "tbq4_0"]
    assert list(uniform_rivals(KVSpec("tq3").plan(3), SMALL, 512, names)) == ["tq3"]
    tail_plan = KVSpec("tq3", tail=16, layers={0: "tq4"}).plan(3)
    assert list(uniform_rivals(tail_plan, SMALL, 4096, names)) == ["tq3", "tq3; tail 16", "tq4", "tbq4_0"]


def row(kv, size, kl):
    return FidelityRow(kv, size, size / 10, kl, kl, kl, 1.0, 0.0, 9.0, 0.0)


@pytest.mark.parametrize(
    ("rivals", "winner"),
    [
        ([("a", 90, 0.11), ("b", 106, 0.01)], None),  # b takes 6 % more
        ([("a", 90, 0.11), ("b", 105, 0.09)], "b"),
        ([("a", 90, 0.09), ("b", 105, 0.08)], "b"),
        ([("a", 100, 0.1)], "a"),  # no better than a uniform format
        ([], None),
    ],
)
def test_a_uniform_format_of_the_same_bytes_must_be_beaten(rivals, winner):
    rival = Verification(row("plan", 100, 0.1), tuple(row(*r) for r in rivals), (0,) * len(rivals), 10, 1).beaten_by
    assert (rival.kv if rival else None) == winner


def test_a_verification_is_an_evaluation_beside_uniform_formats(setup, costs):
    config, unseen = setup.base.config, workload_of_text(UNSEEN)
    plan = Frontier(costs, config, tail=0, context=30).within(4.5).plan
    rivals = uniform_rivals(plan, config, 30, ["tq2", "tq4"])
    verification = verify(setup, unseen, plan, rivals)
    caches = {"plan": replace(setup.base, plan=plan), "tq4": replace(setup.base, plan=rivals["tq4"])}
    expected = {r.kv: r for r in evaluate(replace(setup, caches=caches), unseen)}
    assert verification.plan == expected["plan"]
    assert verification.rivals[-1] == expected["tq4"]
    assert (verification.tokens, verification.windows) == (len(UNSEEN) - 1, 4)
    assert verification.plan.kl_mean < verification.rivals[-1].kl_mean
    assert verification.beaten_by is None
    assert verification.nearer[-1] > 2
