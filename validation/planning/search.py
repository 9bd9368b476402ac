"""The search that `tq plan` and `--kv auto` share: the formats of least cost for each size, a multiple-choice knapsack.

A *place* is K or V of one layer. That the costs of places add up is an assumption; it only ranks plans beside one tail.
benchmarks/LOG.md says how far it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.planning.candidates import Costs, Place, place_bytes, with_format

_STEP = 0.02
"""Bits a value from one budget to the next, where a bound on the loss is given."""


@dataclass(frozen=True)
class Allocation:
    """A plan, and the mean KL that it should have if costs added up."""

    plan: KVPlan
    predicted_kl: float


class Frontier:
    """The plans of least cost beside one tail, by size.

    Args:
        context: tokens of a sequence, over which the tail's bytes are spread.
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
        size = self._knapsack.least_size(loss)
        steps = math.ceil(size * 16 / self._exact / _STEP * (1 - 1e-12))
        return self.within(steps * _STEP) if steps * _STEP < 16 else None


class Knapsack:
    """One option of each item, of least total loss.

    Dynamic programming over sizes, in units of the greatest common divisor of what options exceed their item's smallest by:
    `best[i, s] = min over options of best[i - 1, s - size] + loss`. Among equal losses the smallest size wins.

    Args:
        sizes: [item][option], at least one option each.
        losses: the same, of any sign.
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
