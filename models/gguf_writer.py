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
_REWRITTEN_KEYS = (
    "general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.no",
    "split.count", "split.tensors.count",
)  # fmt: skip
"""What is written anew; a file is written in one part."""
_AT_ONCE = 2**24
"""Numbers that are restored together."""


@dataclass(frozen=True)
class QuantizedFile:
    """What was written.

    Attributes:
        types: tensors of each type, by gguf's name of it.
        nbytes: of all tensors.
        copied_tensors: those that had the type that they were to have, and were copied as they are.
        weighted_tensors: those whose errors were counted by importance.
    """

    types: Mapping[str, int]
    nbytes: int
    copied_tensors: int
    weighted_tensors: int


def mix_type(name: str, shape: tuple[int, ...], mix: str, layers: int, *, tied: bool) -> str | None:
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
    type_name, is_head = mix.upper(), name == ("token_embd.weight" if tied else "output.weight")
    if mix == "q4_k_m":
        type_name = "Q6_K" if is_head or _has_more_bits(name, layers) else "Q4_K"
    elif is_head and type_name in _FEWER_BITS:
        type_name = "Q6_K"
    types = (type_name, _NARROW.get(type_name, "F16"))
    return next((kind for kind in types if shape[-1] % block_type_named(kind).numbers == 0), "F16")


def _has_more_bits(name: str, layers: int) -> bool:
    layer = _LAYER.match(name)
    if layer is None or not name.endswith(_COSTS_MOST):
        return False
    index, eighth = int(layer[1]), layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def mixed_bytes(config: ModelConfig, mix: str) -> WeightBytes:
    """What a model's weights would take in a file of a mix, from whose pages they are computed with."""
    nbytes, names = 0, "qwen35" if config.state_shapes else ""
    for name, tensor in checkpoint_tensors(config).items():
        type_name = mix_type(stored_name(name, names), tensor.shape, mix, config.num_layers, tied=config.tied)
        kind = block_type_named(type_name or "F32")
        nbytes += math.prod(tensor.shape) // kind.numbers * kind.nbytes
    return WeightBytes(mapped=nbytes)


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

    def entry_kind(self, key: str) -> tuple[int, int | None]:
        """gguf's numbers of an entry's kind, and of a list that of its values."""
        return self._file.kinds[key]

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """The shape of each, rows first, and gguf's name of its type; one that cannot be restored is refused."""
        for name, tensor in self._file.tensors.items():
            if tensor.fault is not None:
                raise InputError(f"{self.path}: {name} {tensor.fault}")
        return {name: (entry.shape, block_type(entry.kind).name) for name, entry in self._file.tensors.items()}

    def tensor_bytes(self, name: str) -> Tensor:
        """Bytes of a whole tensor in that type."""
        return self._file.stored_rows(self._file.tensors[name])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a tensor, of one matrix where there are several: [end - begin, n] fp32."""
        tensor = self._file.tensors[name]
        restore = block_type(tensor.kind).restore
        return restore(self._file.stored_rows(tensor)[begin:end]).view(-1, tensor.shape[-1])

    def by_stored_name(self, column_values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `GGUFSource.by_stored_name`."""
        return self._source.by_stored_name(column_values)

    def check(self, gguf_path: Path) -> None:
        """Names, order and entries are the file's own."""


@dataclass(frozen=True)
class _TensorPlan:
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
) -> QuantizedFile:
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
    tensor_plans = _plan(source, mix)
    writer = _open_writer(source, path, tensor_plans, mix)
    weighted_count = 0
    try:
        for done, tensor_plan in enumerate(tensor_plans):
            on_tensor(done, len(tensor_plans))
            column_values = weights.get(tensor_plan.name)
            weighted_count += column_values is not None and not tensor_plan.stays
            writer.write_tensor_data(_encode(source, tensor_plan, column_values).numpy())
        on_tensor(len(tensor_plans), len(tensor_plans))
    finally:
        writer.close()
    source.check(path)
    types = [tensor_plan.type for tensor_plan in tensor_plans]
    return QuantizedFile(
        {name: types.count(name) for name in dict.fromkeys(types)},
        sum(tensor_plan.nbytes for tensor_plan in tensor_plans),
        sum(tensor_plan.stays for tensor_plan in tensor_plans), weighted_count,
    )  # fmt: skip


def _plan(source: FileOrigin | FolderOrigin, mix: str) -> list[_TensorPlan]:
    tensors = source.tensors()
    tied, block_count = "output.weight" not in tensors, source.entries().get(f"{source.architecture}.block_count")
    layers = block_count if isinstance(block_count, int) else 0
    tensor_plans = []
    for name, (shape, type_name) in tensors.items():
        tensor_plans.append(_TensorPlan(name, shape, type_name, mix_type(name, shape, mix, layers, tied=tied) or type_name))
    return tensor_plans


def _open_writer(source: FileOrigin | FolderOrigin, path: Path, tensor_plans: list[_TensorPlan], mix: str) -> gguf.GGUFWriter:
    """A writer that has written all but the tensors."""
    writer = gguf.GGUFWriter(path, source.architecture)
    for key, value in source.entries().items():
        if key not in _REWRITTEN_KEYS and value != []:
            kind, inner = source.entry_kind(key) or _own_kind(value)
            sub_type = None if inner is None else gguf.GGUFValueType(inner)
            # gguf's writer takes truth values as such.
            exact = bool(value) if kind == gguf.GGUFValueType.BOOL else value
            writer.add_key_value(key, exact, gguf.GGUFValueType(kind), sub_type)
    writer.add_file_type(_FILE_TYPES[mix.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor_plan in tensor_plans:
        shape = (*tensor_plan.shape[:-1], tensor_plan.row_bytes)
        writer.add_tensor_info(
            tensor_plan.name, shape, np.dtype(np.uint8), tensor_plan.nbytes, gguf.GGMLQuantizationType[tensor_plan.type]
        )
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
    kind_by_type = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    return kind_by_type[type(value)], None


def _encode(source: FileOrigin | FolderOrigin, tensor_plan: _TensorPlan, importance: Tensor | None) -> Tensor:
    """Bytes of a tensor in its new type: [rows, bytes of a row] uint8."""
    if tensor_plan.stays:
        return source.tensor_bytes(tensor_plan.name)
    # Each matrix for itself: of experts, each has its own importance.
    width, each = tensor_plan.shape[-1], tensor_plan.shape[-2] if len(tensor_plan.shape) > 1 else tensor_plan.count
    step, parts = max(1, _AT_ONCE // width), list[Tensor]()
    for first in range(0, tensor_plan.count, each):
        counts = importance if importance is None or importance.ndim == 1 else importance[first // each]
        for begin in range(first, first + each, step):
            rows = source.rows(tensor_plan.name, begin, min(begin + step, first + each))
            try:
                parts.append(quantize(rows, tensor_plan.type, counts))
            except InputError as error:
                raise InputError(f"{source.path}: {tensor_plan.name}: {error}") from None
    return torch.cat(parts)
