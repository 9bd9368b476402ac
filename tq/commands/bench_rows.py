"""The tables of `tq bench decode` and `tq bench prefill`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tq.output import print_table

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.decode_cost import CostRow
    from haarkv.benchmarks.timing import Machine


# A first call that takes so many times as long as the others has compiled something.
_MUCH_LONGER = 10


def print_rows(request: Request, machine: Machine, rows: Sequence[CostRow]) -> None:
    """Print what was measured: a table for each kind, and beneath it what explains its rows."""
    limits = (
        f"copy {machine.copy_gbps:.1f} GB/s, FP32 {machine.fp32_gflops:.0f} GFLOP/s, BF16 {machine.bf16_gflops:.0f} GFLOP/s"
    )
    titles = {
        "attention": "decode attention of one layer, K and V from memory",
        "store": "storing one new token in one layer",
        "layer": "one call of one decoder layer",
        "prompt": "whole prompt, weights and all",
        "step": "whole decode step",
        "prefill": "attention of one layer over a whole prompt",
    }
    for kind, title in titles.items():
        chosen = [r for r in rows if r.kind == kind]
        if not chosen:
            continue
        cells = [_cells(r, _best_peer(chosen, r)) for r in chosen]
        rate = "tokens/s" if kind == "prompt" else "ms/token"
        columns = (
            "batch", "context", "who", "ms", "low … high", rate, "speed-up", "weights MB", "KV MB", "GB/s", "of copy",
            "floor ms", "× floor",
        )  # fmt: skip
        of = f", one of {request.ranks.size} ranks" if request.ranks.size > 1 else ""
        counts = {r.runs or request.repeats for r in chosen}
        runs = " to ".join(map(str, sorted({min(counts), max(counts)})))
        print_table(f"{request.model}, {request.dtype}{of}: {title}, median of {runs}; {limits}", columns, cells)
        for line in dict.fromkeys(
            (*(f"{r.who}: {r.note}" for r in chosen if r.note), *_beside_first(chosen), *_beside_llama(chosen))
        ):
            print(line)
        for who, compiled in {r.who: r.compiled for r in chosen if r.compiled}.items():
            print(f"{who}: compiled {_seconds(compiled)}, counted in no figure")
        for r in chosen:
            if r.ms is not None and r.first_ms is not None and r.first_ms > _MUCH_LONGER * r.ms:
                print(
                    f"{r.who}, batch {r.batch}, context {r.context}: first call {r.first_ms / 1e3:.2f} s, counted in no figure"
                )
    for about in dict.fromkeys(r.about for r in rows if r.about):
        print(about)
    print("speed-up: over the fastest peer of the same case; floor: its bytes at a copy's speed, or its operations if longer")


def _best_peer(rows: Sequence[CostRow], like: CostRow) -> float | None:
    """The fastest peer's time in a row's case."""
    times = [r.ms for r in rows if (r.batch, r.context) == (like.batch, like.context) and r.peer and r.ms is not None]
    return min(times, default=None)


def _seconds(compiled: Mapping[str, float]) -> str:
    return ", ".join(f"{name} in {seconds:.1f} s" for name, seconds in compiled.items())


def _beside_first(rows: Sequence[CostRow]) -> Iterator[str]:
    """Each of ours beside the first cache of its executor, by case."""
    first: dict[tuple[str, int, int], CostRow] = {}
    for r in rows:
        if r.peer or r.ms is None:
            continue
        other = first.setdefault((r.who.split()[0], r.batch, r.context), r)
        if other is not r and other.ms is not None:
            yield f"{r.who} at {r.context:,} tokens: {r.ms / other.ms:.2f} of {other.who}'s time"


def _beside_llama(rows: Sequence[CostRow]) -> Iterator[str]:
    """Each of ours beside llama.cpp at its best, by context."""
    from haarkv.benchmarks.decode_peers import LLAMA

    for r in rows:
        theirs = [(p.ms, p.who) for p in rows if p.who.startswith(LLAMA) and p.context == r.context and p.ms is not None]
        if theirs and r.ms is not None and not r.peer:
            ms, who = min(theirs)
            yield f"{r.who} at {r.context:,} tokens: {ms / r.ms:.2f} times as fast as {who}, the fastest of llama.cpp's"


def _cells(r: CostRow, peer: float | None) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    form = {"prompt": ".0f", "step": ".2f"}.get(r.kind, ".3f")
    return (
        str(r.batch), str(r.context), r.who, shown(r.ms, form),
        "–" if r.ms is None else f"{r.low:{form}} … {r.high:{form}}",
        shown(r.tokens_per_s, ".1f") if r.kind == "prompt" else shown(r.ms_per_token, form),
        shown(peer / r.ms if peer and r.ms else None, ".2f"), f"{r.cost.weights / 1e6:.1f}", f"{r.cost.kv / 1e6:.2f}",
        shown(r.gbps, ".1f"), shown(r.of_copy, ".0%"), f"{r.floor_ms:{form}}", shown(r.of_floor, ".2f"),
    )  # fmt: skip
