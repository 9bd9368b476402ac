"""torch's own threads on a CPU: how they wait for work."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOOP = 2**17
"""Numbers that torch shares out among its threads; it leaves 2**15 to one."""


@contextmanager
def sleeping_threads() -> Iterator[None]:
    """Within this context, torch's threads sleep soon after a loop. Their number and every bit of a result stay the same.

    GCC's OpenMP (torch's on Linux) lets waiting threads spin for milliseconds. On a busy machine this takes the core from the
    thread that they wait for. With more OpenMP threads than processors, they spin a thousand times shorter (GOMP_SPINCOUNT).
    So this context starts enough additional threads, which sleep until it ends. Other OpenMPs are unaffected.
    """
    threads = torch.get_num_threads()
    if sys.platform != "linux" or threads == 1:
        yield
        return
    ready, done = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            # OpenMP gives each thread that runs a loop a separate team, which lasts as long as this thread.
            torch.set_num_threads(max(2, len(os.sched_getaffinity(0)) - threads + 2))
            torch.ones(_LOOP).neg_()
        finally:
            torch.set_num_threads(threads)  # a part of this setting is of the whole process
            ready.set()
        done.wait()

    holder = threading.Thread(target=hold, name="haarkv-sleeping-threads", daemon=True)
    holder.start()
    ready.wait()
    try:
        yield
    finally:
        done.set()
        holder.join()
