"""Runs a launch: some of its programs together, then the next."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from lab.ptx.memory import Memory
from lab.ptx.program import compiled, layout_of
from lab.ptx.races import History
from lab.ptx.syntax import Unknown
from lab.ptx.together import LaunchFault, Together

__all__ = ["LaunchFault", "execute"]
_TOGETHER = 4096
"""Threads that run together unless said otherwise."""


def execute(
    ptx_text: str,
    entry: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[object],
    memory: Memory,
    shared_bytes: int = 0,
    *,
    order: str = "ascending",
    together: int | None = None,
    watched: int = 2,
    most_steps: int = 20_000_000,
) -> None:
    """Run a launch to its end; what it did is in the arrays that `memory` holds.

    Args:
        grid, block: up to three numbers, x first; a program has a multiple of 32 threads.
        args: one a parameter: an int (also an address of `Memory.place`), a float, a NumPy scalar, or bytes.
        shared_bytes: dynamic shared memory, beyond what the text declares.
        order: of the programs: `ascending`, the last axis of the grid fastest, `descending`, or `random`.
        together: programs that run in lockstep; as many as make some thousand threads unless given.
        watched: of these, how many have their shared memory watched for races.
        most_steps: instructions after which a launch is said not to end.
    Raises:
        LaunchFault: it did something that it must not.
        Unknown: the text holds something that is not known here.
    """
    whole_grid, whole_block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
    threads = whole_block[0] * whole_block[1] * whole_block[2]
    if threads % 32:
        raise Unknown(f"a program of {threads} threads, which is no multiple of 32")
    program, history = compiled(ptx_text, entry), History()
    layout = layout_of(program, args, memory, shared_bytes)
    # The last axis fastest: programs that differ in it alone, such as the splits of one context, take equally long.
    numbers = np.arange(int(np.prod(whole_grid))).reshape(whole_grid[::-1]).transpose(2, 1, 0).ravel().tolist()
    if order == "descending":
        numbers.reverse()
    elif order == "random":
        random.Random(0).shuffle(numbers)
    elif order != "ascending":
        raise ValueError(order)
    size = together or max(1, _TOGETHER // threads)
    with np.errstate(all="ignore"):
        for begin in range(0, len(numbers), size):
            some = np.array(numbers[begin : begin + size])
            Together(program, layout, whole_grid, whole_block, memory, some, history, watched, most_steps).run()
