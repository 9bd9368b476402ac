"""Launching Triton's kernels, or only compiling what would be launched: several at once, before anyone waits for one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


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
    import triton  # not where kernels are only looked at: it may be missing there

    # Most of a compilation runs without Python's lock: two threads take 0.6 of the time of one.
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        token = _compiles.set(True)
        try:
            yield
        finally:
            _compiles.reset(token)
        if mode.future_kernels:
            on_kernels(len(mode.future_kernels))
