"""An entry's instructions made ready to run, and the memory that all programs of a launch share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lab.ptx.memory import SHARED_AT, Memory
from lab.ptx.opcodes import build
from lab.ptx.parse import parse
from lab.ptx.state import Read, Run, reader
from lab.ptx.syntax import Array, Entry, Instruction, Label, Number, Unknown

PLAIN, BRANCH, EXIT, BARRIER, WARP_BARRIER = range(5)


@dataclass
class Step:
    ins: Instruction
    kind: int
    run: Run | None = None
    target: int = 0
    barrier: int = 0
    expected: Read | None = None


@dataclass
class Program:
    """An entry, ready to run: see `load_program`."""

    entry: Entry
    arrays: list[Array]
    steps: list[Step]

    def __post_init__(self) -> None:
        self.barriers = np.array([step.barrier for step in self.steps])


@lru_cache(maxsize=64)
def load_program(text: str, name: str) -> Program:
    """The entry of a PTX text.

    Raises:
        Unknown: something in it is not known here.
    """
    module = parse(text)
    if name not in module.entries:
        raise Unknown(f"no entry {name!r} but {', '.join(module.entries)}")
    entry = module.entries[name]
    return Program(entry, module.arrays, [_step(ins, entry) for ins in entry.code])


def _step(ins: Instruction, entry: Entry) -> Step:
    where = f"{entry.name}, line {ins.line}: {ins.name}"
    if ins.opcode == "bra":
        target = ins.operands[0]
        if not isinstance(target, Label) or target.name not in entry.labels:
            raise Unknown(where)
        return Step(ins, BRANCH, target=entry.labels[target.name])
    if ins.opcode in ("ret", "exit"):
        return Step(ins, EXIT)
    if ins.opcode in ("bar", "barrier"):
        names = [name for name in ins.modifiers if name not in ("cta", "aligned")]
        if names == ["warp", "sync"]:
            return Step(ins, WARP_BARRIER)
        if names != ["sync"] or not isinstance(ins.operands[0], Number):
            raise Unknown(where)
        count = reader(ins.operands[1], "u32") if len(ins.operands) > 1 else None
        return Step(ins, BARRIER, barrier=ins.operands[0].value, expected=count)
    run = build(ins)
    assert run is not None, where
    return Step(ins, PLAIN, run)


def _in_memory(values: Sequence[object], params: list[Array]) -> tuple[np.ndarray, dict[str, int]]:
    """The parameters' bytes, and where each begins."""
    if len(values) != len(params):
        raise ValueError(f"{len(values)} arguments for {len(params)} parameters")
    octets, places = b"", {}
    for value, param in zip(values, params, strict=True):
        octets += bytes(-len(octets) % param.align)
        places[param.name] = len(octets)
        if isinstance(value, bytes):
            piece = value
        elif isinstance(value, float):
            piece = np.array(value, np.float32 if param.size == 4 else np.float64).tobytes()
        elif isinstance(value, np.generic):
            piece = value.tobytes()
        else:
            piece = (int(value) % (1 << 8 * param.size)).to_bytes(param.size, "little")
        if len(piece) != param.size:
            raise ValueError(f"{len(piece)} bytes for {param.name}, which has {param.size}")
        octets += piece
    return np.frombuffer(octets + bytes(16), np.uint8).copy(), places


def _laid_out(arrays: list[Array], begin: int, dynamic: int) -> tuple[dict[str, int], int]:
    """Where arrays of one space begin, those without a size last, and where they end."""
    places, end = {}, begin
    for array in sorted(arrays, key=lambda array: array.size == 0):
        end += -end % array.align
        places[array.name] = end
        end += array.size
    return places, end + dynamic


@dataclass
class Layout:
    """What every program of a launch shares: where arrays and parameters lie, and how many bytes of its own a thread has."""

    symbols: dict[str, tuple[str, int]]
    params: np.ndarray
    shared_end: int
    local_bytes: int


def launch_layout(program: Program, args: Sequence[object], memory: Memory, dynamic: int) -> Layout:
    params, offsets = _in_memory(args, program.entry.params)
    arrays = [*program.arrays, *program.entry.arrays]
    symbols = {name: ("param", offset) for name, offset in offsets.items()}
    shared, shared_end = _laid_out([array for array in arrays if array.space == "shared"], SHARED_AT, dynamic)
    local, local_bytes = _laid_out([array for array in arrays if array.space == "local"], 0, 0)
    symbols |= {name: ("shared", at) for name, at in shared.items()} | {name: ("local", at) for name, at in local.items()}
    for array in arrays:
        if array.space in ("global", "const"):
            values = np.frombuffer(array.values + bytes(array.size - len(array.values)), np.uint8).copy()
            symbols[array.name] = (array.space, memory.place(array.name, values))
    return Layout(symbols, params, shared_end, local_bytes)
