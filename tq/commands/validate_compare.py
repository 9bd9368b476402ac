"""What `tq validate --compare A.json B.json` prints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tq.output import print_table, visible

if TYPE_CHECKING:
    from haarkv.validation.layers.two_runs import Change


def compare(before: Path, after: Path, as_json: bool) -> int:
    """Print what got better or worse; 0 if nothing is wrong that was right, else 1."""
    from haarkv.validation.layers.two_runs import compare_files

    found = compare_files(before, after)
    if as_json:
        shares = [{"before": _finite(change.before), "after": _finite(change.after)} for change in found.changes]
        changes = [asdict(change) | of for change, of in zip(found.changes, shares, strict=True)]
        print(json.dumps({"worse": found.worse, **asdict(found), "changes": changes}))
        return int(found.worse)
    words = ["passed" if passed else "failed" for passed in found.verdicts]
    counts = [sum(change.direction == way for change in found.changes) for way in ("worse", "better")]
    rows = [
        ("verdict", f"{words[0]} before, {words[1]} after"),
        ("tensors", f"{found.compared} compared: {counts[0]} worse, {counts[1]} better, the others alike"),
        *(("the runs differ", visible(difference)) for difference in found.differences),
    ]
    if found.missing:
        rows.append(("not compared", f"{found.missing} tensors that only one run has"))
    print_table(visible(f"{after} beside {before}"), [], rows)
    if found.changes:
        print_table(
            "Errors as a share of their bounds", ["", "layer", "stage", "before", "after"], list(map(_row, found.changes))
        )
    return int(found.worse)


def _row(change: Change) -> tuple[str, ...]:
    layer = "–" if change.layer is None else str(change.layer)
    shown = [
        f"{'not finite' if math.isinf(share) else f'{100 * share:.3g} %'} ({found})"
        for share, found in ((change.before, change.found_before), (change.after, change.found_after))
    ]
    return "WRONG NOW" if change.fails else change.direction, layer, visible(change.stage), *shown


def _finite(share: float) -> float | None:
    return share if math.isfinite(share) else None
