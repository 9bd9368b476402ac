"""`tq bench decode` and `tq bench ops`: what a decode step costs here, and what it must cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq.options import Numbers
from tq.output import err, loading, print_table

if TYPE_CHECKING:
    from haarkv.benchmarks.decode import Request
    from haarkv.benchmarks.decode_cost import CostRow
    from haarkv.benchmarks.ops import OpRow
    from haarkv.benchmarks.timing import Machine

_OPTIONS = (
    click.option("--model", default="random:0.6b", show_default=True, help="tiny, a Hugging Face folder, or random:SIZE."),
    click.option("--executor", "executors", multiple=True, default=["cpu"], show_default=True, help="Repeat it."),
    click.option("--kv", "kvs", multiple=True, metavar="LIST", help="Formats, commas between [default: bf16,tq4]."),
    click.option("--contexts", type=Numbers(), default="1024,4096", show_default=True, help="Tokens in the cache."),
    click.option("--batches", type=Numbers(), default="1", show_default=True),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True),
    click.option("--layers", type=int, help="For random:SIZE: how many of its layers to build."),
    click.option("--device", "--provider", help="Where executors other than the reference run."),
    click.option("--threads", type=click.IntRange(min=1), help="CPU threads."),
    click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Turns that count."),
    click.option("--save", is_flag=True, help="Append the JSON line to benchmarks/results."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
)


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("decode")
@_options
@click.option(
    "--only", "kind", type=click.Choice(["attention", "step"]), help="Attention alone, or whole steps [default: both]."
)
@click.option("--peers/--no-peers", default=True, show_default=True, help="torch's SDPA and transformers' caches beside ours.")
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(path_type=Path), help="Draw time by context, as SVG.")
@click.option("--isa", metavar="NAME", help="Instruction set of the CPU kernels, as avx512 [default: the best].")
def decode(kind: str | None, peers: bool, plot_file: Path | None, **given: Any) -> None:
    """Decode latency by context, batch, executor and format: attention of one layer, and whole steps.

    Every variant of a case holds the same K and V and takes turns with the others. The floor is what this machine allows,
    measured in the same run: bytes at the speed of a copy, or operations at that of a matrix product, whichever takes longer.
    """
    from haarkv.benchmarks import decode_plot
    from haarkv.benchmarks.decode import measure
    from haarkv.benchmarks.report import emit
    from tq.files import check_writable, write_whole

    if plot_file is not None:
        decode_plot.require_matplotlib()
        check_writable(plot_file)
    request = _request(given, kinds=[kind] if kind else ["attention", "step"], peers=peers, isa=given["isa"])
    with loading(request.model) as progress, _turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    if plot_file is not None:
        write_whole(plot_file, decode_plot.svg(rows, f"{request.model}, {request.dtype}"))
    if not given["as_json"]:
        _print(request, machine, rows)
    emit("decode", _line(request, machine, rows), save=given["save"])


@click.command("ops")
@_options
def ops(**given: Any) -> None:
    """Quantizing, storing and attending, one layer at a time, for one new token and for a chunk of 64."""
    from haarkv.benchmarks.ops import measure
    from haarkv.benchmarks.report import emit

    request = _request(given)
    with loading(request.model) as progress, _turning() as on_turn:
        machine, rows = measure(request, progress, on_turn)
    if not given["as_json"]:
        columns = ("op", "who", "batch", "context", "new", "ms", "low … high")
        cells = [
            (r.op, r.who, str(r.batch), str(r.context), str(r.new_tokens), f"{r.ms:.3f}", f"{r.low:.3f} … {r.high:.3f}")
            for r in rows
        ]
        title = f"{request.model}, {request.dtype}: ops of one layer, caches cold, median of {request.repeats}"
        print_table(title, columns, cells)
    emit("ops", _line(request, machine, rows), save=given["save"])


def _line(request: Request, machine: Machine, rows: Sequence[CostRow] | Sequence[OpRow]) -> dict[str, Any]:
    settings = {
        "model": request.model,
        "dtype": request.dtype,
        "layers": request.layers,
        "repeats": request.repeats,
        "isa": request.isa,
    }
    return settings | {"machine": asdict(machine), "rows": [r.as_json() for r in rows]}


def _request(given: dict[str, Any], **more: Any) -> Request:
    import torch

    from haarkv.benchmarks.decode import Request
    from haarkv.validation.fidelity.setup import parse_list

    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    names = ("model", "executors", "contexts", "batches", "dtype", "layers", "device", "repeats")
    return Request(kvs=parse_list(given["kvs"]) or ["bf16", "tq4"], **{name: given[name] for name in names}, **more)


@contextmanager
def _turning() -> Iterator[Callable[[str], None]]:
    """Says on a terminal's stderr what is being timed."""

    def on_turn(who: str) -> None:
        if err().is_terminal:
            print(f"\r\x1b[Ktiming {who}", end="", file=sys.stderr, flush=True)

    try:
        yield on_turn
    finally:
        if err().is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(request: Request, machine: Machine, rows: Sequence[CostRow]) -> None:
    limits = (
        f"copy {machine.copy_gbps:.1f} GB/s, FP32 {machine.fp32_gflops:.0f} GFLOP/s, BF16 {machine.bf16_gflops:.0f} GFLOP/s"
    )
    titles = {
        "attention": "decode attention of one layer, K and V from memory",
        "store": "storing one new token in one layer",
        "step": "whole decode step",
    }
    for kind, title in titles.items():
        chosen = [r for r in rows if r.kind == kind]
        if not chosen:
            continue
        cells = [_cells(r, _best_peer(chosen, r)) for r in chosen]
        columns = (
            "batch", "context", "who", "ms", "low … high", "speed-up", "weights MB", "KV MB", "GB/s", "of copy", "floor ms",
            "× floor",
        )  # fmt: skip
        print_table(f"{request.model}, {request.dtype}: {title}, median of {request.repeats}; {limits}", columns, cells)
        for note in dict.fromkeys(f"{r.who}: {r.note}" for r in chosen if r.note):
            print(note)
    print(
        "speed-up: over the fastest peer of the same case; floor: the longer of its bytes at a copy's speed and its operations"
    )


def _best_peer(rows: Sequence[CostRow], like: CostRow) -> float | None:
    """Fastest of the others' times in a row's case."""
    times = [r.ms for r in rows if (r.batch, r.context) == (like.batch, like.context) and r.peer and r.ms is not None]
    return min(times, default=None)


def _cells(r: CostRow, peer: float | None) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return (
        str(r.batch), str(r.context), r.who, shown(r.ms, ".3f"), "–" if r.ms is None else f"{r.low:.3f} … {r.high:.3f}",
        shown(peer / r.ms if peer and r.ms else None, ".2f"), f"{r.cost.weights / 1e6:.1f}", f"{r.cost.kv / 1e6:.2f}",
        shown(r.gbps, ".1f"), shown(r.of_copy, ".0%"), f"{r.floor_ms:.3f}", shown(r.of_floor, ".2f"),
    )  # fmt: skip
