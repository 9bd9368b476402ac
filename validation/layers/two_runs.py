"""Two reports of `tq validate --json` on one model: what got better or worse, by layer and stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json
from haarkv.validation.layers.report import FAILS, Reason, Verdict

FACTOR = 2.0
"""Shares that differ by less count as alike: another order of sums does as much."""
_LEAST = 0.01
"""Smaller shares are not reported."""
_ABOUT = ("candidate", "reference", "kv", "dtype", "prompt_tokens", "steps")

Direction = Literal["better", "worse"]
_Tensors = dict[tuple[int | None, str], Verdict]


@dataclass(frozen=True)
class Change:
    """One tensor that got better or worse.

    Attributes:
        layer: None for the head and the whole forward.
        before, after: worst figure as a multiple of what honest runs allow; infinite if not finite.
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
        """Wrong now and right before."""
        return self.found_after in FAILS and self.found_before not in FAILS


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        differences: of the runs' settings, in words.
        verdicts: whether each passed.
        changes: first what is wrong now, then worse, then better; each by layer.
        compared, missing: tensors that both have; that only one has.
    """

    differences: tuple[str, ...]
    verdicts: tuple[bool, bool]
    changes: tuple[Change, ...]
    compared: int
    missing: int

    @property
    def worse(self) -> bool:
        return (self.verdicts[0] and not self.verdicts[1]) or any(change.fails for change in self.changes)


def compare_files(before: Path, after: Path) -> Comparison:
    """Compare two files.

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
    both = ours.keys() & theirs.keys()
    changes = [change for key in ours if key in both and (change := _change(ours[key], theirs[key]))]
    return Comparison(
        tuple(f"{name} {a[name]} before, {b[name]} after" for name in _ABOUT if a[name] != b[name]),
        (a["passed"], b["passed"]),
        tuple(sorted(changes, key=lambda c: (not c.fails, c.direction == "better", math.inf if c.layer is None else c.layer))),
        len(both),
        len(ours) + len(theirs) - 2 * len(both),
    )


def _read(path: Path) -> tuple[Mapping[str, Any], _Tensors]:
    raw, tensors = read_json(path), dict[tuple[int | None, str], Verdict]()
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
                tensors[layer, stage] = Verdict(stage, reason, math.nan if share is None else share, 1.0, layer=layer)
            case _:
                raise InputError(f"{path} is no report of `tq validate --json`: it has a tensor that is none")
    return raw, tensors


def _change(before: Verdict, after: Verdict) -> Change | None:
    fails = [tensor.fails for tensor in (before, after)]
    low, high = sorted((before.share, after.share))
    if fails[0] == fails[1] and (high < _LEAST or not high > FACTOR * low):
        return None
    worse = fails[1] if fails[0] != fails[1] else after.share > before.share
    reasons = (tensor.reason or "equal" for tensor in (before, after))
    return Change(after.layer, after.stage, "worse" if worse else "better", before.share, after.share, *reasons)
