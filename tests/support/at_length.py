"""Parameters of which `make test` runs some; the rest is left to a marker's own command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

MORE = pytest.mark.long
# With a GPU its kernels are quick: all of it runs.
MORE_CUDA = () if torch.cuda.is_available() else pytest.mark.cuda_long
MORE_JUDGE = pytest.mark.judge_long


def rest(mark: Any, cases: Iterable[Any], plain: Callable[[int, Any], bool]) -> list[Any]:
    """Cases, marked but for those of which `plain` says so, given a case's index and itself."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=() if plain(index, case[0] if len(case) == 1 else case) else mark)
        for index, case in enumerate(tuples)
    ]


def pairwise_cases(mark: Any, *axes: Sequence[Any]) -> list[Any]:
    """The product of axes; unmarked are as many as the longest axis has values, and every value of each axis is among them.

    Of the cells that hold most values not yet seen, the one with most pairs not yet seen is taken first.
    """
    cells = list(product(*map(range, map(len, axes))))
    values: set[tuple[int, int]] = set()
    pairs: set[tuple[tuple[int, int], ...]] = set()
    selection: set[tuple[int, ...]] = set()

    def gain(cell: tuple[int, ...]) -> tuple[int, int]:
        cell_values = list(enumerate(cell))
        return len(set(cell_values) - values), len(set(combinations(cell_values, 2)) - pairs)

    for _ in range(max(map(len, axes))):
        best = max((cell for cell in cells if cell not in selection), key=gain)
        selection.add(best)
        values.update(enumerate(best))
        pairs.update(combinations(enumerate(best), 2))
    assert values == {(axis, value) for axis, axis_values in enumerate(axes) for value in range(len(axis_values))}
    return [
        pytest.param(
            *(axis_values[i] for axis_values, i in zip(axes, cell, strict=True)), marks=() if cell in selection else mark
        )
        for cell in cells
    ]
