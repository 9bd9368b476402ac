"""`tq plan`: what each format costs at K and V of each layer, the best plans in a budget, and one of them on another text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep, Setup, Workload, evaluate, score_all
from haarkv.validation.fidelity.scores import Partial
from haarkv.validation.planning.search import (
    Allocation,
    Candidates,
    Costs,
    Frontier,
    Place,
    at,
    bits_per_value,
    everywhere,
    places,
    session_with_plan,
    with_format,
)

# -- Measuring ------------------------------------------------------------------------------------------------------------


def changed_caches(
    base: Session, candidates: Candidates, calibration: Calibration | None = None
) -> dict[str, tuple[Place, str, Session]]:
    """The baseline with one candidate at one place, by a name for the user; what changes nothing is left out."""
    caches = {}
    for place in places(base.config):
        for name in at(place[1], candidates):
            if (plan := with_format(base.plan, place, name, calibration)) != base.plan:
                caches[f"{name} for {place[1].upper()} of layer {place[0]}"] = (place, name, session_with_plan(base, plan))
    return caches


def measure(
    setup: Setup,
    calibration: Workload,
    candidates: Candidates,
    *,
    coordinates: Calibration | None = None,
    partial: Partial | None = None,
    on_step: OnStep = lambda *_: None,
) -> dict[Place, dict[str, float]]:
    """What each candidate costs at each place, in nats a token: mean KL(bf16 || bf16 everywhere but this format at this
    place).

    The layers before a place are the baseline's: they run once a window.
    """
    partial = partial or Partial()
    caches = changed_caches(setup.base, candidates, coordinates)
    try:
        begins = {name: (side, place[0]) for name, (place, _, side) in caches.items()}
        scores = score_all(setup, calibration, begins, partial, on_step)
    finally:
        partial.flush()
    costs: dict[Place, dict[str, float]] = {
        place: dict.fromkeys(at(place[1], candidates), 0.0) for place in places(setup.base.config)
    }
    for cache, (place, name, _) in caches.items():
        costs[place][name] = math.fsum(scores[cache].kl.tolist()) / calibration.scored_tokens
    return costs


# -- Choosing ------------------------------------------------------------------------------------------------------------
def choices_within(
    costs: Costs,
    config: ModelConfig,
    *,
    budget: float,
    tails: Sequence[int],
    context: int,
    sinks: Sequence[int] = (0,),
    calibration: Calibration | None = None,
) -> list[Allocation]:
    """The best formats beside each tail and number of sinks that leave room; InputError if none does, or bf16 does."""
    if not 0 < budget < 16:
        raise InputError(f"a budget of {budget:g} bits a value is none; --budget must lie above 0 and below bf16's 16")
    settings = [(tail, sink) for tail in tails for sink in sinks]
    all_choices = [
        Frontier(costs, config, tail=tail, context=context, sink=sink, calibration=calibration).within(budget)
        for tail, sink in settings
    ]
    if choices := [choice for choice in all_choices if choice]:
        return choices
    smallest = KVSpec(tail=min(tails) or None, sink=min(sinks), calibration=calibration)
    names = dict.fromkeys(name for place_costs in costs.values() for name in place_costs)
    plans = [replace(smallest, kv=everywhere(name)).plan(config.num_layers) for name in names]
    least = min(bits_per_value(plan, config, context) for plan in plans)
    raise InputError(f"no plan takes {budget:g} bits a value: the smallest takes {least:.4g}; raise --budget or --context")


def compare(
    setup: Setup, calibration: Workload, choices: Sequence[Allocation], on_step: OnStep = lambda *_: None
) -> list[FidelityRow]:
    """Each chosen plan as a whole on the calibration text, its rows named by `KVPlan.describe`."""
    caches = {str(number): session_with_plan(setup.base, choice.plan) for number, choice in enumerate(choices)}
    rows = evaluate(replace(setup, caches=caches), calibration, on_step=on_step)
    return [replace(row, kv=choice.plan.describe()) for row, choice in zip(rows, choices, strict=True)]


# -- A chosen plan on another text -------------------------------------------------------------------------------------
SAME_BYTES = 1.05
"""A uniform format of at most so many times the plan's bytes counts as one of the same bytes."""
PLAN = "plan"
"""The plan's name among the caches of its verification."""


@dataclass(frozen=True)
class Verification:
    """A plan on a text that it was not chosen by.

    Attributes:
        rivals: rows of the uniform candidates next to it in size, fewer bytes first.
        nearer: for each rival, in how many windows the plan's mean KL is lower.
    """

    plan: FidelityRow
    rivals: tuple[FidelityRow, ...]
    nearer: tuple[int, ...]
    tokens: int
    windows: int

    @property
    def beaten_by(self) -> FidelityRow | None:
        """The best uniform candidate of the same bytes or fewer, unless the plan's mean KL is lower."""
        same = [row for row in self.rivals if row.bytes_per_token <= SAME_BYTES * self.plan.bytes_per_token]
        best = min(same, key=lambda row: row.kl_mean, default=None)
        return best if best and best.kl_mean <= self.plan.kl_mean else None


def uniform_rivals(
    plan: KVPlan, config: ModelConfig, context: int, candidates: Sequence[str], calibration: Calibration | None = None
) -> dict[str, KVPlan]:
    """Uniform candidates next to a plan in bytes, the largest that take no more and the smallest that take no fewer; and, with
    the plan's tail and sinks, the largest that take no more: they show how much of the gain is the tail's.
    """
    plan_bits = bits_per_value(plan, config, context)
    rivals: dict[str, KVPlan] = {}
    for tail, sink in dict.fromkeys(((None, 0), (plan.recent, plan.sink))):
        base_spec = KVSpec(tail=tail, sink=sink, calibration=calibration)
        uniform = [replace(base_spec, kv=everywhere(name)).plan(config.num_layers) for name in candidates]
        bits = [bits_per_value(other, config, context) for other in uniform]
        near = {max((b for b in bits if b <= plan_bits), default=None)}
        if (tail, sink) == (None, 0):
            near.add(min((b for b in bits if b >= plan_bits), default=None))
        rivals |= {other.describe(): other for b, other in zip(bits, uniform, strict=True) if b in near}
    return dict(sorted(rivals.items(), key=lambda item: bits_per_value(item[1], config, context)))


def verify(
    setup: Setup, unseen: Workload, plan: KVPlan, rivals: Mapping[str, KVPlan], on_step: OnStep = lambda *_: None
) -> Verification:
    """A plan and its rivals on a text that it was not chosen by."""
    caches = {name: session_with_plan(setup.base, other) for name, other in {PLAN: plan, **rivals}.items()}
    partial = Partial()
    plan_row, *others = evaluate(replace(setup, caches=caches), unseen, partial=partial, on_step=on_step)

    def window_means(name: str) -> list[float]:
        all_scores = (partial.scores(name, number) for number in range(len(unseen.windows)))
        return [scores.kl.mean().item() for scores in all_scores if scores]

    means = window_means(PLAN)
    nearer = [sum(a < b for a, b in zip(means, window_means(row.kv), strict=True)) for row in others]
    return Verification(plan_row, tuple(others), tuple(nearer), unseen.scored_tokens, len(unseen.windows))
