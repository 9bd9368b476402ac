"""Lossless packing of stored tensors with zstd, of those alone that become smaller by it.

Codes are nearly uniform, and few of them gain. Scales do: of their two bytes the upper one, which holds sign and exponent,
takes few values. Wider numbers are therefore packed place by place, all their first bytes and then all their second ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.memory import require_memory

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
