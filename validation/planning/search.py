"""What `tq plan` and `--kv auto` share: formats to choose from, their sizes, and the plans of least cost for each size.

A *place* is K or V of one layer. That costs of places add up is an assumption; it only ranks plans beside one tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import COLUMNS, PREFIX, learned_bits
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import BF16_BYTES, KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, Shapes, blocks_for, each
from haarkv.validation.layers.parts import new_cache

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
    """K and V of every layer."""
    return [(layer, side) for layer in range(config.num_layers) for side in ("k", "v")]


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


def one_layer(
    plan: KVPlan, config: ModelConfig, layer: int, tokens: int, device: torch.device
) -> tuple[PagedKVCache, PagedSequences]:
    """An empty cache of one layer for a sequence of `tokens`, and its bookkeeping."""
    shape, blocks = config.layers[layer].attention.kv_shape, blocks_for(tokens)
    page = page_bytes(plan.layers[layer], shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    pages = {layer: torch.zeros(blocks, page, dtype=torch.uint8, device=device)}
    cache = new_cache(plan, config, blocks, num_rows=1, device=device, pages=pages)
    return cache, PagedSequences(blocks, cache.block_size, num_rows=1)


# -- The plans of least cost ---------------------------------------------------------------------------------------------
_STEP = 0.02
"""Bits a value from one budget to the next, where a bound on the loss is given."""


@dataclass(frozen=True)
class Allocation:
    """A plan, and the mean KL that it should have if costs added up."""

    plan: KVPlan
    predicted_kl: float


class Frontier:
    """The plans of least cost beside one tail, by size, for a sequence of `context` tokens.

    Args:
        place_groups: places that take one format; all of `costs`, each once. Without it each place has its own.
    """

    def __init__(
        self, costs: Costs, config: ModelConfig, *, tail: int, context: int, sink: int = 0,
        calibration: Calibration | None = None, place_groups: Sequence[Sequence[Place]] | None = None,
    ) -> None:  # fmt: skip
        self._groups, self._calibration = place_groups or [[place] for place in costs], calibration
        self._names = [list(costs[group[0]]) for group in self._groups]
        self._empty = KVSpec("bf16", tail=tail or None, sink=sink).plan(config.num_layers)
        chunk = KVSpec("tq4", tail=tail or None, sink=sink).plan(config.num_layers).ring_chunk()

        def size(group: Sequence[Place], name: str) -> int:
            plans = [(with_format(self._empty, place, name, calibration), place) for place in group]
            return sum(place_bytes(plan, place, config.kv_shapes, context, chunk) for plan, place in plans)

        groups = list(zip(self._groups, self._names, strict=True))
        self._losses = [[math.fsum(costs[place][name] for place in group) for name in names] for group, names in groups]
        self._knapsack = Knapsack([[size(group, name) for name in names] for group, names in groups], self._losses)
        self._exact = cache_bytes(KVSpec("bf16").plan(config.num_layers), context, config.kv_shapes)

    def within(self, budget: float) -> Allocation | None:
        """The least cost within a budget of bits a value, all included; None if not even the smallest formats fit."""
        # A budget such as 4.1 has no exact float; what it falls short of must not cost a plan of just 4.1 bits.
        options = self._knapsack.options(math.floor(budget * self._exact / 16 * (1 + 1e-12)))
        if options is None:
            return None
        plan = self._empty
        for group, names, option in zip(self._groups, self._names, options, strict=True):
            for place in group:
                plan = with_format(plan, place, names[option], self._calibration)
        return Allocation(plan, math.fsum(losses[option] for losses, option in zip(self._losses, options, strict=True)))

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
