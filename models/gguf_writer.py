"""A GGUF file whose matrices are quantised, from another or from a folder in Hugging Face's format.

Of another file, all that it says of itself, its names and its order of rows stay; of a folder, `gguf_folder` gives them.

gguf writes the file; tensors go to it one after the other, so that one of them is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.models.footprint import WeightBytes
from haarkv.models.gguf_file import block_type, block_type_named
from haarkv.models.gguf_folder import FolderOrigin
from haarkv.models.gguf_quantize import quantize
from haarkv.models.gguf_source import GGUFSource, stored_name
from haarkv.models.weights import checkpoint_tensors
from haarkv.tq_ops.errors import InputError

_FILE_TYPES = {
    "Q4_K_M": 15, "Q6_K": 18, "Q4_K": 14, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "BF16": 32, "F16": 1,
    "F32": 0,
}  # fmt: skip
"""llama.cpp's numbers of what most of a file is."""
MIXES = tuple(map(str.lower, _FILE_TYPES))
"""Each the type of all matrices but the head, which has at least Q6_K's bits; `q4_k_m` is of Q4_K and Q6_K."""
_FEWER_BITS = ("Q4_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""In place of blocks that do not divide a row."""
_COSTS_MOST = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
_PLAIN_PARTS = ("ffn_gate_inp", "ssm_conv1d", "rope_freqs", "norm")
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.")
_REPLACED = (
    "general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.no",
    "split.count", "split.tensors.count",
)  # fmt: skip
"""What is written anew; a file is written in one part."""
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


def type_of(name: str, shape: tuple[int, ...], mix: str, layers: int, *, tied: bool) -> str | None:
    """gguf's name of the type of a tensor, by its name in a file; None of one that is in no blocks, whatever the mix: vectors,
    routers, short convolutions.

    In `q4_k_m` more bits go to the head, and of the first and the last eighth of the layers, and of the others each third, to
    what costs most: the projections to V, and out of an MLP. Blocks of 256 numbers need rows of whole blocks; where there are
    none, a type of 32 numbers that has at least as many bits takes their place.

    Args:
        layers: of the model.
        tied: the embedding is the head as well.
    Raises:
        InputError: no such mix.
    """
    if mix not in MIXES:
        raise InputError(f"no such type of weights: {mix}; choose from {', '.join(MIXES)}")
    if len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in _PLAIN_PARTS):
        return None
    wanted, is_head = mix.upper(), name == ("token_embd.weight" if tied else "output.weight")
    if mix == "q4_k_m":
        wanted = "Q6_K" if is_head or _has_more_bits(name, layers) else "Q4_K"
    elif is_head and wanted in _FEWER_BITS:
        wanted = "Q6_K"
    types = (wanted, _NARROW.get(wanted, "F16"))
    return next((of for of in types if shape[-1] % block_type_named(of).numbers == 0), "F16")


def _has_more_bits(name: str, layers: int) -> bool:
    layer = _LAYER.match(name)
    if layer is None or not name.endswith(_COSTS_MOST):
        return False
    index, eighth = int(layer[1]), layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def mixed_bytes(config: ModelConfig, mix: str) -> WeightBytes:
    """What a model's weights would take in a file of a mix, from whose pages they are computed with."""
    kept, names = 0, "qwen35" if config.state_shapes else ""
    for name, tensor in checkpoint_tensors(config).items():
        called = type_of(stored_name(name, names), tensor.shape, mix, config.num_layers, tied=config.tied)
        kind = block_type_named(called or "F32")
        kept += math.prod(tensor.shape) // kind.numbers * kind.nbytes
    return WeightBytes(kept=kept)


class FileOrigin:
    """Another GGUF file, from which one is written under its own names and in its order of rows.

    Attributes:
        path: names it in messages.
        architecture: what general.architecture is to be.
    """

    def __init__(self, source: GGUFSource) -> None:
        self.path, self._source, self._file = source.path, source, source.file
        self.architecture = str(self._file.entries.get("general.architecture"))

    def entries(self) -> Mapping[str, Any]:
        """What the file is to say of itself, by key; what this module writes of itself may be among it."""
        for key, (_, inner) in self._file.kinds.items():
            if inner == gguf.GGUFValueType.ARRAY:
                raise InputError(f"{self.path}: {key} is a list of lists, which is not written")
        return self._file.entries

    def kind_of(self, key: str) -> tuple[int, int | None]:
        """gguf's numbers of an entry's kind, and of a list that of its values."""
        return self._file.kinds[key]

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """The shape of each, rows first, and gguf's name of its type; one that cannot be restored is refused."""
        for name, tensor in self._file.tensors.items():
            if tensor.fault is not None:
                raise InputError(f"{self.path}: {name} {tensor.fault}")
        return {name: (of.shape, block_type(of.kind).name) for name, of in self._file.tensors.items()}

    def stored(self, name: str) -> Tensor:
        """Bytes of a whole tensor in that type."""
        return self._file.stored_rows(self._file.tensors[name])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a tensor, of one matrix where there are several: [end - begin, n] fp32."""
        tensor = self._file.tensors[name]
        restore = block_type(tensor.kind).restore
        return restore(self._file.stored_rows(tensor)[begin:end]).view(-1, tensor.shape[-1])

    def by_stored_name(self, of_columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `GGUFSource.by_stored_name`."""
        return self._source.by_stored_name(of_columns)

    def check(self, written: Path) -> None:
        """Names, order and entries are the file's own."""


