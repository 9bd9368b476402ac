"""The files of a Hugging Face folder that hold its tensors: safetensors, or what `torch.save` wrote, in the files' pages."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from haarkv.models.hf_config import of_another_form
from haarkv.models.source import Held
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json, size_of
from haarkv.tq_ops.kv.safetensors_header import Header, header_in

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index of a sharded checkpoint or the header of a single file.

    Raises:
        InputError: there are no such files, or they do not fit together.
    """
    for index, single in zip(INDICES, _SINGLES, strict=True):
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
        if (folder / single).is_file():
            return dict.fromkeys(read_header(folder / single), folder / single)
    raise InputError(
        f"{folder} has a config but no weights: neither {_SINGLES[0]} nor {INDICES[0]} is there{of_another_form(folder)}"
    )


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InputError(f"{index} is not an index of shards: it has no weight_map of names")
    for name, file in names.items():
        if not _stays_within(file):
            raise InputError(f"{index} says that {shown(file)} holds {shown(name)}; a shard lies in the model's own folder")
    files = {name: folder / file for name, file in names.items()}
    for path in sorted(set(files.values())):
        if not path.is_file():
            first = next(name for name, file in files.items() if file == path)
            raise InputError(f"{path} is missing; {index.name} says that it holds {first}")
    return files


def _stays_within(file: str) -> bool:
    """Whether a shard's name leads into the model's folder and nowhere else, whatever links lie there."""
    path = Path(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


class _Saved(dict[str, Tensor]):
    """Tensors that `torch.save` wrote, with the methods of a safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name].contiguous()

    get_slice = get_tensor


def opened(path: Path) -> Any:
    """A file whose `get_tensor` and `get_slice` give tensors by name, in the file's pages.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return safe_open(path, framework="pt") if path.suffix != ".bin" else _saved(path, path.stat().st_mtime_ns)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


@cache
def _saved(path: Path, written: int) -> _Saved:  # noqa: ARG001 - a file that is written anew is another
    try:
        content = torch.load(path, "cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a damaged archive makes of itself
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as tensors alone: {reason}; save it as safetensors") from None
    tensors = list(content.values()) if isinstance(content, dict) else [None]
    if not all(isinstance(tensor, Tensor) and tensor.layout == torch.strided for tensor in tensors):
        raise InputError(f"{path} holds other things than plain tensors by name; save it as safetensors")
    return _Saved(content)


def read_header(path: Path) -> Header:
    """Tensor name -> {dtype, shape, data_offsets} of a file, offsets from the file's beginning.

    Raises:
        InputError: no file of tensors, or its header is cut off.
    """
    if path.suffix == ".bin":
        words = {dtype: word for word, dtype in _DTYPES.items()}
        return {
            name: {
                "dtype": words.get(of.dtype, str(of.dtype)),
                "shape": list(of.shape),
                "data_offsets": (0, of.nbytes),
                "in_order": of.is_contiguous(),
            }
            for name, of in opened(path).items()
        }
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(f"{path} is truncated inside its header ({size} bytes); fetch it again")
        try:
            return header_in(file, length)
        except ValueError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from None


def held_in(header: Header, name: str, path: Path) -> Held:
    """What the header of a file says of a tensor.

    Raises:
        InputError: the header does not know it.
    """
    entry = header.get(name)
    if entry is None:
        raise InputError(f"{path} lacks the tensor {name}, which the index says it holds")
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    dtype, size, fault = _DTYPES.get(entry["dtype"]), path.stat().st_size, None
    if dtype is None:
        fault = f"is stored as {shown(entry['dtype'])}; BF16, F16 or F32 can be read"
    elif end - begin != math.prod(shape) * dtype.itemsize:
        fault = f"takes {end - begin} bytes, its shape asks for another number; the file is damaged"
    elif end > size:
        fault = f"ends at byte {end}, the file at {size}: it is truncated; fetch it again"
    return Held(shape, dtype, end - begin, path, fault, in_place=entry.get("in_order", True))
