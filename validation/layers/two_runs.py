"""Two reports of `tq validate --json` on one model: what got better or worse, by layer and stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json
from haarkv.validation.layers.report import FAILS, Reason

FACTOR = 2.0
"""Shares that differ by less count as alike: another order of sums does as much."""
_LEAST = 0.01
"""Smaller shares are not reported."""
_ABOUT = ("candidate", "reference", "kv", "dtype", "prompt_tokens", "steps")
_Tensors = dict[tuple[int | None, str], tuple[float, str]]
"""By layer and stage: worst figure as a multiple of what honest runs allow, and what was found."""


def compare_files(before: Path, after: Path) -> dict[str, Any]:
    """Compare two files, as a JSON object: `changes` wrong now first, then worse, then better; `worse` if a right one is wrong
    now.

    Raises:
        InputError: no report of `tq validate --json`, or two models.
    """
    (a, ours), (b, theirs) = _read(before), _read(after)
    layers = [len({layer for layer, _ in tensors if layer is not None}) for tensors in (ours, theirs)]
    if a["model"] != b["model"] or layers[0] != layers[1]:
        raise InputError(
            f"the runs are of different models: {before} of {a['model']} with {layers[0]} layers, {after} of {b['model']} "
            f"with {layers[1]}"
        )
    changes = [change for key in ours if key in theirs and (change := _change(key, ours[key], theirs[key]))]
    changes.sort(
        key=lambda c: (not is_new_fault(c), c["direction"] == "better", math.inf if c["layer"] is None else c["layer"])
    )
    return {
        "worse": (a["passed"] and not b["passed"]) or any(map(is_new_fault, changes)),
        "differences": [f"{name} {a[name]} before, {b[name]} after" for name in _ABOUT if a[name] != b[name]],
        "verdicts": [a["passed"], b["passed"]], "changes": changes,
        "compared": len(ours.keys() & theirs.keys()), "missing": len(ours.keys() ^ theirs.keys()),
    }  # fmt: skip


def is_new_fault(change: Mapping[str, Any]) -> bool:
    """Wrong now and right before."""
    return change["found_after"] in FAILS and change["found_before"] not in FAILS


def _read(path: Path) -> tuple[Mapping[str, Any], _Tensors]:
    raw, tensors = read_json(path), _Tensors()
    required_types = {"model": str, "passed": bool, "tensors": list}
    if not isinstance(raw, dict) or not all(type(raw.get(name)) is kind for name, kind in required_types.items()):
        raise InputError(f"{path} is no report of `tq validate --json`, or one of an older version; write it again")
    if missing := [name for name in _ABOUT if name not in raw]:
        raise InputError(f"{path} is no report of `tq validate --json`: it lacks {missing[0]}")
    for entry in raw["tensors"]:
        match entry:
            case {
                "stage": str(stage), "layer": int() | None as layer, "reason": reason,
                "share": int() | float() | None as share,
            } if reason in (None, *get_args(Reason)):  # fmt: skip
                # What JSON cannot write was not finite.
                tensors[layer, stage] = math.inf if share is None else share, reason or "equal"
            case _:
                raise InputError(f"{path} is no report of `tq validate --json`: it has a tensor that is none")
    return raw, tensors


def _change(
    key: tuple[int | None, str], before: tuple[float, str], after: tuple[float, str]
) -> dict[str, Any] | None:  # fmt: skip
    fails = [found in FAILS for _, found in (before, after)]
    low, high = sorted((before[0], after[0]))
    if fails[0] == fails[1] and (high < _LEAST or not high > FACTOR * low):
        return None
    worse = fails[1] if fails[0] != fails[1] else after[0] > before[0]
    return {
        "layer": key[0], "stage": key[1], "direction": "worse" if worse else "better", "before": before[0],
        "after": after[0], "found_before": before[1], "found_after": after[1],
    }  # fmt: skip