@dataclass(frozen=True)
class _Planned:
    name: str
    shape: tuple[int, ...]
    before: str
    type: str

    @property
    def count(self) -> int:
        """Rows of all its matrices."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        kind = block_type_named(self.type)
        return self.shape[-1] // kind.numbers * kind.nbytes

    @property
    def nbytes(self) -> int:
        return self.count * self.row_bytes

    @property
    def stays(self) -> bool:
        return self.before == self.type


def write_quantized(
    source: FileOrigin | FolderOrigin,
    path: Path,
    mix: str,
    importance: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[int, int], object] = lambda *_: None,
) -> Written:
    """Write a model's file with its matrices in the types of a mix.

    Args:
        source: matrices that are quantised already are restored first, unless they have the type that is wanted.
        path: a file that may be overwritten.
        importance: by Hugging Face's names, [in] fp32 each: mean squares of what a matrix's columns are multiplied with.
        on_tensor: called with (tensors written, tensors in all).
    Raises:
        InputError: a tensor cannot be restored or quantised, by name; no such mix; or a file cannot say what the model is.
        OSError: the file cannot be written.
    """
    weights = source.by_stored_name(importance or {})
    planned = _plan(source, mix)
    writer = _begun(source, path, planned, mix)
    weighted = 0
    try:
        for done, of in enumerate(planned):
            on_tensor(done, len(planned))
            of_columns = weights.get(of.name)
            weighted += of_columns is not None and not of.stays
            writer.write_tensor_data(_stored(source, of, of_columns).numpy())
        on_tensor(len(planned), len(planned))
    finally:
        writer.close()
    source.check(path)
    types = [of.type for of in planned]
    return Written(
        {name: types.count(name) for name in dict.fromkeys(types)},
        sum(of.nbytes for of in planned),
        sum(of.stays for of in planned), weighted,
    )  # fmt: skip


def _plan(source: FileOrigin | FolderOrigin, mix: str) -> list[_Planned]:
    tensors = source.tensors()
    tied, said = "output.weight" not in tensors, source.entries().get(f"{source.architecture}.block_count")
    layers = said if isinstance(said, int) else 0
    planned = []
    for name, (shape, stored) in tensors.items():
        planned.append(_Planned(name, shape, stored, type_of(name, shape, mix, layers, tied=tied) or stored))
    return planned


def _begun(source: FileOrigin | FolderOrigin, path: Path, planned: list[_Planned], mix: str) -> gguf.GGUFWriter:
    """A writer that has written all but the tensors."""
    writer = gguf.GGUFWriter(path, source.architecture)
    for key, value in source.entries().items():
        if key not in _REPLACED and value != []:
            kind, inner = source.kind_of(key) or _own_kind(value)
            sub_type = None if inner is None else gguf.GGUFValueType(inner)
            # gguf's writer takes truth values as such.
            exact = bool(value) if kind == gguf.GGUFValueType.BOOL else value
            writer.add_key_value(key, exact, gguf.GGUFValueType(kind), sub_type)
    writer.add_file_type(_FILE_TYPES[mix.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for of in planned:
        shape = (*of.shape[:-1], of.row_bytes)
        writer.add_tensor_info(of.name, shape, np.dtype(np.uint8), of.nbytes, gguf.GGMLQuantizationType[of.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _own_kind(value: Any) -> tuple[int, int | None]:
    """gguf's numbers of the kind that llama.cpp's converter gives such a value, and of a list that of its values."""
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        inner = _own_kind(value[0])[0]
        return kinds.ARRAY, kinds.INT32 if inner == kinds.UINT32 else inner
    known = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    return known[type(value)], None


def _stored(source: FileOrigin | FolderOrigin, of: _Planned, importance: Tensor | None) -> Tensor:
    """Bytes of a tensor in its new type: [rows, bytes of a row] uint8."""
    if of.stays:
        return source.stored(of.name)
    # Each matrix for itself: of experts, each has its own importance.
    width, each = of.shape[-1], of.shape[-2] if len(of.shape) > 1 else of.count
    step, parts = max(1, _AT_ONCE // width), list[Tensor]()
    for first in range(0, of.count, each):
        counts = importance if importance is None or importance.ndim == 1 else importance[first // each]
        for begin in range(first, first + each, step):
            rows = source.rows(of.name, begin, min(begin + step, first + each))
            try:
                parts.append(quantize(rows, of.type, counts))
            except InputError as error:
                raise InputError(f"{source.path}: {of.name}: {error}") from None
    return torch.cat(parts)
