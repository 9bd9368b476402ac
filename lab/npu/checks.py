"""What can be wrong in emitted C++ that PyPTO's interpreter cannot see: strides, places in a core's memory, the stack.

    python -m lab.npu.checks FOLDER

FOLDER is what `tq dev compile --cpp FOLDER` writes. Exit code 1 if anything is found. The interpreter computes on whole
tensors and never meets the headers of the device. These checks read the text that is compiled against them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from haarkv.models.qwen3_14b.npu.compile import KERNELS
from lab.npu.text import SIZES, KernelFunction, Operation, Tile, UnknownTextError, parse

CAPACITY = {"UB": 192 * 2**10, "L1": 512 * 2**10, "L0A": 64 * 2**10, "L0B": 64 * 2**10, "L0C": 128 * 2**10}
"""Bytes of each memory of one core of an Ascend 910B."""

_ALIGNMENT = {"UB": 32, "L1": 32, "L0A": 512, "L0B": 512, "L0C": 64}
_ROW = 32  # bytes: a vector instruction reads and writes rows of whole blocks of this size


@dataclass(frozen=True)
class Rule:
    """How an operation addresses its operands.

    Attributes:
        same: positions of operands that the headers address with one and the same stride.
        why: what the headers do with the others.
    """

    same: tuple[int, ...]
    why: str


_OWN_RULE = Rule((), "every operand is addressed with its own strides")
_ROWS = "a row at a time; the condition has its own stride, the scratch has no rows"
RULES: dict[tuple[str, int], Rule] = {
    # The headers shipped with PyPTO 0.2.0 (tileop/vector, tileop/cube). Key: the operation and how many operands are tiles.
    ("TWhereTT", 5): Rule((0, 3, 4), f"both sources are addressed with the stride of the result, {_ROWS}"),
    ("TWhereTS", 4): Rule((0, 3), f"the source is addressed with the stride of the result, {_ROWS}"),
    ("TWhereST", 4): Rule((0, 3), f"the source is addressed with the stride of the result, {_ROWS}"),
    ("TWhereSS", 3): Rule((), f"no source, {_ROWS}"),
    ("TCompare", 4): Rule((1, 2), "the second source is addressed with the stride of the first; result by its own"),
    ("TCompare", 3): Rule((), "source and result by their own strides; the scratch has no rows"),
    **{(name, 3): _OWN_RULE for name in ("TAdd", "TSub", "TMul", "TDiv", "TMax", "TMin", "TBitwiseAnd", "TBitwiseOr")},
    **{(f"{name}S", 2): _OWN_RULE for name in ("TAdd", "TSub", "TMul", "TDiv", "TMax", "TMin", "TBitwiseAnd", "TBitwiseOr")},
    **{(name, 2): _OWN_RULE for name in ("TBitrshiftS", "TBitlshiftS", "TAbs", "TExp", "TSqrt", "TRsqrt", "TCast", "TExpand")},
    **{(f"TRow{name}Single", 3): _OWN_RULE for name in ("Sum", "Max", "Min")},
    ("TTrans", 3): Rule((), "result, source and scratch have rows of different lengths, each addressed with its own"),
    ("TExtract", 2): Rule((), "takes a piece of L1 in the cube's own order, at a coordinate"),
    ("TMatmul", 3): Rule((), "the three are tiles of different matrices"),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something wrong in a program's text."""

    program: str
    function: str
    path: str
    line: int
    says: str

    def __str__(self) -> str:
        return f"{self.program}, {self.function}, {self.path}:{self.line}: {self.says}"


@dataclass(frozen=True)
class Report:
    """What the checks found in one program.

    Attributes:
        lines: of all kernel functions.
        fullest: memory -> the most bytes that one function uses of it.
        stack: largest estimate of a function, in bytes.
        stack_limit: the least that a compile line asks for; None without a function.
    """

    program: str
    functions: int
    lines: int
    fullest: dict[str, int]
    stack: int
    stack_limit: int | None
    findings: tuple[Finding, ...]


def check(program: str, sources: dict[str, str]) -> Report:
    """Check every kernel function of a program.

    Args:
        sources: path -> text, as a compilation gives them.
    """
    functions, findings = [], []
    for path, text in sources.items():
        if not path.startswith(KERNELS):
            continue
        try:
            function = parse(path, text)
        except UnknownTextError as error:
            findings.append(Finding(program, "?", path, 0, f"cannot be read: {error}"))
            continue
        functions.append(function)
        findings.extend(
            Finding(program, function.name, path, line, says)
            for part in (_strides, _buffers, _tiles, _stack)
            for line, says in part(function)
        )
    if not functions and not findings:
        findings.append(Finding(program, "?", "", 0, "holds no kernel function"))
    fullest = {
        memory: max((b.begin + b.size for f in functions for b in f.buffers if b.memory == memory), default=0)
        for memory in CAPACITY
    }
    limits = [f.stack_limit for f in functions if f.stack_limit is not None]
    return Report(
        program, len(functions), sum(f.lines for f in functions), fullest, max((f.stack for f in functions), default=0),
        min(limits, default=None), tuple(findings),
    )  # fmt: skip


