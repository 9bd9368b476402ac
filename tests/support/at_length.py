"""Parameters of which `make test` runs some; the rest is left to a marker's own command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
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

    Each axis begins anew at another value once it is through, so that two short ones do not always show the same pairs.
    """
    turns = range(max(map(len, axes)))
    plain = {tuple((i + i // len(axis) * place) % len(axis) for place, axis in enumerate(axes)) for i in turns}
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, cell, strict=True)), marks=() if cell in plain else mark)
        for cell in product(*map(range, map(len, axes)))
    ]
