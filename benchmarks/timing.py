"""Fair timing: variants take turns, caches are cold, medians with their spread, and what the machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20  # more than any cache holds, of a CPU or of a GPU
_COPY_BYTES = 512 * 2**20
_MATRIX = 1024
_REST_S = 0.03  # threads of OpenMP spin for up to 20 ms after a loop
_TURN_RUNS = 5
MOST_COPIES = 64
"""Of a layer, that take turns: as many layers as there are rotations. As many runs make a captured turn."""

OnTurn = Callable[[str], None]
"""Told the name of what is timed next."""


@dataclass(frozen=True)
class Spread:
    """Times of one variant in milliseconds: median, fastest and slowest turn.

    Attributes:
        first_ms: wall time of the very first call, which may compile or capture; it counts in none of the others.
    """

    ms: float
    low: float
    high: float
    first_ms: float | None = field(default=None, compare=False)

    def over(self, runs: int) -> Spread:
        """Milliseconds of one run, where each turn timed `runs` of them."""
        return Spread(self.ms / runs, self.low / runs, self.high / runs)


def spread(seconds: list[float]) -> Spread:
    """Median and extremes in milliseconds."""
    return Spread(1e3 * statistics.median(seconds), 1e3 * min(seconds), 1e3 * max(seconds))


def accelerator(device: torch.device) -> Any:
    """Torch's own module of a device beside the host (`torch.cuda`, `torch.npu`), with its events; None on the host."""
    return None if device.type == "cpu" else getattr(torch, device.type)


def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What times one call in seconds: a device's own events there, so that nothing queued before leaks in; wall time here."""
    module = accelerator(device)

    def on_host(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def on_device(run: Callable[[], object]) -> float:
        with module.device(device):
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return on_host if module is None else on_device


def flusher(device: torch.device) -> Callable[[], None]:
    """A call after which no cache holds anything of use, and the device has nothing left to do."""
    buffer, module = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device), accelerator(device)

    def flush() -> None:
        buffer.add_(1)
        if module is not None:
            module.synchronize(device)

    return flush


def take_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int, warm_up: int = 2, cold: bool = True,
    on_turn: OnTurn = lambda _: None,
) -> dict[str, Spread]:  # fmt: skip
    """Time variants one after the other, so that what disturbs the machine disturbs them alike.

    Args:
        repeats: turns that count, after `warm_up` that do not.
        cold: empty the caches before each call.
        on_turn: called with each variant's name before it runs.
    """
    timed, flush = clock(device), flusher(device) if cold else lambda: None
    times = {name: list[float]() for name in runs}
    first: dict[str, float] = {}
    for turn in range(-warm_up, repeats):
        for name, run in runs.items():
            on_turn(name)
            flush()
            began = time.perf_counter()
            taken = timed(run)
            first.setdefault(name, 1e3 * (time.perf_counter() - began))
            if turn >= 0:
                times[name].append(taken)
    return {name: replace(spread(seconds), first_ms=first[name]) for name, seconds in times.items()}


def take_rested_turns(
    runs: Mapping[str, Callable[[int], object]], device: torch.device, *, repeats: int, on_turn: OnTurn = lambda _: None
) -> dict[str, Spread]:
    """Time short variants in turns of five runs, for calls that find their data cold and all else warm.

    Before its turn a variant rests until the threads of the one before have gone to sleep, and runs once uncounted. Every run
    gets another number, to choose other data by. The first turn does not count. On a GPU a turn is one replay of many runs,
    captured as a graph: a launch takes the host longer than many a kernel runs. What no graph can hold is left out there.
    """
    if device.type == "cuda":
        graphs: dict[str, Callable[[], object]] = {}
        for name, run in runs.items():
            with suppress(RuntimeError):
                graphs[name] = captured(run, MOST_COPIES, device)
        taken = take_turns(graphs, device, repeats=repeats, cold=False, on_turn=on_turn)
        return {name: t.over(MOST_COPIES) for name, t in taken.items()}
    timed, times = clock(device), {name: list[float]() for name in runs}
    first: dict[str, float] = {}
    for turn in range(repeats + 1):
        begin = turn * (_TURN_RUNS + 1)
        for name, run in runs.items():
            on_turn(name)
            time.sleep(_REST_S)
            began = time.perf_counter()
            timed(partial(run, begin))
            first.setdefault(name, 1e3 * (time.perf_counter() - began))
            counted = [timed(partial(run, begin + number)) for number in range(1, _TURN_RUNS + 1)]
            times[name] += counted if turn else []
    return {name: replace(spread(seconds), first_ms=first[name]) for name, seconds in times.items()}


def captured(run: Callable[[int], object], runs: int, device: torch.device) -> Callable[[], object]:
    """Several runs in a row as one CUDA graph; each is called with its number."""

    def all_runs() -> None:
        for number in range(runs):
            run(number)

    aside: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        # What compiles, tunes or allocates once does so before the capture.
        for number in range(min(2, runs)):
            run(number)
    torch.cuda.current_stream(device).wait_stream(aside)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_runs()
    return graph.replay


@dataclass(frozen=True)
class Machine:
    """What bounds any kernel here, measured now: bytes that a copy reads and writes, operations of square matrix products."""

    copy_gbps: float
    fp32_gflops: float
    bf16_gflops: float

    def floor_ms(self, nbytes: float, flops: float) -> float:
        """No program that moves so many bytes and does so many operations is faster: the larger of both times."""
        return 1e3 * max(nbytes / (1e9 * self.copy_gbps), flops / (1e9 * max(self.fp32_gflops, self.bf16_gflops)))


def measure_machine(device: torch.device, repeats: int = 7) -> Machine:
    """Copy bandwidth and matrix throughput, best of some turns: a limit is what has been reached once."""
    timed = clock(device)
    source = torch.zeros(_COPY_BYTES // 4, dtype=torch.int32, device=device)
    target = torch.ones_like(source)
    matrices = {dtype: torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)}

    def best(run: Callable[[], object]) -> float:
        return min(timed(run) for _ in range(repeats))

    copied = best(lambda: target.copy_(source))
    flops = {dtype: 2 * _MATRIX**3 / best(partial(torch.matmul, x, x)) / 1e9 for dtype, x in matrices.items()}
    return Machine(2 * _COPY_BYTES / copied / 1e9, flops[torch.float32], flops[torch.bfloat16])
