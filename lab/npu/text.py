"""The text of an emitted kernel function, read into buffers, tiles and tile operations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod

SIZES = {
    "bool": 1, "int8_t": 1, "uint8_t": 1, "half": 2, "bfloat16_t": 2, "int16_t": 2, "uint16_t": 2,
    "float": 4, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8,
}  # fmt: skip
"""Bytes of an element, by its type in C++."""

_MEMORY = {"__ubuf__": "UB", "__cbuf__": "L1", "__ca__": "L0A", "__cb__": "L0B", "__cc__": "L0C"}
_NUMBER = 8  # bytes of a shape, an offset or an address


@dataclass(frozen=True)
class Buffer:
    """A piece of a core's own memory.

    Attributes:
        memory: UB, L1, L0A, L0B or L0C; another qualifier as it is written.
        begin, size: in bytes.
        line: of the file, from 1, as everywhere here.
    """

    name: str
    memory: str
    begin: int
    size: int
    line: int


@dataclass(frozen=True)
class Tile:
    """A tile: a view of a buffer, or of a tensor in global memory.

    Attributes:
        memory: as of a buffer, or GM.
        dtype: of an element, in C++.
        layout: rows, columns and what is outside of them as they lie in memory; None where it is known at run time only.
        buffer: None for a tile in global memory.
        offset: bytes from the buffer's begin.
        rows: of a view into a taller tile, as many as it has at most; None where the layout says it.
    """

    name: str
    memory: str
    dtype: str
    layout: tuple[int, ...] | None
    buffer: Buffer | None
    offset: int
    line: int
    rows: int | None = None

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Elements from one index to the next, for every axis but the last."""
        if self.layout is None:
            return None
        return tuple(prod(self.layout[axis + 1 :]) for axis in range(len(self.layout) - 1))

    @property
    def bytes(self) -> int:
        """From its first number to its last, and to the end of that row."""
        layout = self.layout or ()
        if self.rows is not None and len(layout) == 2:
            layout = (min(self.rows, layout[0]), layout[1])
        return prod(layout) * SIZES[self.dtype]


@dataclass(frozen=True)
class Operation:
    """A call of a tile operation.

    Attributes:
        operands: in order; None for what is no tile (a number, a coordinate).
    """

    name: str
    operands: tuple[Tile | None, ...]
    line: int


@dataclass
class KernelFunction:
    """One emitted kernel function.

    Attributes:
        path: of its file, in the program's folder.
        lines: of the file.
        stack_limit: bytes that its compile line asks for.
        numbers: scalar variables it declares.
    """

    name: str
    path: str
    lines: int
    stack_limit: int | None = None
    numbers: int = 0
    buffers: list[Buffer] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    @property
    def stack(self) -> int:
        """Bytes of the variables that the function declares, as if none shared a place or stayed in a register.

        What the operations that are inlined into it keep on the stack comes on top, and what the compiler keeps in registers
        comes off: an estimate, to be held against the limit.
        """
        total = _NUMBER * self.numbers
        for tile in self.tiles:
            axes = len(tile.layout) if tile.layout is not None else 2
            # An address and a shape; in global memory strides and the shape of the whole tensor as well.
            total += _NUMBER * (2 + axes if tile.layout is not None else 2 + 3 * axes)
        return total


class UnknownTextError(ValueError):
    """A line that should be a declaration or an operation and cannot be read: this PyPTO writes another text."""


