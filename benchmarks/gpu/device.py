"""The device of a run: what it is, calls captured as graphs, and their times."""

from __future__ import annotations

import math
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from haarkv.benchmarks.gpu.log import Log
from haarkv.benchmarks.gpu.sizes import Sizes
from haarkv.benchmarks.report import machine as host
from haarkv.benchmarks.timing import clock, measure_machine
from haarkv.executors.cuda import open_gpu
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cuda import nvrtc

Call = Callable[[int], object]
"""One call, told its number, to choose the data by."""

_QUERIES = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "memory.total")
_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn-3", "flash-attn", "nvidia-cudnn-cu13")


def device_of(sizes: Sizes) -> torch.device:
    """The first GPU, or the CPU in a rehearsal.

    Raises:
        InputError: there is no GPU.
    """
    return torch.device("cpu") if sizes.dry else open_gpu(None)


def facts(device: torch.device) -> dict[str, Any]:
    """What every figure depends on; what cannot be read is left out, or says why."""
    found: dict[str, Any] = {**host(), "python": platform.python_version(), "packages": _versions()}
    try:
        found["cpu_kernels"] = sorted(library.isas())
    except library.KernelsMissingError as error:
        found["cpu_kernels"] = str(error)  # none of the figures needs them
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
            "cuda": torch.version.cuda,
            "cuda_cpp": nvrtc.missing() or "NVRTC compiles the decode kernel",
        }
        found |= _asked()
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _asked() -> dict[str, str]:
    """What the driver's own tool says; nothing where it is not there or refuses."""
    if not (tool := shutil.which("nvidia-smi")):
        return {}
    command = [tool, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = (said.splitlines() or [""])[0].split(", ")
    return dict(zip(_QUERIES, values, strict=False)) if len(values) == len(_QUERIES) else {}


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


def copying(nbytes: float, device: torch.device, sizes: Sizes) -> tuple[Call, int]:
    """A plain copy that moves so many bytes in all, half of them read and half written; and how many copies take turns."""
    count = copies(nbytes, sizes)
    source = torch.ones(count, max(1, int(nbytes / 2)), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return (lambda number: target[number % count].copy_(source[number % count])), count


def measure(log: Log, device: torch.device, sizes: Sizes) -> None:
    """The part of the machine itself: what it is, and what it does at best."""
    if log.wants("facts"):
        with log.attempt("facts") as row:
            row |= facts(device)
    if log.wants("best"):
        with log.attempt("best") as row:
            row |= vars(measure_machine(device, 1 if sizes.dry else 7))
