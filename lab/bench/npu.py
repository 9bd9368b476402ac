"""Decode attention of an NPU in PyPTO's cost model: `tq4` in the rotated domain, the published way, and bf16.

The cycles are simulated, for one Ascend 910B; they compare designs and are no latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from haarkv.benchmarks.cases import heads
from haarkv.benchmarks.report import Report, Table
from haarkv.models.catalog import read_config
from lab.bench import plots
from lab.npu.attention import VARIANTS as VARIANTS
from lab.npu.attention import AttentionProgram, pipe_shares
from lab.npu.cost import CostSimulator

MODEL, LONGEST_STEP = "random:14b", 2048
_PIPES = ("cube", "vector", "load", "store")
_TITLE = "decode attention of one Qwen3-14B layer, simulated on an Ascend 910B (compare designs; not a latency)"


@dataclass(frozen=True)
class Point:
    """One simulated run of a variant: cycles and tasks of the whole scope, bytes of K and V that it must read once.

    Attributes:
        pipes: share of all cycles in which the average pipe of a kind is busy, in percent.
        seconds: that the simulation took.
    """

    variant: str
    batch: int
    context: int
    cycles: int
    tasks: int
    kv_bytes: int
    pipes: dict[str, float]
    seconds: float


def measure(
    contexts: Sequence[int], batches: Sequence[int], variants: Sequence[str], on_turn: Callable[[str], None] = lambda _: None
) -> Iterator[Point]:
    """Simulate every combination at the 14B shape, the cheap ones first; refused without PyPTO."""
    shape = heads(read_config(MODEL))
    with CostSimulator() as simulator:
        for context, batch in ((c, b) for c in sorted(contexts) for b in sorted(batches)):
            # A step is masked and not cut, so a short context wants a program of short steps; a power of two fits the cube.
            step = max(128, min(LONGEST_STEP, 1 << (context - 1).bit_length()))
            for variant in variants:
                on_turn(f"{variant}, batch {batch}, {context:,} tokens")
                program = AttentionProgram.tuned(variant, shape.q, shape.kv, step)
                cost = simulator.cost(program, program.blank_call(batch, context))
                kv_bytes, pipes = program.kv_bytes(batch, context), pipe_shares(cost.report)
                yield Point(variant, batch, context, cost.cycles, cost.tasks, kv_bytes, pipes, cost.seconds)


def report(points: Sequence[Point]) -> Report:
    """What was simulated; each variant beside bf16."""
    bf16 = {(p.batch, p.context): p.cycles for p in points if p.variant == "bf16"}
    cells = []
    for p in points:
        base = bf16.get((p.batch, p.context))
        cells.append((
            str(p.context), str(p.batch), p.variant, f"{p.cycles:,}", f"{p.cycles / base:.2f}" if base else "–", str(p.tasks),
            f"{p.kv_bytes / 2**20:.1f}", *(f"{p.pipes.get(pipe, 0):.1f}" for pipe in _PIPES),
        ))  # fmt: skip
    columns = ("context", "batch", "variant", "cycles", "of bf16", "tasks", "KV MiB", *(f"{pipe} %" for pipe in _PIPES))
    values = {"points": [asdict(p) for p in points]}
    contexts, variants = dict.fromkeys(p.context for p in points), dict.fromkeys(p.variant for p in points)
    return Report("npu_attention", MODEL, list(contexts), list(variants), values, [Table(_TITLE, columns, cells)])


def svg(points: Sequence[Point]) -> str:
    """Cycles by context, one panel a batch size."""
    panels = []
    for batch in sorted({p.batch for p in points}):
        lines = {v: {p.context: float(p.cycles) for p in points if (p.variant, p.batch) == (v, batch)} for v in VARIANTS}
        drawn = {name: line for name, line in lines.items() if line}
        panels.append(plots.Panel(f"batch {batch}", "tokens in the cache", "simulated cycles", drawn, frozenset({"bf16"})))
    return plots.svg("Decode attention of one Qwen3-14B layer, simulated (relative, no latency)", panels)
