"""Which format each layer's K and V deserve, and how long a tail beside them: what it costs in KL, and the best in a budget.

    setup = load_setup("tiny", ["bf16"])
    costs = measure(setup, calibration, CANDIDATES)               # each place by itself, without a tail
    choices = choices_within(costs, config, budget=4.0, tails=TAILS, context=4096)
    rows = compare(setup, longer, choices)                        # each plan as a whole, on the same text
    verified = verify(setup, unseen, best.plan, rivals_of(...))   # on another text, beside uniform formats

A *place* is K or V of one layer. That the costs of places add up is an assumption; it ranks the plans of one tail, and
nothing else is made of it. docs/fidelity.md says how far it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.codebooks.learned import expected_cost
from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.models.base import DecoderConfig
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import MULTIPLE, PREFIX, nibbles_of
from haarkv.tq_ops.kv.cache import blocks_for, cache_bytes
from haarkv.tq_ops.kv.plan import BLOCK_SIZE, WINDOW_BYTES, KVPlan, KVSpec
from haarkv.validation.fidelity.evaluation import (
    FidelityRow,
    OnStep,
    Setup,
    Span,
    Workload,
    evaluate,
    logits_after,
    run_span,
    score_window,
)
from haarkv.validation.fidelity.partial import Partial
from haarkv.validation.planning.knapsack import best_within

CANDIDATES = ("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "bf16")
"""One format a number of bits, so that no place is given the luckier of two equals."""
SAME_BYTES = 1.05
"""A uniform format of at most so many times the plan's bytes counts as one of the same bytes."""
TAILS = (0, 16, 32, 64, 128)
"""Tails that are tried, in tokens."""
PLAN = "plan"
"""The plan's own name among the caches of its verification."""
_LEAST_NIBBLES = 32  # that `cpu` and `cuda` read

Place = tuple[int, Side]
"""K or V of a layer."""
Costs = Mapping[Place, Mapping[str, float]]
"""Mean KL(bf16 || bf16 but this format at this place), in nats a token."""


@dataclass(frozen=True)
class Allocation:
    """A plan, and the mean KL that it should have if costs added up."""

    plan: KVPlan
    predicted_kl: float


@dataclass(frozen=True)
class Verified:
    """A plan on a text that it was not chosen by.

    Attributes:
        plan: the plan's row.
        rivals: rows of the uniform candidates next to it in size, fewer bytes first.
        nearer: for each rival, in how many windows the plan's mean KL is the lower one.
        tokens, windows: how many of each were scored.
    """

    plan: FidelityRow
    rivals: tuple[FidelityRow, ...]
    nearer: tuple[int, ...]
    tokens: int
    windows: int

    @property
    def beaten_by(self) -> FidelityRow | None:
        """The best uniform candidate of the same bytes or fewer, unless the plan has the lower mean KL."""
        same = [row for row in self.rivals if row.bytes_per_token <= SAME_BYTES * self.plan.bytes_per_token]
        best = min(same, key=lambda row: row.kl_mean, default=None)
        return best if best and best.kl_mean <= self.plan.kl_mean else None


# -- What can be chosen ---------------------------------------------------------------------------------------------------


def places(config: DecoderConfig) -> list[Place]:
    """K and V of every layer, in their order."""
    return [(layer, side) for layer in range(config.num_layers) for side in ("k", "v")]


