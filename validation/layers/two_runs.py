"""Two validations of one model, as `tq validate --json` wrote them: what got better or worse, by layer and stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json
from haarkv.validation.layers.report import FAILS

FACTOR = 2.0
"""Errors that differ by less are alike: another order of sums does as much."""
_LEAST = 0.01
"""Share of a bound below which an error is not worth a word."""
_ABOUT = ("candidate", "reference", "kv", "dtype", "prompt_tokens", "steps")

Direction = Literal["better", "worse"]


@dataclass(frozen=True)
class Change:
    """One tensor that got better or worse.

    Attributes:
        layer: None for the head and the whole forward.
        before, after: share of its bound that the error is; infinite if it is not finite.
        found_before, found_after: "equal", "rounding", "tie", "unstable" or "fault".
    """

    layer: int | None
    stage: str
    direction: Direction
    before: float
    after: float
    found_before: str
    found_after: str

    @property
    def fails(self) -> bool:
        """Whether it is wrong now and was not."""
        return self.found_after in FAILS and self.found_before not in FAILS


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        differences: how the runs themselves differ, in words.
        verdicts: whether each passed.
        changes: what is worse first, by how much.
        compared: tensors that both have.
        missing: tensors that only one of them has.
    """

    differences: tuple[str, ...]
    verdicts: tuple[bool, bool]
    changes: tuple[Change, ...]
    compared: int
    missing: int

    @property
    def worse(self) -> bool:
        """Something is wrong that was right."""
        return (self.verdicts[0] and not self.verdicts[1]) or any(change.fails for change in self.changes)


@dataclass(frozen=True)
class _Tensor:
    share: float
    found: str


_Key = tuple[int | None, str]


def compare_files(before: Path, after: Path) -> Comparison:
    """Compare two files.

    Raises:
        InputError: one of them is no report of `tq validate --json`, or they are of different models.
    """
    a, b = _read(before), _read(after)
    ours, theirs = (_tensors(raw, path) for raw, path in ((a, before), (b, after)))
    if a["model"] != b["model"] or _layers(ours) != _layers(theirs):
        raise InputError(
            f"the runs are of different models: {before} of {a['model']} with {_layers(ours)} layers, {after} of {b['model']} "
            f"with {_layers(theirs)}"
        )
    both = [key for key in ours if key in theirs]
    changes = [change for key in both if (change := _change(key, ours[key], theirs[key]))]
    return Comparison(
        tuple(f"{name} {a[name]} before, {b[name]} after" for name in _ABOUT if a[name] != b[name]),
        (a["passed"], b["passed"]),
        tuple(sorted(changes, key=_order)),
        len(both),
        len(ours) + len(theirs) - 2 * len(both),
    )


def _read(path: Path) -> Mapping[str, Any]:
    raw = read_json(path)
    needed = {"model": str, "passed": bool, "tensors": list}
    if not isinstance(raw, dict) or not all(type(raw.get(name)) is kind for name, kind in needed.items()):
        raise InputError(f"{path} is no report of `tq validate --json`, or one of an older version; write it again")
    if missing := [name for name in _ABOUT if name not in raw]:
        raise InputError(f"{path} is no report of `tq validate --json`: it lacks {missing[0]}")
    return raw


def _tensors(raw: Mapping[str, Any], path: Path) -> dict[_Key, _Tensor]:
    found: dict[_Key, _Tensor] = {}
    for entry in raw["tensors"]:
        match entry:
            case {"stage": str(stage), "layer": int() | None as layer, "reason": str() | None as reason}:
                error, bound = entry.get("error"), entry.get("bound")
                if all(type(number) in (int, float, type(None)) for number in (error, bound)):
                    found[layer, stage] = _Tensor(_share(error, bound, reason), reason or "equal")
                    continue
        raise InputError(f"{path} is no report of `tq validate --json`: it has a tensor that is none")
    return found


def _share(error: float | None, bound: float | None, reason: str | None) -> float:
    if reason is None:
        return 0.0
    return error / bound if error is not None and bound else math.inf  # what JSON cannot write was not finite


def _layers(tensors: Mapping[_Key, _Tensor]) -> int:
    return len({layer for layer, _ in tensors if layer is not None})


def _change(key: _Key, before: _Tensor, after: _Tensor) -> Change | None:
    fails = [tensor.found in FAILS for tensor in (before, after)]
    if fails[0] != fails[1]:
        direction: Direction = "worse" if fails[1] else "better"
    elif max(before.share, after.share) < _LEAST or not _apart(before.share, after.share):
        return None
    else:
        direction = "worse" if after.share > before.share else "better"
    return Change(key[0], key[1], direction, before.share, after.share, before.found, after.found)


def _apart(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high > FACTOR * low


def _order(change: Change) -> tuple[object, ...]:
    """What is wrong now, then what is worse, then what is better; within each by layer."""
    layer = math.inf if change.layer is None else change.layer
    return not change.fails, change.direction == "better", layer
