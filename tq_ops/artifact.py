"""This project's files of tensors: a kind and version, a SHA-256 of the content; written whole, or not at all.

    a safetensors file; metadata: the kind's key with its version; the kind's own entries; sha256, of the rest of the metadata
    in the order of its keys, then of each tensor by name: name, dtype, shape and bytes

Tensors of blocks have separate digests and are not in `sha256`. A kind with blocks has a second version: there, tensors that
become smaller are compressed with zstd, without loss; `packed` holds their dtype and shape, as JSON. Codes are nearly uniform
and rarely become smaller. Scales do: their upper byte takes few values, so wider numbers are packed by byte planes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import file_size, parse_json
from haarkv.tq_ops.memory import require_memory
from haarkv.tq_ops.output_files import whole_file


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        key: metadata entry that holds the version.
        noun, taker: what it is, and the option or command that reads it.
        remedy: what to do if the file is of no use.
        versions: the first is written, the second with packed tensors.
        blocks: pattern of tensor names that are not in `sha256`.
    """

    key: str
    noun: str
    taker: str
    remedy: str
    versions: tuple[object, ...]
    blocks: str = r"(?!)"

    def require(self, metadata: Mapping[str, object]) -> None:
        """Refuse metadata of another kind (KeyError if unknown) or version."""
        other = next((kind for kind in KINDS if kind.key in metadata), self)
        if other.key != self.key:
            raise ValueError(f"it is a {other.noun}, which {other.taker} takes")
        if (version := metadata[self.key]) not in self.versions:
            raise ValueError(f"its version is {shown(version)}, not {' or '.join(map(str, self.versions))}")

    @contextmanager
    def refusing(self, name: object) -> Iterator[None]:
        """Turns every error of reading a file's content into an `InputError` of one line."""
        try:
            yield
        except OSError as error:
            raise InputError(f"the {self.noun} {name} cannot be read: {error.strerror or error}") from None
        except _CONTENT_ERRORS as error:
            plain = {SafetensorError: "it is truncated or no safetensors file", UnicodeDecodeError: "it is not UTF-8"}
            reason = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else plain.get(type(error), error)
            raise InputError(f"{name} is no {self.noun}: {reason}; {self.remedy}") from None


_CONTENT_ERRORS = (SafetensorError, ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)


CACHE = Kind(
    "haarkv_cache", "stored cache", "--load-cache", "`tq generate --save-cache` writes one", ("1", "2"),
    blocks=r"layers\.\d+\.[kv]\.(?!window$)[^.]+",
)  # fmt: skip
PLAN = Kind("haarkv_plan", "KV plan", "--kv-plan", "`tq plan` writes one", (1,))
"""JSON, without tensors and SHA-256."""
CALIBRATION = Kind("haarkv_calibration", "calibration", "--calibration", "`tq calibrate` writes one", ("4",))
SCORES = Kind("haarkv_eval", "partial result", "`tq eval --resume`", "begin a new one", ("4",))
REPLAY = Kind("haarkv_replay", "replay file", "`tq dev replay`", "`tq validate --replay` writes one", ("5",))
KINDS = (CACHE, PLAN, CALIBRATION, SCORES, REPLAY)


def write(
    path: Path, kind: Kind, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], compress: bool = False
) -> None:  # fmt: skip
    """Write a file, all or nothing.

    Args:
        metadata: the kind's own entries.
        tensors: by name, on the CPU.
        compress: pack tensors of blocks that become at least 5 % smaller.
    Raises:
        InputError: the file cannot be written; an old one stays.
    """
    metadata = {kind.key: str(kind.versions[compress]), **metadata}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if compress:
        tensors, metadata["packed"] = pack(tensors, lambda name: bool(re.fullmatch(kind.blocks, name)))
    metadata["sha256"] = _digest(kind, tensors, metadata)
    with whole_file(path) as half:
        save_file(tensors, half, metadata)


def header(path: Path, kind: Kind) -> dict[str, str]:
    """A file's metadata, not checked against the SHA-256; an InputError if it is not of this kind and a known version."""
    file_size(path, f"the {kind.noun} ")
    with kind.refusing(path), safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        kind.require(metadata)
        return metadata


