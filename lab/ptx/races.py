"""Who wrote and read which byte, and whether a barrier stood between: races in shared and in global memory.

Threads run in lockstep here, which hides a missing barrier. So what counts is not when an access happened, but whether
anything ordered it. Shared memory: an access races with another thread's if neither a barrier of the program nor one of
the warp came between. Global memory: within a program likewise; between programs only an atomic operation after a fence
orders them. A value written over an equal one is no race. Reads of global memory are not remembered: a program that reads
what a later one writes is found when programs run in the other order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.ptx.memory import SHARED_AT, Fault, Window, far
from lab.ptx.state import Lanes

_NOBODY, _MANY = -1, -2


@dataclass
class _LastWrites:
    """Of a global array's bytes: the thread that wrote last, plus 1, and when."""

    thread: np.ndarray
    time: np.ndarray


@dataclass
class _Release:
    """What an atomic operation of a program made visible: its thread, when, and when all its threads last met and fenced."""

    program: int
    thread: int
    time: int
    barrier_time: int
    fence_time: np.ndarray


def _nearly(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether bytes [n, width] are float32 that differ in their last bits only.

    Threads that shuffle a sum together with `fma` each add in an order of their own, and so differ in the last bit. Triton
    lets all of them store their copy at once, and any may win.
    """
    if one.shape[1] % 4:
        return False
    a, b = (np.ascontiguousarray(x).view(np.float32) for x in (one, other))
    return bool((np.abs(a - b) <= 1e-5 * np.maximum(np.abs(a), np.abs(b)) + 1e-7).all())


class History:
    """What outlasts the programs that run together: global memory's last writers, and releases by address."""

    def __init__(self) -> None:
        self.last_writes: dict[int, _LastWrites] = {}
        self.releases: dict[tuple[int, int], list[_Release]] = {}
        self.clock = 1

    def writes_to(self, window: Window) -> _LastWrites:
        if window.key not in self.last_writes:
            size = len(window.data)
            self.last_writes[window.key] = _LastWrites(far(8 * size).view(np.int64), far(8 * size).view(np.int64))
        return self.last_writes[window.key]


class Races:
    """Checks the accesses of the programs that run together.

    Args:
        watch_mask: [programs] bool, whose shared memory is watched.
        first: [programs] each program's number times the threads of a program.
    """

    def __init__(self, history: History, watch_mask: np.ndarray, first: np.ndarray, block: int, shared_bytes: int) -> None:
        count, self.history, self.block = len(watch_mask) * block, history, block
        self.thread = (first[:, None] + np.arange(block)).reshape(-1)
        self.watched = np.repeat(watch_mask, block)
        self.all_watched = bool(watch_mask.all())
        self.barrier_time = np.zeros(count, np.int64)  # when a thread last passed a barrier of its program
        self.warp_barrier_time = np.zeros(count, np.int64)
        self.fence_time = np.zeros(count, np.int64)
        self.proxy_fence_time = np.zeros(count, np.int64)
        self.acquired: dict[int, list[tuple[_Release, int, int]]] = {}
        self.writer = np.full(shared_bytes, _NOBODY, np.int32)
        self.reader = np.full(shared_bytes, _NOBODY, np.int32)
        self.write_time = np.zeros(shared_bytes, np.int64)
        self.read_time = np.zeros(shared_bytes, np.int64)
        self.generic = np.zeros(shared_bytes, np.bool_)  # written by a store, which the asynchronous proxy sees after a fence

    # -- Shared memory --------------------------------------------------------------------------------------------------
    def _may_overlap(self, lanes: np.ndarray, other: np.ndarray, time: np.ndarray) -> np.ndarray:
        """[n, width] whether accesses by others at `time` may still be under way for threads [n, 1]."""
        same_warp = (other >= 0) & (other // 32 == lanes // 32)
        # Of several readers one may stand in another warp.
        since = np.where(
            same_warp, np.maximum(self.barrier_time[lanes], self.warp_barrier_time[lanes]), self.barrier_time[lanes]
        )
        return (other != _NOBODY) & (other != lanes) & (since <= time) & (time > 0)

    def _watched_accesses(
        self, lanes: np.ndarray, offset: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        which = np.arange(len(lanes)) if self.all_watched else np.flatnonzero(self.watched[lanes])
        if not len(which):
            return None
        return which, lanes[which][:, None], offset[which][:, None] + np.arange(width)

    def shared_read(self, s: Lanes, lanes: np.ndarray, offset: np.ndarray, width: int) -> None:
        if (accesses := self._watched_accesses(lanes, offset, width)) is None:
            return
        _, who, at = accesses
        bad = self._may_overlap(who, self.writer[at], self.write_time[at])
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            self._report(s, "reads", int(who[row, 0]), int(self.writer[at[row, column]]), int(at[row, column]))
        other, time = self.reader[at], self.read_time[at]
        alone = (other == _NOBODY) | (other == who) | (self.barrier_time[who] > time)
        self.reader[at] = np.where(alone, who, _MANY)
        self.reader[at[self.reader[at] != who]] = _MANY
        self.read_time[at] = s.clock

    def shared_write(self, s: Lanes, lanes: np.ndarray, offset: np.ndarray, values: np.ndarray | None, width: int) -> None:
        """values [n, width] uint8; None for a write that happens later."""
        if (accesses := self._watched_accesses(lanes, offset, width)) is None:
            return
        which, who, at = accesses
        bad = self._may_overlap(who, self.reader[at], self.read_time[at])
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            self._report(s, "overwrites", int(who[row, 0]), int(self.reader[at[row, column]]), int(at[row, column]), "read")
        bad = self._may_overlap(who, self.writer[at], self.write_time[at])
        if values is not None:
            bad &= s.shared[at] != values[which]
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            self._report(s, "overwrites", int(who[row, 0]), int(self.writer[at[row, column]]), int(at[row, column]))
        if values is None:
            return
        s.shared[at] = values[which]
        if (differs := (s.shared[at] != values[which]).any(1)).any():
            row = int(np.argmax(differs))
            if not _nearly(s.shared[at[differs]], values[which][differs]):
                raise Fault("two threads write different values to one byte of shared memory at once", int(who[row, 0]))
        self.writer[at], self.write_time[at], self.generic[at] = who, s.clock, True

    def matrix_read(self, s: Lanes, lane: int, at: np.ndarray, issue_time: int) -> None:
        """An asynchronous product of the warp group of `lane` reads bytes [n] of shared memory from `issue_time` to now."""
        if not self.watched[lane]:
            return
        writer, time = self.writer[at], self.write_time[at]
        if (late := time > issue_time).any():
            self._report(s, "overwrote", int(writer[late][0]), lane, int(at[late][0]), "was reading")
        who = np.full(len(at), lane)
        bad = (writer != _NOBODY) & (self.barrier_time[lane] <= time) & (time > 0) & (writer // 128 != lane // 128)
        if bad.any():
            self._report(s, "reads", lane, int(writer[bad][0]), int(at[bad][0]))
        unfenced = (writer >= 0) & self.generic[at] & (self.proxy_fence_time[np.maximum(writer, 0)] <= time)
        if unfenced.any():
            byte = int(at[unfenced][0])
            raise Fault(
                f"wgmma reads byte {self._byte(s, byte)} of shared memory that thread {int(writer[unfenced][0]) % self.block} "
                "stored, with no fence.proxy.async between",
                lane,
            )
        self.reader[at], self.read_time[at] = np.where(self.reader[at] == who, who, _MANY), s.clock

    @staticmethod
    def _byte(s: Lanes, offset: int) -> int:
        return offset % s.shared_stride - SHARED_AT

    def _report(self, s: Lanes, does: str, lane: int, other: int, offset: int, did: str = "wrote") -> None:
        whom = "other threads" if other == _MANY else f"thread {other % self.block}"
        raise Fault(f"{does} byte {self._byte(s, offset)} of shared memory, which {whom} {did}, with no barrier between", lane)

    # -- Global memory --------------------------------------------------------------------------------------------------
    def global_read(self, s: Lanes, lanes: np.ndarray, window: Window, offset: np.ndarray, width: int) -> None:
        if (last_writes := self.history.last_writes.get(window.key)) is None:
            return
        at = offset[:, None] + np.arange(width)
        self._require_ordered(s, lanes, window, at, last_writes, None, "reads")

    def global_write(self, s: Lanes, lanes: np.ndarray, window: Window, offset: np.ndarray, values: np.ndarray) -> None:
        last_writes, at = self.history.writes_to(window), offset[:, None] + np.arange(values.shape[1])
        self._require_ordered(s, lanes, window, at, last_writes, window.data[at] != values, "overwrites")
        thread = self.thread[lanes][:, None] + 1
        last_writes.thread[at], last_writes.time[at] = thread, s.clock
        others = last_writes.thread[at] != thread
        if others.any():  # two at once
            window.data[at] = values
            bad = others.any(1) & (window.data[at] != values).any(1)
            if bad.any():
                row = int(np.argmax(bad))
                raise Fault(f"two threads write different values to byte {offset[row]} of {window.name}", int(lanes[row]))

    def _require_ordered(
        self,
        s: Lanes,
        lanes: np.ndarray,
        window: Window,
        at: np.ndarray,
        last_writes: _LastWrites,
        differs: np.ndarray | None,
        does: str,
    ) -> None:
        writer, time, me = last_writes.thread[at] - 1, last_writes.time[at], self.thread[lanes][:, None]
        bad = (writer >= 0) & (writer != me)
        if differs is not None:
            bad &= differs
        if not bad.any():
            return
        mine = bad & (writer // self.block == me // self.block)
        warp = np.where(writer // 32 == me // 32, self.warp_barrier_time[lanes][:, None], 0)
        bad &= ~(mine & (np.maximum(self.barrier_time[lanes][:, None], warp) > time))
        for row, column in np.argwhere(bad).tolist():
            if self._happens_before(int(lanes[row]), int(writer[row, column]), int(time[row, column])):
                continue
            other = int(writer[row, column])
            raise Fault(
                f"{does} byte {int(at[row, column]) - window.begin} of {window.name}, which thread {other % self.block} of "
                f"program {other // self.block} wrote, and nothing orders the two",
                int(lanes[row]),
            )

    def _happens_before(self, lane: int, writer: int, time: int) -> bool:
        """Whether an atomic operation of this program saw one of the writer's program, after what it wrote."""
        for release, acquirer, when in self.acquired.get(lane // self.block, ()):
            if release.program != writer // self.block:
                continue
            release_covers = release.time > time and (writer == release.thread or release.barrier_time > time)
            fence_covers = max(release.fence_time[writer % self.block], release.fence_time[release.thread % self.block]) > time
            knows = acquirer == lane or self.barrier_time[lane] > when
            if release_covers and fence_covers and knows:
                return True
        return False

    def atomic(self, s: Lanes, lane: int, window: Window, offset: int, orders: set[str]) -> None:
        """An atomic operation of a thread: what others released here it acquires, and it releases what it fenced."""
        program, key = lane // self.block, (window.key, offset)
        releases = self.history.releases.setdefault(key, [])
        self.acquired.setdefault(program, []).extend((release, lane, s.clock) for release in releases)
        if {"release", "acq_rel"} & orders:
            self.fence_time[lane] = s.clock
        first = program * self.block
        releases.append(_Release(
            int(self.thread[lane]) // self.block, int(self.thread[lane]), s.clock, int(self.barrier_time[lane]),
            self.fence_time[first : first + self.block].copy(),
        ))  # fmt: skip
