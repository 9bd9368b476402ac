"""A GGUF file whose matrices are quantised anew, from another: all it says of itself, its names and its order of rows stay.

gguf writes the file; tensors go to it one after the other, so that one of them is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.models.gguf_file import GGUFTensor, block_type, block_type_named
from haarkv.models.gguf_mix import place_called, stays_plain, type_of
from haarkv.models.gguf_quantize import quantize
from haarkv.models.gguf_source import GGUFSource
from haarkv.tq_ops.errors import InputError

_FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q4_K_M": 15, "Q6_K": 18,
    "BF16": 32,
}  # fmt: skip
"""llama.cpp's numbers of what most of a file is."""
_REPLACED = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")
_AT_ONCE = 2**24
"""Numbers that are restored together."""


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        types: tensors of each type, by gguf's name of it.
        nbytes: of all tensors.
        copied: tensors that had the type that they were to have, and were copied as they are.
        weighted: tensors whose errors were counted by importance.
    """

    types: Mapping[str, int]
    nbytes: int
    copied: int
    weighted: int


@dataclass(frozen=True)
class _Planned:
    name: str
    tensor: GGUFTensor
    type: str

    @property
    def row_bytes(self) -> int:
        kind = block_type_named(self.type)
        return self.tensor.shape[-1] // kind.numbers * kind.nbytes

    @property
    def stays(self) -> bool:
        return block_type(self.tensor.kind).name == self.type


def write_quantized(
    source: GGUFSource,
    path: Path,
    mix: str,
    importance: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[int, int], object] = lambda *_: None,
) -> Written:
    """Write a model's file with its matrices in the types of a mix.

    Args:
        source: a GGUF file. Matrices that are quantised already are restored first, unless they have the type that is wanted.
        path: a file that may be overwritten.
        importance: by Hugging Face's names, [in] fp32 each: mean squares of what a matrix's columns are multiplied with.
        on_tensor: called with (tensors written, tensors in all).
    Raises:
        InputError: a tensor cannot be restored or quantised, by name; no such mix.
        OSError: the file cannot be written.
    """
    weights = source.by_stored_name(importance or {})
    planned = _plan(source, mix)
    writer = _begun(source, path, planned, mix)
    weighted = 0
    try:
        for done, of in enumerate(planned):
            on_tensor(done, len(planned))
            # Of experts, each its own; a row of each matrix then has the importance of its expert.
            of_columns = weights.get(of.name)
            weighted += of_columns is not None and not of.stays
            writer.write_tensor_data(_stored(source, of, of_columns).numpy())
        on_tensor(len(planned), len(planned))
    finally:
        writer.close()
    types = [of.type for of in planned]
    return Written(
        {name: types.count(name) for name in dict.fromkeys(types)},
        sum(of.row_bytes * (of.tensor.nbytes // of.tensor.row_bytes) for of in planned),
        sum(of.stays for of in planned), weighted,
    )  # fmt: skip


def _plan(source: GGUFSource, mix: str) -> list[_Planned]:
    file = source.file
    planned, tied = list[_Planned](), "output.weight" not in file.tensors
    said = file.entries.get(f"{file.entries.get('general.architecture')}.block_count")
    layers = said if isinstance(said, int) else 0
    for name, tensor in file.tensors.items():
        if tensor.fault is not None:
            raise InputError(f"{source.path}: {name} {tensor.fault}")
        plain = stays_plain(name, tensor.shape)
        stored = block_type(tensor.kind).name
        wanted = stored if plain else type_of(place_called(name, layers, tied=tied), tensor.shape[-1], mix)
        planned.append(_Planned(name, tensor, wanted))
    return planned


def _begun(source: GGUFSource, path: Path, planned: list[_Planned], mix: str) -> gguf.GGUFWriter:
    """A writer that has written all but the tensors."""
    file = source.file
    writer = gguf.GGUFWriter(path, str(file.entries.get("general.architecture")))
    for key, value in file.entries.items():
        kind, inner = file.kinds[key]
        if key in _REPLACED or value == []:
            continue
        if inner == gguf.GGUFValueType.ARRAY:
            raise InputError(f"{source.path}: {key} is a list of lists, which is not written")
        sub_type = None if inner is None else gguf.GGUFValueType(inner)
        writer.add_key_value(key, _exact(value, kind), gguf.GGUFValueType(kind), sub_type)
    writer.add_file_type(_FILE_TYPES[mix.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for of in planned:
        shape, nbytes = (*of.tensor.shape[:-1], of.row_bytes), of.row_bytes * (of.tensor.nbytes // of.tensor.row_bytes)
        writer.add_tensor_info(of.name, shape, np.dtype(np.uint8), nbytes, gguf.GGMLQuantizationType[of.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _exact(value: Any, kind: int) -> Any:
    """A value as gguf's writer takes it: a list of truth values as such."""
    return bool(value) if kind == gguf.GGUFValueType.BOOL else value


def _stored(source: GGUFSource, of: _Planned, importance: Tensor | None) -> Tensor:
    """Bytes of a tensor in its new type: [rows, bytes of a row] uint8."""
    stored = source.file.stored_rows(of.tensor)
    if of.stays:
        return stored
    width, restore = of.tensor.shape[-1], block_type(of.tensor.kind).restore
    each = len(stored) // len(importance) if importance is not None and importance.ndim == 2 else len(stored)
    step, parts = max(1, _AT_ONCE // width), list[Tensor]()
    for first in range(0, len(stored), each):
        counts = importance if importance is None or importance.ndim == 1 else importance[first // each]
        for begin in range(first, first + each, step):
            rows = restore(stored[begin : min(begin + step, first + each)]).view(-1, width)
            try:
                parts.append(quantize(rows, of.type, counts))
            except InputError as error:
                raise InputError(f"{source.path}: {of.name}: {error}") from None
    return torch.cat(parts)
