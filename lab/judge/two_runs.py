"""Two reports of `tq validate --json` on one model: what got better or worse. `python -m lab.judge.two_runs A.json B.json`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json
from haarkv.validation.layers.report import FAILS

FACTOR = 2.0
"""Shares that differ by less count as alike: another order of sums does as much."""
_LEAST = 0.01
"""Smaller shares are not reported."""
_ABOUT = ("candidate", "reference", "kv", "dtype", "prompt_tokens", "steps")
Tensors = dict[tuple[int | None, str], tuple[float, str | None]]
"""By layer and stage: worst figure as a multiple of what honest runs allow, and the reason."""


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Whether something is wrong now that was right, how the runs' settings differ, and every tensor that changed.

    Raises:
        InputError: no report of `tq validate --json`, or two models.
    """
    (a, ours), (b, theirs) = _read(before), _read(after)
    if a["model"] != b["model"] or _layers(ours) != _layers(theirs):
        raise InputError(f"{before} and {after} are of different models: {a['model']} and {b['model']}")
    changes = [change for key in ours if key in theirs and (change := _change(key, ours[key], theirs[key]))]
    changes.sort(key=lambda c: (not c["fails"], not c["worse"], math.inf if c["layer"] is None else c["layer"]))
    return {
        "worse": (a["passed"] and not b["passed"]) or any(change["fails"] for change in changes),
        "passed": [a["passed"], b["passed"]],
        "differences": [f"{name} {a[name]} before, {b[name]} after" for name in _ABOUT if a[name] != b[name]],
        "compared": len(ours.keys() & theirs.keys()), "missing": len(ours.keys() ^ theirs.keys()), "changes": changes,
    }  # fmt: skip


def _read(path: Path) -> tuple[Mapping[str, Any], Tensors]:
    raw = read_json(path)
    try:
        rows = {(row["layer"], row["stage"]): (row["share"], row["reason"]) for row in raw["tensors"]}
        about = {name: raw[name] for name in ("model", "passed", *_ABOUT)}
    except (KeyError, TypeError):
        raise InputError(f"{path} is no report of `tq validate --json`, or one of an older version") from None
    # What JSON cannot write was not finite.
    return about, {key: (math.inf if share is None else share, reason) for key, (share, reason) in rows.items()}


def _layers(tensors: Tensors) -> int:
    return len({layer for layer, _ in tensors if layer is not None})


def _change(
    key: tuple[int | None, str], before: tuple[float, str | None], after: tuple[float, str | None]
) -> dict[str, Any] | None:
    fails = [reason in FAILS for _, reason in (before, after)]
    low, high = sorted((before[0], after[0]))
    if fails[0] == fails[1] and (high < _LEAST or not high > FACTOR * low):
        return None
    return {
        "layer": key[0], "stage": key[1], "worse": fails[1] if fails[0] != fails[1] else after[0] > before[0],
        "fails": fails[1] and not fails[0], "before": before, "after": after,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if nothing is wrong that was right, else 1; 2 if nothing could be compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs=2, type=Path)
    try:
        comparison = compare(*parser.parse_args(argv).files)
    except InputError as error:
        print(f"lab.judge.two_runs: {error}", file=sys.stderr)
        return 2
    changes = comparison.pop("changes")
    print(json.dumps(comparison))
    for change in changes:
        word = "WRONG NOW" if change["fails"] else "worse" if change["worse"] else "better"
        place = change["stage"] if change["layer"] is None else f"layer {change['layer']}, {change['stage']}"
        cells = [f"{100 * share:.3g} % ({reason or 'equal'})" for share, reason in (change["before"], change["after"])]
        print(f"{word:10} {place}: {cells[0]}, then {cells[1]}")
    return int(comparison["worse"])


if __name__ == "__main__":
    sys.exit(main())
