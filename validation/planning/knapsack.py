"""The multiple-choice knapsack, exactly: one option of each item, the least loss in all within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


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
    extra = [[size - min(of_item) for size in of_item] for of_item in sizes]
    unit = math.gcd(*(size for of_item in extra for size in of_item)) or 1
    room = (min(budget, sum(map(max, sizes))) - least) // unit
    best = np.full(room + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for of_item, lost in zip(extra, losses, strict=True):
        reached, option = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int64)
        for index, (size, loss) in enumerate(zip(of_item, lost, strict=True)):
            steps = size // unit
            if steps <= room:
                with_it = np.full(room + 1, np.inf)
                with_it[steps:] = best[: room + 1 - steps] + loss
                better = with_it < reached
                reached[better], option[better] = with_it[better], index
        best = reached
        chosen.append(option)
    at, found = int(best.argmin()), []
    for of_item, option in zip(reversed(extra), reversed(chosen), strict=True):
        found.append(int(option[at]))
        at -= of_item[found[-1]] // unit
    return found[::-1]
