"""Timing: variants take turns, medians with spread, and the machine's limits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

_COPY_BYTES = 256 * 2**20
_MATRIX = 1024
_REST_S = 0.03  # threads of OpenMP spin for up to 20 ms after a loop
_STEADY = 0.8
_ENOUGH_S = 60.0
"""Seconds of all variants after which no new turn begins."""
MOST_COPIES = 64
"""Most copies of a layer, as many as there are rotations; also runs of a captured turn."""

OnTurn = Callable[[str], None]
"""Called with the name of what is timed next."""
Run = Callable[[int], object]
"""One call, given its number; a float result is its time in seconds by another process's clock."""


@dataclass(frozen=True)
class Spread:
    """Times of one variant in ms: median, fastest and slowest of `runs`; `first_ms` is the first call's, in no figure."""

    ms: float
    low: float
    high: float
    runs: int = field(default=1, compare=False)
    first_ms: float | None = field(default=None, compare=False)


def clock(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Times one call in seconds, by a device's events or by wall time."""
    module: Any = None if device.type == "cpu" else getattr(torch, device.type)

    def on_host(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        result = run()
        return result if isinstance(result, float) else time.perf_counter() - began

    def on_device(run: Callable[[], object]) -> float:
        with module.device(device):
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return on_host if module is None else on_device


def take_turns(
    runs: Mapping[str, Run], device: torch.device, *, repeats: int, counted_runs: int = 1, capture: bool = False,
    on_turn: OnTurn = lambda _: None, before_turn: Callable[[], object] = lambda: None,
) -> dict[str, Spread]:  # fmt: skip
    """Time variants in turns, so that disturbances hit them alike.

    A variant rests before its turn until the previous one's threads sleep. The first turn does not count, nor the first of
    several runs. Each run gets a new number, to choose other data by.

    Args:
        repeats: turns that count; fewer if they take a minute.
        counted_runs: runs of a turn that count.
        capture: on a GPU, a turn replays a graph of many runs: launches take longer than many kernels. Runs that no graph can
            hold are left out.
        before_turn: called before every variant's rest.
    """
    timer, per_run = clock(device), 1
    if capture and device.type == "cuda":
        graphs: dict[str, Run] = {}
        for name, run in runs.items():
            with suppress(RuntimeError):
                graphs[name] = capture_graph(run, MOST_COPIES, device)
        runs, counted_runs, per_run = graphs, 1, MOST_COPIES
    times = {name: list[float]() for name in runs}
    first: dict[str, float] = {}
    number = 0
    for turn in range(repeats + 1):
        for name, run in runs.items():
            on_turn(name)
            before_turn()
            time.sleep(_REST_S)
            began = time.perf_counter()
            turn_times = [timer(partial(run, number))]
            first.setdefault(name, 1e3 * (time.perf_counter() - began))
            if counted_runs > 1:
                turn_times = [timer(partial(run, number + 1 + more)) for more in range(counted_runs)]
            times[name] += turn_times if turn else []
        number += 1 + counted_runs
        if sum(map(sum, times.values())) >= _ENOUGH_S:
            break
    ms = {name: [1e3 * seconds / per_run for seconds in durations] for name, durations in times.items()}
    return {n: Spread(statistics.median(x), min(x), max(x), len(x), first[n]) for n, x in ms.items()}


def capture_graph(run: Run, runs: int, device: torch.device) -> Run:
    """Several runs as one CUDA graph; each is called with its number."""
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
        for number in range(runs):
            run(number)
    return lambda _: graph.replay()


@dataclass(frozen=True)
class Machine:
    """Limits of this machine: bytes that a copy reads and writes, operations of square matrix products.

    Attributes:
        slowest: the slowest try of each limit, by its name; the limits are the best tries.
    """

    copy_gbps: float
    fp32_gflops: float
    bf16_gflops: float
    slowest: Mapping[str, float] = field(default_factory=dict)

    def floor_ms(self, nbytes: float, flops: float) -> float:
        """Least time for `nbytes` and `flops`."""
        return 1e3 * max(nbytes / (1e9 * self.copy_gbps), flops / (1e9 * max(self.fp32_gflops, self.bf16_gflops)))

    def unsteady(self) -> str:
        """Which limits moved by more than a quarter between tries, in one line; empty if none."""
        names = {"copy_gbps": "copy {:.1f} to {:.1f} GB/s", "fp32_gflops": "FP32 {:.0f} to {:.0f} GFLOP/s",
                 "bf16_gflops": "BF16 {:.0f} to {:.0f} GFLOP/s"}  # fmt: skip
        moved = [
            text.format(self.slowest[name], getattr(self, name))
            for name, text in names.items()
            if self.slowest.get(name, math.inf) < _STEADY * getattr(self, name)
        ]
        return f"the machine did not hold still: {', '.join(moved)}; floors take the best" if moved else ""


class Limits:
    """A machine's limits, the best of many tries spread over a run: the speed of shared cores changes within seconds."""

    def __init__(self, device: torch.device) -> None:
        timer = clock(device)
        source = torch.zeros(_COPY_BYTES // 4, dtype=torch.int32, device=device)
        target = torch.ones_like(source)
        fp32, bf16 = (torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
        flops = 2 * _MATRIX**3 / 1e9
        self._tries: dict[str, tuple[Callable[[], float], list[float]]] = {
            "copy_gbps": (lambda: 2 * _COPY_BYTES / timer(lambda: target.copy_(source)) / 1e9, []),
            "fp32_gflops": (lambda: flops / timer(lambda: fp32 @ fp32), []),
            "bf16_gflops": (lambda: flops / timer(lambda: bf16 @ bf16), []),
        }
        for rate, _ in self._tries.values():
            rate()  # touches memory and wakes threads

    def measure(self) -> None:
        """One try of each."""
        for rate, tries in self._tries.values():
            tries.append(rate())

    @property
    def machine(self) -> Machine:
        """The best and the slowest try so far."""
        if not next(iter(self._tries.values()))[1]:
            self.measure()
        best, slowest = ({name: pick(tries) for name, (_, tries) in self._tries.items()} for pick in (max, min))
        return Machine(**best, slowest=slowest)
