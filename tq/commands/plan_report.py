"""What `tq plan` says of the plan that it has found: in tables, and in the plan's own file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haarkv.tq_ops.words import counted
from tq.output import print_table

if TYPE_CHECKING:
    from haarkv.validation.fidelity.evaluation import FidelityRow
    from haarkv.validation.planning.candidates import Costs, Verified
    from haarkv.validation.planning.planner import Allocation


_FEW = 1024
"""Tokens to judge by, below which small differences between caches are chance."""


@dataclass(frozen=True)
class Found:
    """The chosen plan and the measurements behind it.

    Attributes:
        costs: KL of each candidate at each place.
        rows: of all plans that were measured as a whole.
        tokens: of the text to choose by.
    """

    costs: Costs
    choice: Allocation
    row: FidelityRow
    rows: Sequence[FidelityRow]
    tokens: int


def measured_by(budget: float, context: int, found: Found, verified: Verified) -> dict[str, Any]:
    """The measurements that a plan file carries."""
    return {
        "budget": budget,
        "context": context,
        "calibration_tokens": found.tokens,
        "predicted_kl_without_tail": found.choice.predicted_kl,
        "calibration": [row.measured for row in found.rows],
        "verified_tokens": verified.tokens,
        "verified": [row.measured for row in (verified.plan, *verified.rivals)],
        "costs": {f"layer {layer} {side}": dict(costs) for (layer, side), costs in found.costs.items()},
    }


def print_plan(context: int, found: Found, verified: Verified) -> None:
    """The plan layer by layer, and beside its rivals on unseen text."""
    plan, costs, total = found.choice.plan, found.costs, found.choice.predicted_kl or 1.0
    shares = [
        (costs[layer, "k"][k.name] / total, costs[layer, "v"][v.name] / total) for layer, (k, v) in enumerate(plan.layers)
    ]
    cells = [
        (str(layer), k.name, f"{of_k:.1%}", v.name, f"{of_v:.1%}")
        for layer, ((k, v), (of_k, of_v)) in enumerate(zip(plan.layers, shares, strict=True))
    ]
    kept = [f"a tail of {plan.recent} tokens"] * bool(plan.recent) + [f"{plan.sink} sinks"] * bool(plan.sink)
    beside = f", and {' and '.join(kept)} in BF16" if kept else ""
    print_table(f"formats by layer{beside}; shares of the KL", ["layer", "K", "its share", "V", "its share"], cells)
    where = f"{counted(verified.tokens, 'unseen token')} in {counted(verified.windows, 'window')} of {context:,}"
    columns = ["kv", "bytes/token", "bits", "KL mean", "median", "99.9 %"]
    print_table(
        f"{where}, against the model's own bf16 cache", columns, [_cells(row) for row in (verified.plan, *verified.rivals)]
    )
    if verified.tokens < _FEW:
        print(f"so few tokens show large differences only; judge by a longer text, of {_FEW:,} tokens or more")
    for row, nearer in zip(verified.rivals, verified.nearer, strict=True):
        print(_verdict(verified.plan, row, nearer, verified.windows))


def ending(out_file: Path, better: FidelityRow | None, written: bool) -> str:
    """The last line: whether the plan is written, and why not."""
    lost = f", though {better.kv} of the same bytes is no worse" if better else ""
    if written:
        return f"written to {out_file}{lost}"
    return f"{out_file} is not written{lost.replace('though', 'because')}; --force writes it"


def _cells(row: FidelityRow) -> tuple[str, ...]:
    sizes = (f"{row.bytes_per_token:,.0f}", f"{row.bits_per_value:.3f}")
    return (row.kv, *sizes, *(f"{kl:.3g}" for kl in (row.kl_mean, row.kl_median, row.kl_p999)))


def _verdict(plan: FidelityRow, rival: FidelityRow, nearer: int, windows: int) -> str:
    """In one line, by how much the plan wins or loses."""
    size = plan.bytes_per_token / rival.bytes_per_token - 1
    bytes_ = "the same bytes" if size == 0 else f"{abs(size):.1%} {'fewer' if size < 0 else 'more'} bytes"
    if plan.kl_mean == rival.kl_mean:
        change = f"has the same mean KL as {rival.kv}"
    elif plan.kl_mean < rival.kl_mean:
        change = f"beats {rival.kv} by {1 - plan.kl_mean / rival.kl_mean:.1%} of its mean KL"
    else:
        change = f"loses to {rival.kv} by {plan.kl_mean / rival.kl_mean - 1:.1%} of its mean KL"
    figures = f"({plan.kl_mean:.3g} against {rival.kl_mean:.3g})"
    return f"the plan {change} {figures} at {bytes_}, nearer in {nearer} of {counted(windows, 'window')}"
