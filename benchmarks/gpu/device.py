"""The device of a run: what is measured on it, what it is, calls captured as graphs, and their times."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from haarkv.benchmarks.cases import Case
from haarkv.benchmarks.gpu.log import Log
from haarkv.benchmarks.report import header
from haarkv.benchmarks.timing import clock, measure_machine
from haarkv.executors.cuda import open_gpu
from haarkv.models.catalog import read_config
from haarkv.models.config import ModelConfig, dense_layers
from haarkv.tq_ops.cuda import nvrtc

Call = Callable[[int], object]
"""One call, told its number, to choose the data by."""
FORMAT, MODEL = "tq4", "random:14b"
_QUERIES = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "memory.total")
_PACKAGES = ("triton", "flashinfer-python", "flash-attn-3", "flash-attn", "nvidia-cudnn-cu13")


class Prompt(NamedTuple):
    """New tokens of one sequence, behind those that are stored already."""

    new: int
    stored: int


@dataclass(frozen=True)
class Sizes:
    """Shapes and cases of a run.

    Attributes:
        every_format: the cases in which each format that the kernels read is timed; the others take `tq4` alone.
        cold_bytes: so many bytes take turns, far more than a cache holds, in `most_copies` of K and V at most.
        warm_up, repeats: turns that do not count, and turns that do.
        dry: in Triton's interpreter, on the CPU.
    """

    config: ModelConfig
    attention: Sequence[Case]
    append: Sequence[Case]
    prefill: Sequence[Prompt]
    steps: Sequence[Case]
    every_format: Sequence[Case]
    cold_bytes: int = 256 * 2**20
    most_copies: int = 64
    warm_up: int = 2
    repeats: int = 11
    dry: bool = False


FULL = Sizes(
    read_config(MODEL),
    attention=[Case(batch, context) for batch in (1, 8, 32) for context in (1024, 4096, 16384, 32768)],
    append=[Case(1, 1), Case(8, 1), Case(32, 1), Case(1, 2048)],
    prefill=[Prompt(2048, 0), Prompt(2048, 32768)],
    steps=[Case(1, 4096), Case(8, 4096), Case(8, 32768)],
    every_format=[Case(1, 4096), Case(8, 32768)],
)
DRY = Sizes(
    replace(
        FULL.config, hidden_size=64, vocab_size=61, max_position_embeddings=512,
        layers=dense_layers(1, num_heads=2, num_kv_heads=1, head_dim=128, intermediate_size=64, head_norms=True),
    ),
    attention=[Case(2, 32)], append=[Case(2, 1)], prefill=[Prompt(8, 16)], steps=[Case(2, 32)], every_format=[],
    cold_bytes=2**14, most_copies=2, warm_up=0, repeats=1, dry=True,
)  # fmt: skip


def device_of(sizes: Sizes) -> torch.device:
    """The first GPU, which must be there, or the CPU in a rehearsal."""
    return torch.device("cpu") if sizes.dry else open_gpu(None)


def facts(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """What every figure depends on, under the header of all benchmarks; what cannot be read is left out."""
    found = header("gpu", MODEL, sorted({case.context for case in sizes.attention}), [FORMAT], _PACKAGES)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}", "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda,
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
            "cuda_cpp": nvrtc.missing() or "NVRTC compiles the decode kernel",
        }  # fmt: skip
        if tool := shutil.which("nvidia-smi"):
            command = [tool, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
            try:
                said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
                found |= dict(zip(_QUERIES, said.splitlines()[0].split(", "), strict=True))
            except (OSError, subprocess.SubprocessError, ValueError, IndexError):
                pass  # the driver's own tool refuses: the other facts stand
    return found


def copies(nbytes: float, sizes: Sizes) -> int:
    """How many copies of data of so many bytes take turns, so that none of it is in a cache when its turn comes again."""
    return max(1, min(sizes.most_copies, math.ceil(sizes.cold_bytes / nbytes)))


def captured(call: Call, calls: int, device: torch.device) -> Callable[[], object]:
    """So many calls in a row as one graph, which takes what the GPU takes; as they are where there is no GPU."""

    def all_calls() -> None:
        for number in range(calls):
            call(number)

    if device.type != "cuda":
        return all_calls
    aside: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        # What compiles, tunes or allocates once does so before the capture.
        for number in range(min(2, calls)):
            call(number)
    torch.cuda.current_stream(device).wait_stream(aside)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    return graph.replay


def time_of(run: Callable[[], object], calls: int, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Median, least and most microseconds of one of the `calls` that a run makes."""
    timed = clock(device)
    taken = [1e6 * timed(run) / calls for _ in range(sizes.warm_up + sizes.repeats)][sizes.warm_up :]
    return {"us": statistics.median(taken), "low_us": min(taken), "high_us": max(taken)}


def measure(log: Log, device: torch.device, sizes: Sizes) -> None:
    """The part of the machine itself: what it is, and what it does at best."""
    if log.wants("facts"):
        with log.attempt("facts") as row:
            row |= facts(device, sizes)
    if log.wants("best"):
        with log.attempt("best") as row:
            row |= vars(measure_machine(device, 1 if sizes.dry else 7))
