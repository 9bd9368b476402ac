"""Which format each layer's K and V deserve, and how long a tail beside them: what it costs in KL, and the best in a budget.

    setup = load_setup("tiny", ["bf16"])
    costs = measure(setup, calibration, CANDIDATES)               # each place by itself, without a tail
    choices = choices_within(costs, config, budget=4.0, tails=TAILS, context=4096)
    rows = compare(setup, longer, choices)                        # each plan as a whole, on the same text
    verified = verify(setup, unseen, best.plan, uniform_rivals(...))   # on another text, beside uniform formats

A *place* is K or V of one layer. That the costs of places add up is an assumption; it ranks the plans of one tail, and
nothing else is made of it. benchmarks/LOG.md says how far it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.fidelity.evaluation import (
    FidelityRow,
    OnStep,
    Setup,
    Workload,
    evaluate,
    score_all,
)
from haarkv.validation.fidelity.scores import Partial
from haarkv.validation.planning.candidates import (
    Candidates,
    Costs,
    Place,
    at,
    bits_per_value,
    everywhere,
    place_bytes,
    places,
    session_with_plan,
    with_format,
)


@dataclass(frozen=True)
class Allocation:
    """A plan, and the mean KL that it should have if costs added up."""

    plan: KVPlan
    predicted_kl: float


# -- Measuring ------------------------------------------------------------------------------------------------------------


def changed_caches(
    base: Session, candidates: Candidates, calibration: Calibration | None = None
) -> dict[str, tuple[Place, str, Session]]:
    """The baseline with one candidate at one place, by a name for the user; `bf16` changes nothing and is left out."""
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
    """What each candidate costs at each place.

        cost(place, f) = mean over the text of KL(bf16 || bf16 everywhere but f at this place)

    The layers before a place are the baseline's: they are run once a window, and each cache begins behind them.

    Args:
        calibration: the text and its windows; greedy prompts are not run.
    Returns:
        nats a token, in the order of the places and candidates.
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


# -- Choosing -------------------------------------------------------------------------------------------------------------


def choose(
    costs: Costs,
    config: ModelConfig,
    *,
    budget: float,
    tail: int,
    context: int,
    sink: int = 0,
    calibration: Calibration | None = None,
    place_groups: Sequence[Sequence[Place]] | None = None,
) -> Allocation | None:
    """The formats with the least sum of costs within a budget, beside a tail.

    Args:
        budget: bits a value, all included.
        context: tokens of a sequence, over which the tail's bytes are spread.
        place_groups: places that take one format; all of `costs`, each once. Without it each place has its own.
    Returns:
        None if not even the smallest candidates fit.
    """
    groups = place_groups or [[place] for place in costs]
    empty = KVSpec("bf16", tail=tail or None, sink=sink).plan(config.num_layers)
    chunk = KVSpec("tq4", tail=tail or None, sink=sink).plan(config.num_layers).ring_chunk()
    names = [list(costs[group[0]]) for group in groups]

    def size(group: Sequence[Place], name: str) -> int:
        plans = [(with_format(empty, place, name, calibration), place) for place in group]
        return sum(place_bytes(plan, place, config.kv_shapes, context, chunk) for plan, place in plans)

    sizes = [[size(group, name) for name in group_names] for group, group_names in zip(groups, names, strict=True)]
    losses = [
        [math.fsum(costs[place][name] for place in group) for name in group_names]
        for group, group_names in zip(groups, names, strict=True)
    ]
    exact = cache_bytes(KVSpec("bf16").plan(config.num_layers), context, config.kv_shapes)
    # A budget such as 4.1 has no exact float; what it falls short of must not cost a plan of just 4.1 bits.
    room = math.floor(budget * exact / 16 * (1 + 1e-12))
    options = best_within(sizes, losses, room)
    if options is None:
        return None
    plan, total = empty, []
    for group, group_names, group_losses, option in zip(groups, names, losses, options, strict=True):
        for place in group:
            plan = with_format(plan, place, group_names[option], calibration)
        total.append(group_losses[option])
    return Allocation(plan, math.fsum(total))


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
    """The best formats beside each tail and number of sinks that leave room for any.

    Raises:
        InputError: a budget that no choice meets, or that bf16 meets already.
    """
    if not 0 < budget < 16:
        raise InputError(f"a budget of {budget:g} bits a value is none; --budget must lie above 0 and below bf16's 16")
    settings = [(tail, sink) for tail in tails for sink in sinks]
    all_choices = [
        choose(costs, config, budget=budget, tail=tail, context=context, sink=sink, calibration=calibration)
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


# -- The multiple-choice knapsack --------------------------------------------------------------------------------------
def best_within(sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int] | None:
    """Choose an option of each item.

    Dynamic programming over sizes, in units of the greatest common divisor of what options exceed their item's smallest by:
    `best[i, s] = min over options of best[i - 1, s - size] + loss`. Among equal losses the smallest size wins.

    Args:
        sizes: [item][option], at least one option each.
        losses: the same, of any sign.
        budget: in the same unit as sizes.
    Returns:
        the index of each item's option; None if not even the smallest fit.
    """
    least = sum(map(min, sizes))
    if budget < least:
        return None
    extra = [[size - min(item_sizes) for size in item_sizes] for item_sizes in sizes]
    unit = math.gcd(*(size for item_sizes in extra for size in item_sizes)) or 1
    room = (min(budget, sum(map(max, sizes))) - least) // unit
    best = np.full(room + 1, np.inf)
    best[0] = 0.0
    option_tables = []
    for item_sizes, item_losses in zip(extra, losses, strict=True):
        best_loss, option = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int64)
        for index, (size, loss) in enumerate(zip(item_sizes, item_losses, strict=True)):
            steps = size // unit
            if steps <= room:
                with_it = np.full(room + 1, np.inf)
                with_it[steps:] = best[: room + 1 - steps] + loss
                better = with_it < best_loss
                best_loss[better], option[better] = with_it[better], index
        best = best_loss
        option_tables.append(option)
    at, selection = int(best.argmin()), []
    for item_sizes, option in zip(reversed(extra), reversed(option_tables), strict=True):
        selection.append(int(option[at]))
        at -= item_sizes[selection[-1]] // unit
    return selection[::-1]
