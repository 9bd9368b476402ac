"""The header of a safetensors file, read and checked before anything that it promises is believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import MOST_JSON, parse_json, read_file, size_of
from haarkv.tq_ops.memory import require_memory

Header = dict[str, dict[str, Any]]
"""Tensor name -> {dtype, shape, data_offsets}."""


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file's bytes, or of their beginning as far as the header goes.

    Raises:
        ValueError: they are none, or they are cut off inside the header.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError("it is truncated or no safetensors file")
    metadata = _header(content[8 : 8 + length]).get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("its header is not that of a safetensors file")
    return {str(key): str(value) for key, value in metadata.items()}


_OURS = {
    "haarkv_cache": "a stored cache, which --load-cache takes",
    "haarkv_calibration": "a calibration, which --calibration takes",
    "haarkv_calibrating": "a half-done calibration, which `tq calibrate --resume` takes",
}
"""What a file of ours is, by the first word of its metadata."""


def lacks(metadata: Mapping[str, str], *missing: str) -> str:
    """Why a file is not of the kind whose metadata has these entries as well: what it is instead, if it is another of ours."""
    if _OURS.keys() & set(missing) and (found := next((what for name, what in _OURS.items() if name in metadata), "")):
        return f"it is {found}"
    return "it lacks " + ", ".join(sorted(missing))


def start_of(path: Path, what: str) -> bytes:
    """The beginning of a file, to the end of its header if it is a safetensors file with one of a possible length.

    Args:
        what: stands before the path in messages, such as "the plan ".
    Raises:
        InputError: it cannot be read, or is no regular file.
    """
    size_of(path, what)
    try:
        with path.open("rb") as file:
            begin = file.read(8)
            length = int.from_bytes(begin, "little")
            return begin + file.read(length if length <= MOST_JSON else 0)
    except OSError as error:
        raise InputError(f"{what}{path} cannot be read: {error.strerror}") from None


def read_promised(path: Path, what: str, key: str) -> bytes:
    """The bytes of a safetensors file whose metadata has an entry of that name, which is looked at before the rest is read.

    Args:
        what: as in `start_of`.
    Raises:
        InputError: it cannot be read, is no regular file, or does not fit into memory twice.
        ValueError: it is no such file, with what is wrong.
    """
    if key not in (metadata := metadata_of(start_of(path, what))):
        raise ValueError(lacks(metadata, key))
    size = size_of(path, what)
    require_memory(2 * size, f"{what}{path}", "name another file")
    return read_file(path, size, what)


def header_in(file: BinaryIO, length: int) -> Header:
    """The tensors of a header of so many bytes that comes next in a file, offsets counted from the file's beginning.

    Raises:
        ValueError: it is no header, with what is wrong.
    """
    if length > MOST_JSON:
        raise ValueError(f"its header would have {length:,} bytes, and at most {MOST_JSON:,} can be")
    header = _header(file.read(length))
    header.pop("__metadata__", None)
    return {name: _entry(entry, 8 + length) for name, entry in header.items()}


def _header(content: bytes) -> dict[str, Any]:
    header = parse_json(content)
    if not isinstance(header, dict):
        raise ValueError("its header is not that of a safetensors file")
    return header


def _entry(entry: object, data: int) -> dict[str, Any]:
    """One tensor of a header, its types checked; `data` is where the file's tensors begin."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if all(type(size) is int and size >= 0 for size in shape) and 0 <= begin <= end:
                return {"dtype": dtype, "shape": shape, "data_offsets": [begin + data, end + data]}
    raise ValueError("its header has an entry that is no tensor")