def read(path: Path, kind: Kind) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's metadata without its SHA-256, and its tensors, unpacked; the caller checks tensors of blocks. An InputError as
    of `header`, or if it is damaged or does not fit into memory.
    """
    metadata = header(path, kind)
    with kind.refusing(path):
        packed = _parse_descriptions(metadata["packed"]) if metadata[kind.key] in kind.versions[1:] else {}
    size = max(file_size(path), sum(size for *_, size in packed.values()))
    require_memory(2 * size, f"the {kind.noun} {path}", "name another file")
    with kind.refusing(path), safe_open(path, "pt") as file:
        # Copies: the file's own pages would be gone if another program made it shorter.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
        if metadata.pop("sha256", "") != _digest(kind, tensors, metadata):
            raise ValueError("its content is not what its SHA-256 was taken of")
        return metadata, unpack(tensors, packed)


def resume(path: Path | None, kind: Kind, run: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Tensor]] | None:
    """`read` what an earlier run left; None if there is no file, an InputError if it is of another run.

    Args:
        run: what both runs must have in common, by a word for the user.
    """
    if path is None or not path.exists():
        return None
    metadata, tensors = read(path, kind)
    with kind.refusing(path):
        before = parse_json(metadata["run"])
        another = next((word for word, value in run.items() if before.get(word) != value), None)
    if another:
        raise InputError(f"{path} was begun with another {another}; begin a new one")
    return metadata, tensors


def _digest(kind: Kind, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    return tensor_digest({name: x for name, x in tensors.items() if not re.fullmatch(kind.blocks, name)}, metadata)


def tensor_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 in hex of metadata, in the order of its keys, then of each tensor by name: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        digest.update(f"{key}={value}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- Packed tensors ---------------------------------------------------------------------------------------------------------

LEAST_GAIN = 0.05
"""Share of its bytes that packing must save of a tensor."""
_SAMPLE = 1 << 18
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16,
                                                                  torch.float32, torch.float8_e4m3fn)}  # fmt: skip
Descriptions = dict[str, tuple[torch.dtype, list[int], int]]
"""Dtype, shape and bytes of packed tensors, by name."""


def pack(tensors: Mapping[str, Tensor], may: Callable[[str], bool]) -> tuple[dict[str, Tensor], str]:
    """All tensors, those that `may` be packed and become smaller as [n] uint8; and their dtypes and shapes as JSON."""
    packed, descriptions = dict(tensors), {}
    for name, tensor in tensors.items():
        if not may(name) or not tensor.numel():
            continue
        by_place = tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.itemsize).T
        content = by_place.contiguous().numpy().tobytes()
        middle = max(0, len(content) // 2 - _SAMPLE // 2)
        sample = content[middle : middle + _SAMPLE]
        if tensor.itemsize == 1 and not _gains(len(_compress(sample)), len(sample)):
            continue
        if _gains(len(frame := _compress(content)), len(content)):
            packed[name] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            descriptions[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return packed, json.dumps(descriptions, sort_keys=True)


def _parse_descriptions(text: str) -> Descriptions:
    """Parse what `pack` says of tensors."""
    raw: Any = parse_json(text)
    descriptions: Descriptions = {}
    for name, entry in raw.items():
        match entry:
            case {"dtype": str(word), "shape": [*shape]} if word in _DTYPES and all(type(n) is int and n > 0 for n in shape):
                descriptions[name] = _DTYPES[word], shape, math.prod(shape) * _DTYPES[word].itemsize
            case _:
                raise ValueError(f"{name} is packed and not described as a tensor")
    return descriptions


def unpack(tensors: Mapping[str, Tensor], descriptions: Descriptions) -> dict[str, Tensor]:
    """Inverse of `pack`; a ValueError if a tensor is not as described. Each frame's size is checked before it is unpacked."""
    result = dict(tensors)
    for name, (dtype, shape, size) in descriptions.items():
        if tensors[name].dtype != torch.uint8 or tensors[name].ndim != 1:
            raise ValueError(f"{name} is said to be packed and is not")
        content = _decompress(name, tensors[name].numpy().tobytes(), size)
        places = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype.itemsize, -1)
        result[name] = places.T.contiguous().view(-1).view(dtype).view(shape)
    return result


def _gains(after: int, before: int) -> bool:
    return after <= (1 - LEAST_GAIN) * before


# zstd is imported where something is packed: a forward, and the checks of one, do without.
def _compress(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(content)


def _decompress(name: str, frame: bytes, size: int) -> bytes:
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