_FUNCTION = re.compile(r'extern "C" \[aicore\] void (\w+)\(')
_BUFFER = re.compile(r"(\w+) (__\w+__) \*(\w+) = .*get_imm\((0x[0-9a-f]+)\); // size: (0x[0-9a-f]+)$")
_TYPE = re.compile(r"using (\w+) = TileTensor<(?:__gm__ )?(\w+), (\w+Layout\d)Dim(?:<([\d, ]+)>)?, Hardware::(\w+)>;$")
# A place is `(uint64_t)NAME_T`, or a number of elements behind it.
_TILE = re.compile(r"(\w*TileTensor\w*) (\w+)\((?:\(uint64_t\)(?:\(\((\w+) \*\))?(\w+)_T(?: \+ (\d+)\))?,)?")
# Its shape: a number of rows, or how many a view takes at most of what there is.
_ROWS = re.compile(r"\(Shape2Dim\((?:(\d+), |\(RUNTIME_GetViewValidShapeDim\(\w+, \d+, (\d+)\)\), )")
# Or a variable that holds a number which is known, or another such variable.
_NAMED_ROWS = re.compile(r"\(Shape2Dim\((\w+), ")
_CONSTANT = re.compile(r"uint64_t (\w+) = (?:\(RUNTIME_COA_GET_PARAM_VALID_SHAPE_MAYBE_CONST\(1, (\d+), |(\w+);)")
_OPERATION = re.compile(r"(T[A-Z]\w*)")
_NAME = re.compile(r"\w+Tensor_\d+")
_STACK = re.compile(r"-cce-aicore-stack-size=(0x[0-9a-f]+)")


def parse(path: str, text: str) -> KernelFunction:
    """Read one emitted file.

    Raises:
        UnknownTextError: a declaration or an operation cannot be read, or there is no function.
    """
    if not (header := _FUNCTION.search(text)):
        raise UnknownTextError(f"{path}: no kernel function in it")
    function = KernelFunction(header[1], path, text.count("\n"))
    types: dict[str, re.Match[str]] = {}
    tiles: dict[str, Tile] = {}
    buffers: dict[str, Buffer] = {}
    constants: dict[str, int] = {}
    for line, words in enumerate(text.splitlines(), start=1):
        if match := _BUFFER.match(words):
            buffer = Buffer(match[3], _MEMORY.get(match[2], match[2]), int(match[4], 16), int(match[5], 16), line)
            buffers[buffer.name] = buffer
        elif match := _TYPE.match(words):
            types[match[1]] = match
        elif (match := _TILE.match(words)) and match[1] in types:
            kind = types[match[1]]
            layout = tuple(map(int, kind[4].split(","))) if kind[4] else None
            if kind[2] not in SIZES or (kind[5] != "GM" and match[4] not in buffers):
                raise UnknownTextError(f"{path}, line {line}: a tile of unknown type or place: {words[:80]}")
            offset = int(match[5] or 0) * SIZES[match[3] or kind[2]]
            rows = int(shape[1] or shape[2]) if (shape := _ROWS.search(words)) else None
            if rows is None and (rows_match := _NAMED_ROWS.search(words)):
                rows = constants.get(rows_match[1])
            tiles[match[2]] = Tile(match[2], kind[5], kind[2], layout, buffers.get(match[4]), offset, line, rows)
        elif match := _OPERATION.match(words):
            names = _arguments(words)
            if missing := [name for name in names if _NAME.fullmatch(name) and name not in tiles]:
                raise UnknownTextError(f"{path}, line {line}: {missing[0]} is not declared: {words[:80]}")
            operands = tuple(tiles.get(name) for name in names)
            function.operations.append(Operation(match[1], operands, line))
        elif words.startswith(("uint64_t ", "int64_t ")):
            function.numbers += 1
            if (match := _CONSTANT.match(words)) and (value := match[2] or constants.get(match[3])) is not None:
                constants[match[1]] = int(value)
        elif "TileTensor" in words or ("get_imm(" in words and "__ *" in words):
            raise UnknownTextError(f"{path}, line {line}: not a declaration that is known: {words[:80]}")
        elif match := _STACK.search(words):
            function.stack_limit = int(match[1], 16)
    function.buffers.extend(buffers.values())
    function.tiles.extend(tiles.values())
    return function


def _arguments(call: str) -> list[str]:
    """The arguments of a call, split at the commas that no parenthesis or angle bracket encloses."""
    depth, begin, parts = 0, None, []
    for index, char in enumerate(call):
        if begin is None:
            depth += (char == "<") - (char == ">")
            begin = index + 1 if char == "(" and depth == 0 else None
        elif (char == "," and depth == 0) or (char == ")" and depth == 0):
            parts.append(call[begin:index].strip())
            begin = index + 1
            if char == ")":
                break
        else:
            depth += (char == "(") - (char == ")")
    return parts
