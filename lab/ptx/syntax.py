"""What PTX text is made of: registers, operands, instructions, arrays, entries."""

from __future__ import annotations

from dataclasses import dataclass, field


class Unknown(Exception):
    """The text holds what the executor does not know; nothing is ever skipped."""


@dataclass(frozen=True)
class Register:
    """A register, by its place among the entry's."""

    index: int
    bits: int  # 1 for a predicate


@dataclass(frozen=True)
class Number:
    """An immediate: an int, or the bits of a float of 32 bits as they are written."""

    value: int
    is_float: bool = False


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of an array or a parameter."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, `p|q`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Nowhere:
    """The operand `_`."""


@dataclass(frozen=True)
class Label:
    name: str


Operand = Register | Number | Special | Symbol | Address | Vector | Pair | Nowhere | Label


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None  # a predicate's register, and whether it must be false
    line: int
    source: str  # what the last .loc says

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True)
class Array:
    """Memory that the text declares.

    Attributes:
        size: bytes; 0 for an array whose size the launch gives.
        values: its first bytes.
    """

    name: str
    space: str
    align: int
    size: int
    values: bytes = b""


@dataclass
class Entry:
    name: str
    params: list[Array] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)


@dataclass
class Module:
    arrays: list[Array] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
