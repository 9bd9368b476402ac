"""`tq bench decode --draft`: the held-out text of tiny continued with a draft and without, in turns."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tq.commands.bench_request import kvs_of, turning
from tq.options import set_threads
from tq.output import loading, print_table

if TYPE_CHECKING:
    from haarkv.engine.draft_choice import DraftSpec

_DRAFT_COLUMNS = (
    "context",
    "draft",
    "ms/token",
    "speed-up",
    "CPU ms/token",
    "CPU speed-up",
    "accepted",
    "tokens/step",
    "same text",
)


def drafted(spec: DraftSpec, given: dict[str, Any]) -> None:
    """Measure decoding with a draft and without."""
    from haarkv.benchmarks.drafts import DraftRequest, measure
    from haarkv.benchmarks.report import emit

    kvs = kvs_of(given) if given["kvs"] else ["tq4"]
    if len(kvs) != 1 or len(given["executors"]) != 1:
        raise click.UsageError("--draft takes one executor and one format at a time")
    set_threads(given["threads"])
    request = DraftRequest(
        executor=given["executors"][0], kv=kvs[0], drafts=[spec],
        **{name: given[name] for name in ("model", "contexts", "dtype", "layers", "device", "repeats")},
    )  # fmt: skip
    with loading(request.model) as progress, turning() as on_turn:
        rows = measure(request, progress, on_turn)
    settings = {"model": request.model, "kv": request.kv, "draft": asdict(spec), "new_tokens": request.new_tokens}
    emit("drafts", settings | {"rows": [row.as_json() for row in rows]}, save=given["save"], echo=given["as_json"])
    if given["as_json"]:
        return
    cells = [
        (
            str(r.context), r.draft, f"{r.ms:.2f}", _times(r.speed_up), f"{r.cpu_ms:.2f}", _times(r.cpu_speed_up),
            "–" if r.drafting is None or r.drafting.acceptance is None else f"{r.drafting.acceptance:.0%}",
            "–" if r.drafting is None or r.drafting.tokens_per_step is None else f"{r.drafting.tokens_per_step:.2f}",
            "yes" if r.same_text else "no",
        )
        for r in rows
    ]  # fmt: skip
    title = f"{request.model}, {request.kv}: {request.new_tokens} new tokens, greedy, median of {request.repeats} turns"
    print_table(title, _DRAFT_COLUMNS, cells)
    for row in rows:
        if row.drafting:
            print(f"{row.context:,} tokens: {row.drafting.describe()}")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
