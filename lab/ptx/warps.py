"""What the threads of a warp tell each other: shuffles, votes, reductions."""

from __future__ import annotations

import numpy as np

from lab.ptx.access import active
from lab.ptx.memory import Fault
from lab.ptx.state import DTYPES, Lanes, Run, destination, reader
from lab.ptx.syntax import Instruction, Pair, Unknown

_LANE = np.arange(32)


def _require_members(s: Lanes, members: np.ndarray, what: str) -> None:
    """All threads that a mask [active] names, and that have not returned, take part, and none but they."""
    taking = np.zeros(s.count, np.bool_)
    taking[s.lanes] = True
    lane_masks = np.zeros(s.count, np.uint32)
    lane_masks[s.lanes] = members
    by_warp = lane_masks.reshape(-1, 32)
    masks = by_warp.max(1)
    if ((by_warp != masks[:, None]) & taking.reshape(-1, 32)).any():
        return  # groups of threads within a warp, each with its own mask
    members_mask = ((masks[:, None] >> _LANE.astype(np.uint32)) & np.uint32(1)).astype(np.bool_)
    missing = members_mask & s.live.reshape(-1, 32) & ~taking.reshape(-1, 32)
    if missing.any():
        raise Fault(f"{what} waits for a thread that is elsewhere", int(np.argmax(missing.reshape(-1))))
    extra = ~members_mask & taking.reshape(-1, 32)
    if extra.any():
        raise Fault(f"{what} by a thread that its mask leaves out", int(np.argmax(extra.reshape(-1))))


def _every(s: Lanes, values: np.ndarray) -> np.ndarray:
    """[warps, 32]."""
    return np.broadcast_to(values, s.count).reshape(-1, 32)


def shuffle(ins: Instruction) -> Run:
    """`shfl.sync`."""
    if ins.modifiers not in (("sync", mode, "b32") for mode in ("up", "bfly", "idx")):
        raise Unknown(ins.name)
    mode, to = ins.modifiers[1], ins.operands[0]
    target, valid = (to.first, destination(to.second, 1)) if isinstance(to, Pair) else (to, None)
    place = destination(target, 32)
    value, by, limits, members = (reader(operand, "u32") for operand in ins.operands[1:])

    def run(s: Lanes) -> None:
        _require_members(s, active(s, members(s)), ins.name)
        lane_values, step = _every(s, value(s)), _every(s, by(s)).astype(np.int64) & 31
        limit = _every(s, limits(s)).astype(np.int64)
        clamp, segment = limit & 31, limit >> 8 & 31
        last, first = (_LANE & segment) | (clamp & ~segment), _LANE & segment
        source = {
            "up": lambda: _LANE - step, "bfly": lambda: _LANE ^ step, "idx": lambda: first | (step & ~segment),
        }[mode]()  # fmt: skip
        in_segment = source >= last if mode == "up" else source <= last
        source = np.where(in_segment, source, _LANE)
        taking = np.zeros(s.count, np.bool_)
        taking[s.lanes] = True
        asleep = taking.reshape(-1, 32) & ~np.take_along_axis(taking.reshape(-1, 32), source, 1)
        if asleep.any():
            raise Fault(f"{ins.name} reads a thread that does not take part", int(np.argmax(asleep.reshape(-1))))
        s.write(place, np.take_along_axis(lane_values, source, 1).reshape(-1))
        if valid is not None:
            s.write(valid, in_segment.reshape(-1))

    return run


def _over_warps(s: Lanes, values: np.ndarray, neutral: object, function: np.ufunc) -> np.ndarray:
    """A reduction over the active threads of each warp, for each of its threads [count]."""
    whole = np.full(s.count, neutral, values.dtype)
    whole[s.lanes] = values
    return np.repeat(function.reduce(whole.reshape(-1, 32), 1), 32)


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


def reduce(ins: Instruction) -> Run:
    """`redux.sync`."""
    operation, kind = ins.modifiers[1], ins.modifiers[-1]
    if ins.modifiers[0] != "sync" or operation not in _REDUCTIONS or kind not in ("u32", "s32"):
        raise Unknown(ins.name)
    function, info = _REDUCTIONS[operation], np.iinfo(DTYPES[kind])
    neutral = {"add": 0, "min": info.max, "max": info.min}[operation]
    place, value, members = destination(ins.operands[0], 32), reader(ins.operands[1], kind), reader(ins.operands[2], "u32")

    def run(s: Lanes) -> None:
        _require_members(s, active(s, members(s)), ins.name)
        s.write(place, _over_warps(s, active(s, value(s)), neutral, function).astype(DTYPES[kind]))

    return run


def _ballot(s: Lanes, condition: np.ndarray) -> np.ndarray:
    """[count] uint32: the active threads of the warp whose condition [active] holds."""
    bit = np.uint32(1) << (s.lanes % 32).astype(np.uint32)
    return _over_warps(s, np.where(condition, bit, np.uint32(0)).astype(np.uint32), 0, np.bitwise_or)


def vote(ins: Instruction) -> Run:
    """`vote.sync`."""
    _, mode, kind = ins.modifiers
    if (mode, kind) not in (("ballot", "b32"), ("any", "pred")):
        raise Unknown(ins.name)
    place, value, members = destination(ins.operands[0]), reader(ins.operands[1], "pred"), reader(ins.operands[2], "u32")

    def run(s: Lanes) -> None:
        _require_members(s, active(s, members(s)), ins.name)
        condition = active(s, value(s))
        yes = _ballot(s, condition)
        s.write(place, yes if mode == "ballot" else yes != 0)

    return run
