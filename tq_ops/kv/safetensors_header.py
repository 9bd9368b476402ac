"""The files of tensors that are written here: their header, read and checked before anything that it promises is believed;
their SHA-256; and lossless packing with zstd of those tensors alone that become smaller by it.

Codes are nearly uniform, and few of them gain. Scales do: of their two bytes the upper one, which holds sign and exponent,
takes few values. Wider numbers are therefore packed place by place, all their first bytes and then all their second ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

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


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 in hex of metadata, in the order of its keys, then of each tensor by name: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


LEAST_GAIN = 0.05
"""Share of its bytes that packing must save of a tensor."""
_SAMPLE = 1 << 18
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16,
                                                                  torch.float32, torch.float8_e4m3fn)}  # fmt: skip


def pack(tensors: Mapping[str, Tensor], exact: frozenset[str] = frozenset()) -> tuple[dict[str, Tensor], str]:
    """Pack what becomes at least 5 % smaller.

    Args:
        tensors: by name, on the CPU.
        exact: names that stay as they are.
    Returns:
        all tensors, those that were packed as [n] uint8; and their dtypes and shapes as JSON, for `unpack`.
    """
    packed, described = dict(tensors), {}
    for name, tensor in tensors.items():
        if name in exact or not tensor.numel():
            continue
        content = _by_place(tensor)
        middle = max(0, len(content) // 2 - _SAMPLE // 2)
        sample = content[middle : middle + _SAMPLE]
        if tensor.itemsize == 1 and not _gains(len(_compressed(sample)), len(sample)):
            continue
        if _gains(len(frame := _compressed(content)), len(content)):
            packed[name] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            described[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return packed, json.dumps(described, sort_keys=True)


def unpack(tensors: Mapping[str, Tensor], described: str, blocks: int, largest_block: int) -> dict[str, Tensor]:
    """What `pack` was given. What a frame promises is compared with what may be before a byte of it is unpacked.

    Args:
        blocks: of each packed tensor at most, its first axis; of a layer with a window fewer are stored.
        largest_block: bytes that a block of a tensor may have at most.
    Raises:
        ValueError: a tensor is not what was described, or cannot be unpacked.
        InputError: they do not fit into memory.
    """
    raw: Any = parse_json(described)
    if not isinstance(raw, dict) or not raw.keys() <= tensors.keys():
        raise ValueError("its packed tensors are not described")
    wanted = {name: _place_of(name, entry, blocks, largest_block) for name, entry in raw.items()}
    require_memory(2 * sum(size for *_, size in wanted.values()), "what is packed in it", "name another file")
    unpacked = dict(tensors)
    for name, (dtype, shape, size) in wanted.items():
        if tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ValueError(f"{name} is said to be packed and is not")
        unpacked[name] = _together(_decompressed(name, tensors[name].numpy().tobytes(), size), dtype, shape)
    return unpacked


def _place_of(name: str, entry: object, blocks: int, largest_block: int) -> tuple[torch.dtype, list[int], int]:
    """Dtype, shape and bytes of a packed tensor, as it is described and may be."""
    match entry:
        case {"dtype": str(word), "shape": [int(first), *shape]} if word in _DTYPES:
            size = first * math.prod(shape) * _DTYPES[word].itemsize if all(type(n) is int and n > 0 for n in shape) else -1
            if 0 < first <= blocks and 0 < size <= blocks * largest_block:
                return _DTYPES[word], [first, *shape], size
    raise ValueError(f"{name} is packed and not described as a tensor of {blocks} blocks or fewer of this model")


def _gains(after: int, before: int) -> bool:
    return after <= (1 - LEAST_GAIN) * before


def _by_place(tensor: Tensor) -> bytes:
    """The bytes of a tensor, those of one place in their number together."""
    content = tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.itemsize)
    return content.T.contiguous().numpy().tobytes()


def _together(content: bytes, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """The inverse of `_by_place`."""
    places = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype.itemsize, -1)
    return places.T.contiguous().view(-1).view(dtype).view(shape)


# zstd is imported where something is packed: a forward, and the checks of one, do without.
def _compressed(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(content)


def _decompressed(name: str, frame: bytes, size: int) -> bytes:
    import zstandard

    try:
        if zstandard.frame_content_size(frame) != size:
            raise ValueError(f"{name} is packed and does not hold {size} bytes")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"{name} cannot be unpacked: {error}") from None
    if len(content) != size:
        raise ValueError(f"{name} is packed and does not hold {size} bytes")
    return content
