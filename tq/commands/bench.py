"""`tq bench`: measurements that you can repeat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq.commands.bench_decode import decode, ops, prefill
from tq.options import Numbers, json_option
from tq.output import err, print_table

if TYPE_CHECKING:
    from haarkv.benchmarks.npu_attention import Point


@click.group("bench")
def command() -> None:
    """Measure what executors cost."""


command.add_command(decode)
command.add_command(prefill)
command.add_command(ops)


@command.command("npu")
@click.option("--contexts", type=Numbers(), default="512,1024,2048,4096,8192", show_default=True, help="Tokens in the cache.")
@click.option("--batches", type=Numbers(), default="1,8", show_default=True, help="Sequences at once.")
@click.option("--variant", "variants", multiple=True, help="A design to simulate; repeatable [default: all].")
@click.option("--save", is_flag=True, help="Save each point in benchmarks/results; skip points saved before.")
@click.option("--plot", "plot_file", metavar="FILE", type=click.Path(path_type=Path), help="Draw cycles by context, as SVG.")
@json_option
def npu(
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    variants: tuple[str, ...],
    save: bool,
    plot_file: Path | None,
    as_json: bool,
) -> None:
    """Count the cycles of decode attention at Qwen3-14B's shape, in PyPTO's cost model of an Ascend 910B.

    The cycles are simulated. Use them to compare designs, not as latencies. A point takes seconds to minutes.
    """
    from haarkv.benchmarks import npu_attention, npu_plot
    from haarkv.tq_ops.output_files import check_writable, write_whole

    unknown = set(variants) - set(npu_attention.VARIANTS)
    if unknown:
        raise click.UsageError(f"no such variant: {unknown.pop()}; choose from {', '.join(npu_attention.VARIANTS)}")
    if plot_file is not None:
        npu_plot.require_matplotlib()
        check_writable(plot_file)
    chosen = variants or tuple(npu_attention.VARIANTS)
    known = npu_attention.saved() if save else []
    with _progress(len(contexts) * len(batches) * len(chosen)) as begin:
        points = list(npu_attention.measure(contexts, batches, chosen, known=known, save=save, on_begin=begin))
    if plot_file is not None:
        write_whole(plot_file, npu_plot.svg(points))
    if as_json:
        print(json.dumps({"points": [vars(point) for point in points]}))
        return
    _print(points)


def _print(points: Sequence[Point]) -> None:
    bf16 = {(p.batch, p.context): p.cycles for p in points if p.variant == "bf16"}
    rows = []
    for p in points:
        against = bf16.get((p.batch, p.context))
        rows.append((
            str(p.context), str(p.batch), p.variant, f"{p.cycles:,}", f"{p.cycles / against:.2f}" if against else "–",
            str(p.tasks), f"{p.kv_bytes / 2**20:.1f}", *(f"{p.pipes.get(pipe, 0):.1f}" for pipe in _PIPES),
        ))  # fmt: skip
    columns = ("context", "batch", "variant", "cycles", "of bf16", "tasks", "KV MiB", *(f"{pipe} %" for pipe in _PIPES))
    print_table(
        "decode attention of one Qwen3-14B layer, simulated on an Ascend 910B (compare designs; not a latency)", columns, rows
    )


_PIPES = ("cube", "vector", "load", "store")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that names the current point; silent when stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, disable=not err().is_terminal) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda variant, batch, context: bar.update(
            task, description=f"{variant}, batch {batch}, {context:,} tokens", advance=1
        )