Problems = Iterator[tuple[int, str]]


def _strides(function: KernelFunction) -> Problems:
    """Operands that differ in their strides where the headers assume that they do not, or where nothing is known."""
    for operation in function.operations:
        tiles = [tile for tile in operation.operands if tile is not None]
        rule = RULES.get((operation.name, len(tiles)))
        compared_tiles = tiles if rule is None else [tiles[index] for index in rule.same]
        # A load, a store and a copy have one operand in the core's memory; the strides of the other are its own.
        local = [tile for tile in compared_tiles if tile.layout is not None]
        if len({_loop_strides(tile, local[0]) for tile in local}) > 1:
            why = rule.why if rule else "nothing is known of how it addresses them"
            yield operation.line, f"{_describe(operation, local)}: operands with different strides; {why}"


def _loop_strides(tile: Tile, first: Tile) -> tuple[int, ...]:
    """Strides along the four outer axes of five. The first operand bounds the loops: along an axis of length 1 none steps."""
    strides, lengths = tile.strides or (), (first.layout or ())[:-1]
    four_strides = (0,) * (4 - len(strides)) + strides
    return tuple(
        0 if length == 1 else stride for stride, length in zip(four_strides, (1,) * (4 - len(lengths)) + lengths, strict=True)
    )


def _describe(operation: Operation, tiles: list[Tile]) -> str:
    shapes = (" x ".join(map(str, tile.layout or ())) for tile in tiles)
    return f"{operation.name} of {', '.join(f'{tile.name} [{shape}]' for tile, shape in zip(tiles, shapes, strict=True))}"


def _buffers(function: KernelFunction) -> Problems:
    """Buffers that leave their memory, or begin where the hardware cannot."""
    for buffer in function.buffers:
        if buffer.memory not in CAPACITY:
            yield buffer.line, f"{buffer.name} is in memory {buffer.memory}, of which nothing is known"
            continue
        if (end := buffer.begin + buffer.size) > (most := CAPACITY[buffer.memory]):
            yield buffer.line, f"{buffer.name} ends at byte {end} of {buffer.memory}, which has {most}"
        if buffer.begin % (step := _ALIGNMENT[buffer.memory]):
            yield buffer.line, f"{buffer.name} begins at byte {buffer.begin} of {buffer.memory}, no multiple of {step}"


def _tiles(function: KernelFunction) -> Problems:
    """Tiles that are larger than their buffer, or whose rows the vector unit cannot address."""
    for tile in function.tiles:
        if tile.buffer is None or tile.layout is None:
            continue
        row = tile.layout[-1] * SIZES[tile.dtype]
        # A view begins within a row and ends with the last one.
        if tile.bytes + tile.offset // row * row > tile.buffer.size:
            yield (
                tile.line,
                f"{tile.name} has {tile.bytes} bytes from {tile.offset} on; {tile.buffer.name} has {tile.buffer.size}",
            )
        if tile.memory == "UB" and (tile.offset % _ROW or (len(tile.layout) > 1 and row % _ROW)):
            yield tile.line, f"{tile.name} has rows of {row} bytes from {tile.offset} on, no multiples of {_ROW}"


def _stack(function: KernelFunction) -> Problems:
    """Functions whose variables alone are more than the stack they are compiled with."""
    if function.stack_limit is not None and function.stack > function.stack_limit:
        yield (
            1,
            f"its variables take {function.stack} bytes if none is kept in a register; its stack has {function.stack_limit}",
        )


def main(arguments: list[str] | None = None) -> int:
    """Check every program of a folder."""
    parser = argparse.ArgumentParser(prog="python -m lab.npu.checks", description="Check the text of emitted C++.")
    parser.add_argument("folder", type=Path, help="what `tq dev compile --cpp` wrote")
    folder: Path = parser.parse_args(arguments).folder
    programs = sorted(path.parent for path in folder.glob(f"*/{KERNELS}"))
    if not programs:
        parser.error(f"{folder} holds no emitted C++; write it with tq dev compile --cpp {folder}")
    count = 0
    for program in programs:
        files = sorted((program / KERNELS).glob("*.cpp"))
        report = check(program.name, {KERNELS + file.name: file.read_text(encoding="utf-8") for file in files})
        count += len(report.findings)
        memory = ", ".join(f"{name} {size / 1024:.4g}K" for name, size in report.fullest.items() if size)
        stack = f"stack {report.stack / 1024:.1f}K of {(report.stack_limit or 0) / 1024:.4g}K"
        print(f"{program.name}: {report.functions} functions, {memory}, {stack}, {len(report.findings)} findings")
        for finding in report.findings:
            print(finding)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