def learned_anchors(head_dim: int) -> tuple[str, ...]:
    """Formats of a calibration that are measured, for the others to be predicted from: about half and one nibble a number."""
    half = max(MULTIPLE, head_dim // 2 // MULTIPLE * MULTIPLE)
    return tuple(dict.fromkeys(f"{PREFIX}{nibbles}" for nibbles in (half, 2 * half)))


def predicted(costs: Costs, learned: Calibration) -> dict[Place, dict[str, float]]:
    """What every number of nibbles costs at each place, from the few that were measured.

        cost(N) = cost(M) * expected_cost(N) / expected_cost(M)        M: the measured one whose expected cost is nearest

    Args:
        costs: of formats of `learned`; others are passed on as they are.
    Returns:
        those, and every multiple of 16 nibbles from 32 on, or half a vector, up to two a coordinate.
    """
    found: dict[Place, dict[str, float]] = {}
    for (layer, side), of_place in costs.items():
        weights = getattr(learned, side)[layer].weights
        dim = weights.shape[1]
        counts = range(max(MULTIPLE, min(_LEAST_NIBBLES, dim // 2)), 2 * dim + 1, MULTIPLE)
        expected = {n: float(expected_cost(weights, n).mean()) for n in counts}
        measured = {nibbles: kl for name, kl in of_place.items() if (nibbles := nibbles_of(name))}
        row = {name: kl for name, kl in of_place.items() if nibbles_of(name) is None}
        for nibbles, cost in expected.items():
            near = min(measured, key=lambda m, c=cost: abs(math.log(expected[m] / c)))  # type: ignore[misc]
            row[f"{PREFIX}{nibbles}"] = measured[near] * cost / expected[near]
        found[layer, side] = row
    return found


def require_candidates(names: Sequence[str], config: DecoderConfig, learned: Calibration | None = None) -> None:
    """Refuse candidates that the model does not take, or that store no token by itself.

    Args:
        learned: what `lrN` takes its coordinates from.
    Raises:
        InputError: naming the format.
    """
    for name in names:
        if plan_for(KVSpec(name, calibration=learned), config).windowed:
            raise InputError(
                f"{name} stores tokens in groups and brings its own tail; name candidates that store each by itself"
            )


def bits_per_value(kv: KVPlan, config: DecoderConfig, context: int) -> float:
    """Bits of one number of K or V, all included, as allocated for one sequence of so many tokens."""
    shape, slots = (config.num_kv_heads, config.head_dim), BLOCK_SIZE * blocks_for(context)
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * slots
    return 8 * cache_bytes(kv, context, *shape) / values


def _size(kv: KVPlan, place: Place, head_dim: int, context: int) -> int:
    """Bytes of one place and KV head for one sequence, its tail and sinks included."""
    kv_format = kv.layers[place[0]][place[1] == "v"]
    packed = BLOCK_SIZE * blocks_for(context) * kv_format.bytes_per_vector(head_dim)
    window = kv.ring_tokens(kv_format) + kv.sink if kv.has_window(kv_format) else 0
    return round(packed) + WINDOW_BYTES * head_dim * window


def with_format(plan: KVPlan, place: Place, name: str, learned: Calibration | None = None) -> KVPlan:
    """A plan with another format at one place.

    Args:
        learned: what `lrN` takes its coordinates from.
    """
    (layer, side), layers = place, list(plan.layers)
    k_format, v_format = layers[layer]
    kv_format = formats.get(name, side, learned)
    layers[layer] = (kv_format, v_format) if side == "k" else (k_format, kv_format)
    return replace(plan, layers=tuple(layers))


def cache_of(base: Session, plan: KVPlan) -> Session:
    """The baseline's model with another plan.

    Raises:
        InputError: the executor cannot run it, with its reason.
    """
    if reason := base.executor.supports(base.config, plan):
        raise InputError(f"executor {base.executor.name} cannot run {plan.describe()}: {reason}")
    return replace(base, plan=plan)


# -- Measuring ------------------------------------------------------------------------------------------------------------


def changed_caches(
    base: Session, candidates: Sequence[str], learned: Calibration | None = None
) -> dict[str, tuple[Place, str, Session]]:
    """The baseline with one candidate at one place, by a name for the user; `bf16` changes nothing and is left out."""
    found = {}
    for place in places(base.config):
        for name in candidates:
            if (plan := with_format(base.plan, place, name, learned)) != base.plan:
                found[f"{name} for {place[1].upper()} of layer {place[0]}"] = (place, name, cache_of(base, plan))
    return found


def measure(
    setup: Setup,
    calibration: Workload,
    candidates: Sequence[str],
    *,
    learned: Calibration | None = None,
    partial: Partial | None = None,
    on_step: OnStep = lambda *_: None,
) -> dict[Place, dict[str, float]]:
    """What each candidate costs at each place.

        cost(place, f) = mean over the text of KL(bf16 || bf16 everywhere but f at this place)

    The layers before a place are the baseline's: they are run once a window, and each cache begins behind them.

    Args:
        calibration: the text and its windows; greedy prompts are not run.
        candidates: names of formats.
        learned: what `lrN` takes its coordinates from.
        partial: keeps the scores of every window, and hands out what an earlier run has kept.
    Returns:
        nats a token, in the order of the places and candidates.
    Raises:
        NonFiniteError: a cache gave a logit that is not finite.
    """
    partial = partial or Partial()
    caches, windows = changed_caches(setup.base, candidates, learned), calibration.windows
    divergences: dict[str, list[Tensor]] = {name: [] for name in caches}
    try:
        for number, window in enumerate(windows):
            entering = _Entering(setup, calibration, window)
            for cache, ((layer, _), _, side) in caches.items():
                found = partial.scores(cache, number, window.length)
                if found is None:
                    found = score_window(cache, calibration, window, entering.base, entering.logits(side, layer))
                    partial.keep_scores(cache, number, found)
                divergences[cache].append(found.kl)
                on_step(f"{cache}, window {number + 1} of {len(windows)}", window.length)
    finally:
        partial.flush()
    costs: dict[Place, dict[str, float]] = {place: dict.fromkeys(candidates, 0.0) for place in places(setup.base.config)}
    for cache, (place, name, _) in caches.items():
        costs[place][name] = math.fsum(torch.cat(divergences[cache]).tolist()) / calibration.scored
    return costs


class _Entering:
    """What enters every layer in one window of the baseline, and its logits; computed when first asked for."""

    def __init__(self, setup: Setup, calibration: Workload, window: Span) -> None:
        self._setup, self._hidden = setup, [setup.model.embed(calibration.fed(window))]
        self._base: Tensor | None = None

    def _at(self, layer: int) -> Tensor:
        """[T, hidden] that enters a layer; after the last one, what the head gets."""
        while len(self._hidden) <= layer:
            last = len(self._hidden) - 1
            pieces = run_span(self._setup.base, self._hidden[last], range(last, last + 1))
            self._hidden.append(torch.cat(list(pieces)))
        return self._hidden[layer]

    @property
    def base(self) -> Tensor:
        """The baseline's logits [length, vocab] fp32."""
        if self._base is None:
            model = self._setup.model
            self._base = model.head(self._at(model.config.num_layers).to(model.weights.lm_head.device), reference)
        return self._base

    def logits(self, side: Session, layer: int) -> Iterator[Tensor]:
        """Logits in pieces, of a cache that is the baseline's in the layers before this one."""
        return logits_after(self._setup.model, side, self._at(layer), layer)


# -- Choosing -------------------------------------------------------------------------------------------------------------


def choose(
    costs: Costs,
    config: DecoderConfig,
    *,
    budget: float,
    tail: int,
    context: int,
    sink: int = 0,
    learned: Calibration | None = None,
) -> Allocation | None:
    """The formats with the least sum of costs within a budget, beside a tail.

    Args:
        budget: bits a value, all included.
        tail: tokens that stay in BF16; 0 for none.
        context: tokens of a sequence, over which the tail's bytes are spread.
        sink: first tokens that stay in BF16.
        learned: what `lrN` takes its coordinates from.
    Returns:
        None if not even the smallest candidates fit.
    """
    empty = KVSpec("bf16", tail=tail or None, sink=sink).plan(config.num_layers)
    options = [[(name, with_format(empty, place, name, learned)) for name in of_place] for place, of_place in costs.items()]
    sizes = [
        [_size(plan, place, config.head_dim, context) for _, plan in of_place]
        for place, of_place in zip(costs, options, strict=True)
    ]
    values = len(costs) * config.head_dim * BLOCK_SIZE * blocks_for(context)
    # A budget such as 4.1 has no exact float; what it falls short of must not cost a plan of just 4.1 bits.
    room = math.floor(budget * values / 8 * (1 + 1e-12))
    found = best_within(sizes, [list(of_place.values()) for of_place in costs.values()], room)
    if found is None:
        return None
    plan, total = empty, []
    for (place, of_place), option in zip(costs.items(), found, strict=True):
        name = list(of_place)[option]
        plan = with_format(plan, place, name, learned)
        total.append(of_place[name])
    return Allocation(plan, math.fsum(total))


def choices_within(
    costs: Costs,
    config: DecoderConfig,
    *,
    budget: float,
    tails: Sequence[int],
    context: int,
    sinks: Sequence[int] = (0,),
    learned: Calibration | None = None,
) -> list[Allocation]:
    """The best formats beside each tail and number of sinks that leave room for any.

    Raises:
        InputError: a budget that no choice meets, or that bf16 meets already.
    """
    if not 0 < budget < 16:
        raise InputError(f"a budget of {budget:g} bits a value is none; --budget must lie above 0 and below bf16's 16")
    beside = [(tail, sink) for tail in tails for sink in sinks]
    found = [
        choose(costs, config, budget=budget, tail=tail, context=context, sink=sink, learned=learned) for tail, sink in beside
    ]
    if choices := [choice for choice in found if choice]:
        return choices
    smallest = KVSpec(tail=min(tails) or None, sink=min(sinks), calibration=learned)
    names = dict.fromkeys(name for of_place in costs.values() for name in of_place)
    plans = [replace(smallest, kv=name).plan(config.num_layers) for name in names]
    least = min(bits_per_value(plan, config, context) for plan in plans)
    raise InputError(f"no plan takes {budget:g} bits a value: the smallest takes {least:.4g}; raise --budget or --context")


def compare(
    setup: Setup, calibration: Workload, choices: Sequence[Allocation], on_step: OnStep = lambda *_: None
) -> list[FidelityRow]:
    """Each chosen plan as a whole on the calibration text, its rows named by `KVPlan.describe`."""
    caches = {str(number): cache_of(setup.base, choice.plan) for number, choice in enumerate(choices)}
    rows = evaluate(replace(setup, caches=caches), calibration, on_step=on_step)
    return [replace(row, kv=choice.plan.describe()) for row, choice in zip(rows, choices, strict=True)]


# -- Verifying ------------------------------------------------------------------------------------------------------------


def rivals_of(
    plan: KVPlan, config: DecoderConfig, context: int, candidates: Sequence[str], learned: Calibration | None = None
) -> dict[str, KVPlan]:
    """Uniform candidates next to a plan in bytes: the largest that take no more, and the smallest that take no fewer.

    With the plan's tail and sinks as well, if it has any, the largest that take no more: what of the gain is theirs.
    """
    own = bits_per_value(plan, config, context)
    found: dict[str, KVPlan] = {}
    for tail, sink in dict.fromkeys(((None, 0), (plan.recent, plan.sink))):
        beside = KVSpec(tail=tail, sink=sink, calibration=learned)
        uniform = [replace(beside, kv=name).plan(config.num_layers) for name in candidates]
        bits = [bits_per_value(other, config, context) for other in uniform]
        near = {max((b for b in bits if b <= own), default=None)}
        if (tail, sink) == (None, 0):
            near.add(min((b for b in bits if b >= own), default=None))
        found |= {other.describe(): other for b, other in zip(bits, uniform, strict=True) if b in near}
    return dict(sorted(found.items(), key=lambda item: bits_per_value(item[1], config, context)))


def verify(
    setup: Setup, unseen: Workload, plan: KVPlan, rivals: Mapping[str, KVPlan], on_step: OnStep = lambda *_: None
) -> Verified:
    """A plan and its rivals on a text that it was not chosen by.

    Args:
        unseen: the text, in windows of the context.
        rivals: as `rivals_of` names them.
    Raises:
        NonFiniteError: a cache gave a logit that is not finite.
    """
    caches = {name: cache_of(setup.base, other) for name, other in {PLAN: plan, **rivals}.items()}
    partial = Partial()
    own, *others = evaluate(replace(setup, caches=caches), unseen, partial=partial, on_step=on_step)

    def window_means(name: str) -> list[float]:
        found = (partial.scores(name, number, window.length) for number, window in enumerate(unseen.windows))
        return [scores.kl.mean().item() for scores in found if scores]

    means = window_means(PLAN)
    nearer = [sum(a < b for a, b in zip(means, window_means(row.kv), strict=True)) for row in others]
    return Verified(own, tuple(others), tuple(nearer), unseen.scored, len(unseen.windows))
