"""Formats to choose from, their sizes, and the plans of least cost for each size; then `tq plan`, which measures the costs.

A *place* is K or V of one layer. That costs of places add up is an assumption; it only ranks plans beside one tail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import COLUMNS, PREFIX, learned_bits
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import BF16_BYTES, KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, Shapes, blocks_for, each
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep, Setup, Workload, evaluate, score_all
from haarkv.validation.fidelity.scores import Partial

CANDIDATES = ("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "bf16")
"""One format for each number of bits, so that no place takes the luckier of two equals."""
TAILS = (0, 16, 32, 64, 128)
"""Tails to try, in tokens."""
LEARNED_CANDIDATES = (*(f"{PREFIX}{bits}" for bits in COLUMNS), "tq2", "tq3", "tq4", "tq5", "tq6")
"""The same with a calibration."""

Place = tuple[int, Side]
"""K or V of a layer."""
Candidates = Sequence[str] | Mapping[Side, Sequence[str]]
"""Names of formats, for both sides or for each."""
Costs = Mapping[Place, Mapping[str, float]]
"""Mean KL(bf16 || bf16 but this format at this place), in nats a token."""


def places(config: ModelConfig) -> list[Place]:
    """K and V of every layer that has them."""
    return [(layer, side) for layer, shape in enumerate(config.kv_shapes) if shape for side in ("k", "v")]


def at(side: Side, names: Candidates) -> list[str]:
    """Those of some formats that a side takes: learned ones are K's alone."""
    side_names = names[side] if isinstance(names, Mapping) else names
    return [name for name in side_names if side == "k" or learned_bits(name) is None]


def everywhere(name: str) -> str:
    """All of a cache in one format; beside learned keys, values of as many bits."""
    bits = learned_bits(name)
    return f"k={name},v=tq{bits}" if bits else name


def require_candidates(names: Sequence[str], config: ModelConfig, calibration: Calibration | None = None) -> None:
    """Refuse formats that the model does not take, or that store tokens in groups."""
    for name in names:
        if plan_for(KVSpec(everywhere(name), calibration=calibration), config).has_windows:
            raise InputError(
                f"{name} stores tokens in groups and brings its own tail; name candidates that store each by itself"
            )


def bits_per_value(kv: KVPlan, config: ModelConfig, context: int) -> float:
    """Bits of one number of K or V, all included, as allocated for one sequence of `context` tokens."""
    shapes, exact = config.kv_shapes, KVSpec("bf16").plan(config.num_layers)
    return 16 * cache_bytes(kv, context, shapes) / cache_bytes(exact, context, shapes)


def place_bytes(kv: KVPlan, place: Place, shapes: Shapes, context: int, ring_chunk: int = RING_CHUNK) -> int:
    """Bytes of one place for one sequence, its sliding window's ring, tail and sinks included."""
    layer, side = place
    kv_format, shape, blocks = kv.layers[layer][side == "v"], each(shapes, len(kv.layers))[layer], blocks_for(context)
    assert shape is not None, "a place is of a layer that has K and V"
    ring = shape.ring_blocks(blocks, chunk=ring_chunk)
    packed = BLOCK_SIZE * (blocks if ring is None else ring) * shape.num_kv_heads * kv_format.bytes_per_vector(shape.head_dim)
    bf16_tokens = kv.ring_tokens(kv_format) + kv.sink if kv.has_window(kv_format) else 0
    return round(packed) + BF16_BYTES * shape.numbers * bf16_tokens


def with_format(plan: KVPlan, place: Place, name: str, calibration: Calibration | None = None) -> KVPlan:
    """A plan with another format at one place."""
    (layer, side), layers = place, list(plan.layers)
    k_format, v_format = layers[layer]
    kv_format = formats.get(name, side, calibration)
    layers[layer] = (kv_format, v_format) if side == "k" else (k_format, kv_format)
    return replace(plan, layers=tuple(layers))


def session_with_plan(base: Session, plan: KVPlan) -> Session:
    """The baseline's model with another plan; InputError if the executor cannot run it."""
    if reason := base.executor.supports(base.config, plan):
        raise InputError(f"executor {base.executor.name} cannot run {plan.describe()}: {reason}")
    return replace(base, plan=plan)


