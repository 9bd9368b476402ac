"""Decode attention of an NPU in PyPTO's cost model: `tq4` in the rotated domain, the published way, and bf16.

The cycles are simulated, for one Ascend 910B; they compare designs and are no latency.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from haarkv.benchmarks.report import RESULTS, emit
from haarkv.models.catalog import read_config
from haarkv.tq_ops.npu import scopes
from haarkv.tq_ops.npu.scopes import VARIANTS, AttentionProgram
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator, pipe_shares

NAME = "npu_attention"
LONGEST_STEP = 2048
CONTEXTS, BATCHES = (512, 1024, 2048, 4096, 8192), (1, 8)


@dataclass(frozen=True)
class Point:
    """One simulated run.

    Attributes:
        variant: of `tq_ops.npu.scopes.VARIANTS`.
        cycles, tasks: of the whole scope, all heads and sequences.
        kv_bytes: of codes, scales or values that it must read once.
        pipes: share of all cycles in which the average pipe of a kind is busy, in percent.
        seconds: that the simulation took.
        program: SHA-256 over the kernel's sources, so that old figures are known as such.
    """

    variant: str
    batch: int
    context: int
    cycles: int
    tasks: int
    kv_bytes: int
    pipes: dict[str, float]
    seconds: float
    program: str


def program_hash() -> str:
    """Of every source that decides what is costed."""
    folder = Path(scopes.__file__).parent
    kernels = (f"kernels/{name}.py" for name in ("attention", "attention_kernel", "side", "sides", "bf16", "tq4"))
    names = ("scopes.py", "sides.py", *kernels)
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()[:12]


def saved() -> list[Point]:
    """Points of this very program in the results file, the newest of each."""
    path = RESULTS / f"{NAME}.jsonl"
    if not path.exists():
        return []
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        point = Point(**{field: row[field] for field in Point.__dataclass_fields__})
        if point.program == program_hash():
            found[point.variant, point.batch, point.context] = point
    return list(found.values())


def measure(
    contexts: Sequence[int],
    batches: Sequence[int],
    variants: Sequence[str],
    *,
    known: Sequence[Point] = (),
    save: bool = False,
    on_begin: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Point]:
    """Simulate every combination at the 14B shape, the cheap ones first.

    Args:
        known: points that need no new run.
        save: append each new point to the results as it comes.
        on_begin: called with (variant, batch, context) before a run.
    Raises:
        InputError: PyPTO is missing.
        SimulatorError: a program does not compile.
    """
    done = {(p.variant, p.batch, p.context): p for p in known}
    with Simulator() as simulator:
        for context in sorted(contexts):
            for batch in sorted(batches):
                for variant in variants:
                    on_begin(variant, batch, context)
                    point = done.get((variant, batch, context))
                    if point is None:
                        point = _run(simulator, variant, batch, context)
                        if save:
                            emit(NAME, asdict(point), save=True, echo=False)
                    yield point


def _run(simulator: Simulator, variant: str, batch: int, context: int) -> Point:
    # A step is masked and not cut, so that a short context wants a program of short steps; a power of two fits the cube.
    step = max(128, min(LONGEST_STEP, 1 << (context - 1).bit_length()))
    shape = read_config("random:14b")
    program = AttentionProgram.tuned(variant, shape.num_heads, shape.num_kv_heads, step)
    run = simulator.run(program, program.blank_call(batch, context), Mode.COST)
    assert run.cycles is not None
    return Point(
        variant, batch, context, run.cycles, len(run.tasks), program.kv_bytes(batch, context), pipe_shares(run.report),
        run.seconds, program_hash(),
    )  # fmt: skip


__all__ = ["BATCHES", "CONTEXTS", "LONGEST_STEP", "NAME", "VARIANTS", "Point", "measure", "program_hash", "saved"]
