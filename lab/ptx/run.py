"""Runs a launch: some of its programs together, all their threads as vectors, by the smallest line first; then the next.

Threads that part at a branch run on in groups; the group that is furthest behind in the text runs next, and groups that meet
become one. A barrier holds a program's threads until all that have not returned are there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from lab.ptx.copies import Copies
from lab.ptx.memory import Fault, Memory
from lab.ptx.program import BARRIER, BRANCH, EXIT, PLAIN, WARP_BARRIER, Layout, Program, launch_layout, load_program
from lab.ptx.races import History, Races
from lab.ptx.state import Lanes, fresh, specials
from lab.ptx.syntax import Instruction, Unknown
from lab.ptx.warpgroup import Products

_TOGETHER = 4096
"""Threads that run together unless said otherwise."""


class LaunchFault(Exception):
    """A launch did what it must not; the message says which kernel, line of PTX, program and thread."""


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
    watch_count: int = 2,
    most_steps: int = 20_000_000,
) -> None:
    """Run a launch to its end; what it did is in the arrays that `memory` holds.

    Args:
        grid, block: up to three numbers, x first; a program has a multiple of 32 threads.
        args: one a parameter: an int (also an address of `Memory.place`), a float, a NumPy scalar, or bytes.
        shared_bytes: dynamic shared memory, beyond what the text declares.
        order: of the programs: `ascending`, the last axis of the grid fastest, `descending`, or `random`.
        together: programs that run in lockstep; as many as make some thousand threads unless given.
        watch_count: of these, how many have their shared memory watched for races.
        most_steps: instructions after which a launch is said not to end.
    Raises:
        LaunchFault: it did something that it must not.
        Unknown: the text holds something that is not known here.
    """
    whole_grid, whole_block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
    threads = whole_block[0] * whole_block[1] * whole_block[2]
    if threads % 32:
        raise Unknown(f"a program of {threads} threads, which is no multiple of 32")
    program, history = load_program(ptx_text, entry), History()
    layout = launch_layout(program, args, memory, shared_bytes)
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
            LockstepRun(program, layout, whole_grid, whole_block, memory, some, history, watch_count, most_steps).run()


class LockstepRun:
    """Some programs of a launch, run together."""

    def __init__(
        self, program: Program, layout: Layout, grid: tuple[int, int, int], block: tuple[int, int, int], memory: Memory,
        numbers: np.ndarray, history: History, watch_count: int, most_steps: int,
    ) -> None:  # fmt: skip
        threads, self.steps, self.name = block[0] * block[1] * block[2], program.steps, program.entry.name
        count, stride = threads * len(numbers), layout.shared_end + -layout.shared_end % 1024
        watch_mask = np.zeros(len(numbers), np.bool_)
        watch_mask[np.linspace(0, len(numbers) - 1, min(watch_count, len(numbers))).astype(np.int64)] = True
        self.numbers, self.most_steps, self.history, self.barriers = numbers, most_steps, history, program.barriers
        races = Races(history, watch_mask, numbers * threads, threads, stride * len(numbers))
        self.s = Lanes(
            count, threads, len(numbers), memory, fresh(program.entry, count), specials(block, grid, numbers), layout.symbols,
            layout.params, np.full(stride * len(numbers), 0xFF, np.uint8), stride, layout.shared_end,
            np.full((count, layout.local_bytes), 0xFF, np.uint8),
            np.ones(count, np.bool_), races=races, copies=Copies(count), products=Products(count), clock=history.clock,
        )  # fmt: skip
        self.waiting: dict[int, np.ndarray] = {}
        self.parked = np.full(count, -1)  # the line of the barrier at which a thread waits
        self.any_parked = False

    # -- Groups ---------------------------------------------------------------------------------------------------------
    def push(self, pc: int, mask: np.ndarray) -> None:
        if mask.any():
            self.waiting[pc] = self.waiting[pc] | mask if pc in self.waiting else mask

    def run(self) -> None:
        s, start = self.s, self.s.clock
        self.push(0, s.live.copy())
        while self.waiting:
            pc = min(self.waiting)
            mask = self.waiting.pop(pc)
            limit = min(self.waiting, default=len(self.steps))
            alone = not self.waiting and not self.any_parked
            s.activate(None if alone else mask)
            pc = self.straight(pc, mask, limit, alone)
            if s.clock - start > self.most_steps:
                raise LaunchFault(f"{self.name} does not end: {self.most_steps} instructions")
            if pc >= 0:
                self.push(pc, mask & s.live)
        if self.any_parked:
            lane = int(np.argmax(self.parked >= 0))
            self.fail(self.steps[self.parked[lane]].ins, Fault("waits at a barrier that others never reach", lane))
        self.history.clock = s.clock + 1

    def straight(self, pc: int, mask: np.ndarray, limit: int, alone: bool) -> int:
        """Run a group until it reaches another one, parts, or ends; the line where it goes on, or -1."""
        s, steps, regs = self.s, self.steps, self.s.regs
        end = s.clock + 100_000
        while pc < limit and s.clock < end:
            if pc >= len(steps):
                self.fail(steps[-1].ins, Fault("runs past the end", int(np.argmax(mask))))
            step = steps[pc]
            s.clock += 1
            guard = step.ins.guard
            try:
                if step.kind == PLAIN:
                    if guard is None:
                        step.run(s)
                    else:
                        taken_lanes = (~regs[guard[0]] if guard[1] else regs[guard[0]]) & mask
                        if taken_lanes.any():
                            s.activate(taken_lanes)
                            step.run(s)
                            s.activate(None if alone else mask)
                    pc += 1
                    continue
                taken_lanes = mask if guard is None else (~regs[guard[0]] if guard[1] else regs[guard[0]]) & mask
                if step.kind == BRANCH:
                    if not taken_lanes.any():
                        pc += 1
                    elif taken_lanes is mask or (taken_lanes == mask).all():
                        pc = step.target
                    else:
                        self.push(step.target, taken_lanes)
                        self.push(pc + 1, mask & ~taken_lanes)
                        return -1
                elif step.kind == BARRIER and alone and guard is None and step.expected is None:
                    s.races.barrier_time[mask] = s.races.warp_barrier_time[mask] = s.clock
                    pc += 1
                elif step.kind == WARP_BARRIER:
                    s.races.warp_barrier_time[taken_lanes] = s.clock
                    pc += 1
                elif step.kind == EXIT:
                    s.live &= ~taken_lanes
                    self.release()
                    if not (rest := mask & ~taken_lanes).any():
                        return -1
                    self.push(pc + 1, rest)
                    return -1
                else:
                    self.arrive(pc, taken_lanes)
                    self.push(pc + 1, mask & ~taken_lanes)
                    return -1
            except Fault as fault:
                self.fail(step.ins, fault)
        if pc >= len(steps) and limit >= len(steps):
            self.fail(steps[-1].ins, Fault("runs past the end", int(np.argmax(mask))))
        return pc

    # -- Barriers -------------------------------------------------------------------------------------------------------
    def arrive(self, pc: int, mask: np.ndarray) -> None:
        self.parked[mask] = pc
        self.any_parked = True
        self.release()

    def release(self) -> None:
        """Let go on those barriers at which everybody has arrived."""
        if not self.any_parked:
            return
        s = self.s
        for number in {self.steps[pc].barrier for pc in np.unique(self.parked[self.parked >= 0]).tolist()}:
            waiting = (self.parked >= 0) & (self.number_at() == number)
            by_program = waiting.reshape(s.programs, s.block)
            complete = by_program.sum(1) >= self.expected(waiting)
            complete &= by_program.any(1)
            free = waiting & np.repeat(complete, s.block)
            if free.any():
                self.require_same(free)
                s.races.barrier_time[free] = s.races.warp_barrier_time[free] = s.clock
                lines = self.parked[free]
                self.parked[free] = -1
                for pc in np.unique(lines).tolist():
                    mask = np.zeros(s.count, np.bool_)
                    mask[np.flatnonzero(free)[lines == pc]] = True
                    self.push(pc + 1, mask & s.live)
        self.any_parked = bool((self.parked >= 0).any())

    def number_at(self) -> np.ndarray:
        """[count], the number of the barrier at which each thread waits."""
        return self.barriers[np.maximum(self.parked, 0)]

    def expected(self, waiting: np.ndarray) -> np.ndarray:
        """[programs], how many threads a barrier waits for."""
        s = self.s
        thread_counts = s.live.reshape(s.programs, s.block).sum(1)
        first = np.argmax(waiting.reshape(s.programs, s.block), 1) + np.arange(s.programs) * s.block
        for program, lane in enumerate(first.tolist()):
            read = self.steps[self.parked[lane]].expected if waiting[lane] else None
            if read is not None:
                thread_counts[program] = np.broadcast_to(read(s), s.count)[lane]
        return thread_counts

    def require_same(self, free: np.ndarray) -> None:
        """A warp arrives at one barrier as a whole."""
        lines = np.where(free & self.s.live, self.parked, -1).reshape(-1, 32)
        most = lines.max(1, keepdims=True)
        strays = ((lines != most) & self.s.live.reshape(-1, 32) & (most >= 0)).reshape(-1)
        if strays.any():
            lane = int(np.argmax(strays))
            line = self.parked[lane] if self.parked[lane] >= 0 else int(most[lane // 32, 0])
            self.fail(self.steps[line].ins, Fault("the threads of a warp arrive at different barriers", lane))

    def fail(self, ins: Instruction, fault: Fault) -> None:
        where = f"{self.name}, line {ins.line} ({ins.name}{', .loc ' * bool(ins.source)}{ins.source})"
        if fault.lane is not None:
            where += f", program {self.numbers[fault.lane // self.s.block]}, thread {fault.lane % self.s.block}"
        raise LaunchFault(f"{where}: {fault.what}") from None