@torch.inference_mode()
def run_one_layer(
    run: Callable[[Tensor, range, Batch, PagedKVCache], Tensor], plan: KVPlan, config: ModelConfig, layer: int, hidden: Tensor
) -> Tensor:
    """What leaves a layer [T, hidden], from an empty cache of that layer alone; `run` is an executor's `layers`."""
    blocks, pages = blocks_for(len(hidden)), dict[int, Tensor]()
    if (shape := config.kv_shapes[layer]) is not None:
        page = page_bytes(plan.layers[layer], shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        pages[layer] = torch.zeros(blocks, page, dtype=torch.uint8, device=hidden.device)
    cache = PagedKVCache(
        plan, config.kv_shapes, num_blocks=blocks, num_rows=1, device=hidden.device, pages=pages, chunk=len(hidden),
        states={index: state for index, state in config.state_shapes.items() if index == layer},
    )  # fmt: skip
    paging, pieces = PagedSequences(blocks, cache.block_size, num_rows=1), []
    sequence = paging.add()
    for some in torch.split(hidden, cache.most_new_tokens or len(hidden)):
        batch = paging.batch([sequence], [len(some)]).to(hidden.device)
        pieces.append(run(some, range(layer, layer + 1), batch, cache))
    return torch.cat(pieces)


# -- The plans of least cost ---------------------------------------------------------------------------------------------
_STEP = 0.02
"""Bits a value from one budget to the next, where a bound on the loss is given."""


@dataclass(frozen=True)
class Allocation:
    """A plan, and the mean KL that it should have if costs added up."""

    plan: KVPlan
    predicted_kl: float


class Frontier:
    """The plans of least cost beside one tail, by size, for a sequence of `context` tokens."""

    def __init__(
        self, costs: Costs, config: ModelConfig, *, tail: int, context: int, sink: int = 0,
        calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        self._costs, self._calibration = {place: dict(by_name) for place, by_name in costs.items()}, calibration
        self._empty = KVSpec("bf16", tail=tail or None, sink=sink).plan(config.num_layers)
        chunk = KVSpec("tq4", tail=tail or None, sink=sink).plan(config.num_layers).ring_chunk()

        def size(place: Place, name: str) -> int:
            plan = with_format(self._empty, place, name, calibration)
            return place_bytes(plan, place, config.kv_shapes, context, chunk)

        sizes = [[size(place, name) for name in by_name] for place, by_name in self._costs.items()]
        self._knapsack = Knapsack(sizes, [list(by_name.values()) for by_name in self._costs.values()])
        self._exact = cache_bytes(KVSpec("bf16").plan(config.num_layers), context, config.kv_shapes)
        self._shapes = config.kv_shapes

    def within(self, budget: float) -> Allocation | None:
        """The least cost within a budget of bits a value, all included; None if not even the smallest formats fit."""
        # A budget such as 4.1 has no exact float; what it falls short of must not cost a plan of just 4.1 bits.
        options = self._knapsack.options(math.floor(budget * self._exact / 16 * (1 + 1e-12)))
        if options is None:
            return None
        plan, costs = self._empty, list[float]()
        for (place, by_name), option in zip(self._costs.items(), options, strict=True):
            name = list(by_name)[option]
            plan = with_format(plan, place, name, self._calibration)
            costs.append(by_name[name])
        pairs = Counter(pair for pair, shape in zip(plan.layers, self._shapes, strict=True) if shape)
        common = pairs.most_common(1)[0][0]  # also names layers without K and V, so that the plan is told in few words
        layers = (pair if shape else common for pair, shape in zip(plan.layers, self._shapes, strict=True))
        return Allocation(replace(plan, layers=tuple(layers)), math.fsum(costs))

    def under(self, loss: float) -> Allocation | None:
        """The fewest bits, in steps of 0.02 below 16, whose costs add up to no more than `loss`; None if there are none."""
        if not math.isfinite(size := self._knapsack.least_size(loss)):
            return None
        steps = math.ceil(size * 16 / self._exact / _STEP * (1 - 1e-12))
        return self.within(steps * _STEP) if steps * _STEP < 16 else None


class Knapsack:
    """One option of each item, of least total loss; among equal losses the smallest size wins.

    Dynamic programming over sizes, in units of the greatest common divisor of what options exceed their item's smallest by:
    `best[i, s] = min over options of best[i - 1, s - size] + loss`. Sizes and losses are [item][option].
    """

    def __init__(self, sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> None:
        self._least = sum(map(min, sizes))
        extra = [[size - min(item_sizes) for size in item_sizes] for item_sizes in sizes]
        self._unit = math.gcd(*(size for item_sizes in extra for size in item_sizes)) or 1
        self._steps = [[size // self._unit for size in item_sizes] for item_sizes in extra]
        room = sum(map(max, self._steps))
        self._best = np.full(room + 1, np.inf)
        self._best[0] = 0.0
        self._tables = []
        for item_steps, item_losses in zip(self._steps, losses, strict=True):
            best_loss, option = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int16)
            for index, (steps, loss) in enumerate(zip(item_steps, item_losses, strict=True)):
                with_it = np.full(room + 1, np.inf)
                with_it[steps:] = self._best[: room + 1 - steps] + loss
                better = with_it < best_loss
                best_loss[better], option[better] = with_it[better], index
            self._best = best_loss
            self._tables.append(option)

    def options(self, budget: int) -> list[int] | None:
        """The index of each item's option, of sizes that add up to `budget` at most; None if not even the smallest do."""
        if budget < self._least:
            return None
        at, selection = int(self._best[: (budget - self._least) // self._unit + 1].argmin()), []
        for item_steps, option in zip(reversed(self._steps), reversed(self._tables), strict=True):
            selection.append(int(option[at]))
            at -= item_steps[selection[-1]]
        return selection[::-1]

    def least_size(self, loss: float) -> float:
        """The smallest total size of no more than this loss; infinite if there is none."""
        fitting = np.flatnonzero(self._best <= loss)
        return self._least + int(fitting[0]) * self._unit if len(fitting) else math.inf


# -- Measuring: `tq plan` ------------------------------------------------------------------------------------------------
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
"""A uniform format of at most this factor times the plan's bytes counts as one of the same bytes."""
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
