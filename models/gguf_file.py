"""Reader of GGUF files: entries and tensors; gguf restores the quantized blocks.

gguf's own reader takes ten seconds and half a gigabyte for a vocabulary, and trusts every length; this one checks each length
against the file's size.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import file_size
from haarkv.tq_ops.weight import BlockType, Empty, empty_tensor, restore_rows

_MOST_ENTRIES, _MOST_TENSORS, _MOST_VALUES, _MOST_NAME = 2**16, 2**20, 2**23, 2**10
"""Several times what any file has; values of all lists together, characters of a tensor's name."""
_PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` formats by kind of value; 8 is a string and 9 an array."""
_STRING, _ARRAY = 8, 9
KV_CHOICE = "haarkv.kv_choice"
"""Entry that holds a plan file in base64: the cache that was chosen for these weights. gguf's reader takes long for bytes."""
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: rows first, as in torch.
        kind: number of gguf's type.
        offset: bytes from the file's beginning.
        part: index of the file among the model's files.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    part: int = 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Of plain numbers; None for blocks."""
        return _PLAIN.get(self.kind)  # type: ignore[call-overload, no-any-return]

    @property
    def blocks(self) -> str | None:
        """Type of its quantized blocks; None for plain numbers and unknown types."""
        return block_type(self.kind).name if self.dtype is None and _can_restore(self.kind) else None

    @property
    def row_bytes(self) -> int:
        """Of one row of a known type."""
        layout = block_type(self.kind)
        return self.shape[-1] // layout.numbers * layout.nbytes

    @property
    def nbytes(self) -> int:
        """Of all rows; 0 of an unknown type."""
        return math.prod(self.shape[:-1]) * self.row_bytes if _can_restore(self.kind) else 0

    @property
    def fault(self) -> str | None:
        """Why its numbers cannot be restored; None if they can."""
        if not _can_restore(self.kind):
            type_names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
            return f"is stored as {type_names.get(self.kind, f'type {self.kind}')}, which gguf cannot restore"
        block, width = block_type(self.kind).numbers, self.shape[-1]
        return f"has rows of {width:,} numbers, which are no whole blocks of {block}" if width % block else None


@cache
def block_type(kind: int) -> BlockType:
    """The blocks of a type by gguf's number; in F32, F16 and BF16 a block is one number."""
    gguf_type = gguf.GGMLQuantizationType(kind)
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf_type]

    def restore(rows: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # scales that are no numbers
            return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(rows.numpy(), gguf_type)))

    return BlockType(gguf_type.name, numbers, nbytes, restore)


def block_type_named(name: str) -> BlockType:
    """`block_type` by gguf's name, such as Q4_K."""
    return block_type(gguf.GGMLQuantizationType[name])


@cache
def _can_restore(kind: int) -> bool:
    try:
        gguf_type = gguf.GGMLQuantizationType(kind)
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[gguf_type][1]), np.uint8), gguf_type)
    except (ValueError, NotImplementedError):
        return False
    return True


class GGUFFile:
    """A memory-mapped GGUF file, or all parts of a model, from the first one's path.

    Attributes:
        entries: metadata by key: numbers, texts, and lists of them.
        kinds: of each entry, gguf's number of its kind, and of its list's values.
        tensors: by gguf's names.
    Raises:
        InputError: the file cannot be read, is no GGUF, is damaged, is no first part, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self._memories: list[mmap.mmap] = []
        self.entries, self.kinds, self.tensors = self._add(path)
        self.paths = [path, *_other_parts(path, self.entries)]
        for number, other in enumerate(self.paths[1:], 1):
            part_entries, _, more = self._add(other)
            if (part_entries.get("split.no"), part_entries.get("split.count")) != (
                number,
                len(self.paths),
            ) or self.tensors.keys() & more:
                raise InputError(f"{other} is not part {number + 1} of {len(self.paths)} of {path}; fetch both again")
            self.tensors |= more
        if (count := self.entries.get("split.tensors.count")) not in (None, len(self.tensors)):
            raise InputError(f"{path}: its parts hold {len(self.tensors):,} tensors, not {shown(count)}; fetch them again")

    def _add(self, path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int | None]], dict[str, GGUFTensor]]:
        file_size(path)  # a pipe or a device is refused
        try:
            with path.open("rb") as file:
                # Private pages: torch may have views of them as of memory that can be written.
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        try:
            reader = _Reader(memory)
            count_of_tensors = reader.begin()
            entries = reader.entries()
            tensors = reader.tensors(count_of_tensors, entries.get("general.alignment", 32), len(self._memories))
        except _DamagedError as error:
            raise InputError(f"{path} is not a GGUF file that can be read: {error}") from None
        self._memories.append(memory)
        return entries, reader.kinds, tensors

    def read(
        self,
        tensor: GGUFTensor,
        dtype: torch.dtype,
        rows: Tensor | None = None,
        columns: slice = slice(None),
        change: Callable[[Tensor], Tensor] | None = None,
        empty: Empty = empty_tensor,
    ) -> Tensor:
        """Numbers of a tensor, restored some rows at a time; unconverted and whole, they stay in the file's pages.

        Args:
            rows: indices [R] int64, all axes but the last flattened.
            change: applied in FP32 before rounding to `dtype`.
            empty: allocates the result.
        Returns:
            [R, columns], or the tensor's shape without `rows` and `columns`.
        """
        raw_rows = self.stored_rows(tensor)
        if tensor.dtype == dtype and rows is None and columns == slice(None) and change is None and tensor.offset % 4 == 0:
            return raw_rows.view(dtype).view(tensor.shape)
        restore, width = block_type(tensor.kind).restore, tensor.shape[-1]
        numbers = restore_rows(raw_rows, restore, width, dtype, rows, columns, change, empty)
        return numbers.view(tensor.shape) if rows is None and columns == slice(None) else numbers

    def stored_rows(self, tensor: GGUFTensor) -> Tensor:
        """Rows as stored, all axes but the last flattened: [rows, bytes of a row] uint8, in the file's pages."""
        raw = np.frombuffer(self._memories[tensor.part], np.uint8, tensor.nbytes, tensor.offset)
        return torch.from_numpy(raw.reshape(-1, tensor.row_bytes))


def _other_parts(path: Path, entries: Mapping[str, Any]) -> list[Path]:
    """Paths of the parts behind the first, beside it."""
    count, number = entries.get("split.count", 1), entries.get("split.no", 0)
    if count == 1:
        return []
    name = _PART.fullmatch(path.name)
    if name is None or not isinstance(number, int) or (int(name[2]), int(name[3])) != (number + 1, count):
        raise InputError(
            f"{path} is one of {shown(count)} parts of a model, and its name does not say which, as "
            "NAME-00001-of-00002.gguf does; give the parts their names again"
        )
    paths = [path.with_name(f"{name[1]}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]
    if number:
        raise InputError(f"{path} is part {number + 1} of {count} of a model; name the first one, {paths[0]}")
    if missing := [other for other in paths if not other.exists()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{missing[0]}{more} is missing: the model lies in {count} parts; fetch it beside the others")
    return paths[1:]


class _DamagedError(Exception):
    """A header that cannot be."""


class _Reader:
    """Reads a header from the beginning."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._at, self._values = memory, 0, 0
        self.kinds: dict[str, tuple[int, int | None]] = {}

    def begin(self) -> int:
        """Read the magic and the counts; returns the number of tensors."""
        if self._bytes(4) != b"GGUF":
            raise _DamagedError("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise _DamagedError(f"its version is {version}, and 2 and 3 are read (little-endian)")
        tensors, self._entries = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or self._entries > _MOST_ENTRIES:
            raise _DamagedError(f"it promises {tensors:,} tensors and {self._entries:,} entries, more than any has")
        return int(tensors)

    def entries(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(self._entries):
            key = self._text()
            if key in entries:
                raise _DamagedError(f"it has two entries {shown(key)}")
            kind = self._number("I")
            inner = int.from_bytes(self._memory[self._at : self._at + 4], "little") if kind == _ARRAY else None
            self.kinds[key], entries[key] = (kind, inner), self._value(kind)
        return entries

    def tensors(self, count: int, alignment: object, part: int) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise _DamagedError(f"its alignment {shown(alignment)} is not a power of two")
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(count):
            name, axes = self._text(), self._number("I")
            if name in tensors or len(name) > _MOST_NAME or not 1 <= axes <= 4:
                raise _DamagedError(f"the tensor {shown(name)} is there twice, has a name that is too long, or {axes} axes")
            shape = tuple(reversed(self._numbers("Q", axes)))
            kind, offset = self._number("I"), self._number("Q")
            # No type has less than a bit a number.
            if not all(shape) or math.prod(shape) > 8 * len(self._memory) or offset % alignment:
                raise _DamagedError(
                    f"the tensor {shown(name)} cannot be: its shape is {list(shape)}, its offset {offset}, in a file of "
                    f"{len(self._memory):,} bytes whose alignment is {alignment}"
                )
            tensors[name] = GGUFTensor(shape, kind, offset)
        begin = -(-self._at // alignment) * alignment
        file_tensors = {
            name: GGUFTensor(tensor.shape, tensor.kind, begin + tensor.offset, part) for name, tensor in tensors.items()
        }
        self._require_apart(file_tensors)
        return file_tensors

    def _require_apart(self, tensors: Mapping[str, GGUFTensor]) -> None:
        """Refuse tensors that overlap or end beyond the file."""
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise _DamagedError(f"the tensors {shown(before)} and {shown(name)} lie over each other")
            end, before = max(end, tensor.offset + tensor.nbytes), name
            if end > len(self._memory):
                raise _DamagedError(
                    f"the tensor {shown(name)} ends at byte {end:,}, the file at {len(self._memory):,}: it is truncated; "
                    "fetch it again"
                )

    def _bytes(self, count: int) -> bytes:
        if count > len(self._memory) - self._at:
            raise _DamagedError(f"it ends within its header, at byte {len(self._memory):,}; fetch it again")
        self._at += count
        return self._memory[self._at - count : self._at]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        struct_format = f"<{count}{kind}"
        return struct.unpack(struct_format, self._bytes(struct.calcsize(f"<{kind}") * count))

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _text(self) -> str:
        try:
            return self._bytes(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise _DamagedError("a text in its header is not UTF-8") from None

    def _value(self, kind: int, in_list: bool = False) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY or in_list:  # no file has lists of lists
            raise _DamagedError(f"an entry or a list's value is of kind {kind}, which there is none of")
        kind, count = self._number("I"), self._number("Q")
        # Each value takes a byte at least; a list takes many times the bytes of small numbers.
        self._values += count
        if count > len(self._memory) - self._at or self._values > _MOST_VALUES:
            raise _DamagedError(f"it promises a list of {count:,} values, more than it has bytes left, or than any file has")
        if kind in _NUMBERS:
            return list(self._numbers(_NUMBERS[kind], count))
        return [self._value(kind, in_list=True) for _ in range(count)]
