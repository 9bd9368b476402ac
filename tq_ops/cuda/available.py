"""Whether the Triton kernels can run here, on how many processors and of which kind, and launching them."""

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
_INTERPRETED_PROCESSORS, _INTERPRETED_CAPABILITY = 4, 90
_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


def triton_missing() -> str | None:
    """None, or in one sentence why the kernels cannot be compiled: an older torch brings a Triton that lacks what they use."""
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'haarkv[cuda]'"
    try:
        found = version("triton")
    except PackageNotFoundError:  # A nightly build, by another name.
        return None
    if tuple(int(part) for part in found.split(".")[:2]) >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"Triton is {found} and the kernels need {oldest}, which torch 2.11 brings; install a newer torch"


def unavailable() -> str | None:
    """None, or in one sentence why not."""
    if reason := triton_missing():
        return reason
    import triton

    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run in Triton's interpreter"


@cache
def processors(device: torch.device) -> int:
    """Processors of a GPU."""
    # The interpreter runs programs one after the other; a few are enough to test that splits are merged.
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU, 90 for 9.0; in the interpreter that of an H100."""
    if device.type != "cuda":
        return _INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """`kernel[grid]`; within `compiled_ahead` a call that has the kernel compiled for its arguments and launches nothing."""
    return partial(kernel.warmup, grid=grid) if only_compiles() else kernel[grid]


def only_compiles() -> bool:
    """Whether nothing is to be launched now."""
    return _compiles.get()


@contextmanager
def compiled_ahead(on_kernels: Callable[[int], object]) -> Iterator[None]:
    """Launches within compile their kernels, all at once, and compute nothing; it is over when all are compiled.

    What does not compile is left to the launch that needs it, whose error it is.

    Args:
        on_kernels: called with how many there are before they are waited for.
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
