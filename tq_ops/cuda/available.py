"""Whether Triton's kernels can be compiled and run here; launching them, or compiling them ahead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

OLDEST_TRITON = (3, 6)
_INTERPRETED_PROCESSORS = 4  # programs run one after the other: few are enough to test that splits are merged
_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


def triton_missing() -> str | None:
    """None, or in one sentence why the kernels cannot be compiled: an older torch brings a Triton that lacks what they use."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'haarkv[cuda]'"
    try:
        triton_version = version("triton")
    except PackageNotFoundError:  # A nightly build, by another name.
        return None
    if tuple(int(part) for part in triton_version.split(".")[:2]) >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"Triton is {triton_version} and the kernels need {oldest}, which torch 2.11 brings; install a newer torch"


def unavailable() -> str | None:
    """None, or in one sentence why the kernels cannot run here."""
    if reason := triton_missing():
        return reason
    import triton

    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run in Triton's interpreter"


@cache
def processors(device: torch.device) -> int:
    """Processors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`, by which products and sums become one instruction; within `compiled_ahead` it only compiles."""
    call = partial(kernel.warmup, grid=grid) if only_compiles() else kernel[grid]
    return partial(call, enable_fp_fusion=True)  # Triton's own default up to 3.9 alone


def only_compiles() -> bool:
    """Whether `compiled_ahead` is open."""
    return _compiles.get()


@contextmanager
def compiled_ahead(on_kernels: Callable[[int], object]) -> Iterator[None]:
    """While it is open, launches only compile, in threads; it closes when all kernels are compiled.

    A kernel that does not compile raises in the launch that needs it. `on_kernels` gets their number before the wait.
    """
    import triton

    # Most of a compilation runs without Python's lock: two threads take 0.6 of the time of one.
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        token = _compiles.set(True)
        try:
            yield
        finally:
            _compiles.reset(token)
        if mode.future_kernels:
            on_kernels(len(mode.future_kernels))
