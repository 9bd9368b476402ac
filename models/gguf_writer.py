"""Writes a GGUF file whose matrices are quantized, from another GGUF file; entries, names and order of rows stay.

gguf's writer takes the tensors one after the other, so that one is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.models.gguf_file import block_type, block_type_named
from haarkv.models.gguf_quantize import quantize
from haarkv.models.gguf_source import GGUFSource
from haarkv.tq_ops.errors import InputError

_FILE_TYPES = {
    "Q4_K_M": 15, "Q6_K": 18, "Q4_K": 14, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "BF16": 32, "F16": 1,
    "F32": 0,
}  # fmt: skip
"""llama.cpp's numbers of the type that most of a file has."""
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
"""Written anew; a file is written in one part."""
_AT_ONCE = 2**24
"""Numbers that are restored together."""


@dataclass(frozen=True)
class QuantizedFile:
    """What was written.

    Attributes:
        types: number of tensors by gguf's name of their type.
        nbytes: of all tensors.
        copied_tensors: tensors that had the requested type already.
        weighted_tensors: tensors whose errors were weighted by importance.
    """

    types: Mapping[str, int]
    nbytes: int
    copied_tensors: int
    weighted_tensors: int


def mix_type(name: str, shape: tuple[int, ...], mix: str, layers: int, *, tied: bool) -> str | None:
    """gguf's name of a tensor's type in a mix; None of one that no mix quantizes: vectors, routers, short convolutions.

    `q4_k_m` gives Q6_K to the head, and to the projections to V and out of an MLP in the first and last eighth of the layers
    and every third between. Where blocks of 256 do not divide a row, a type of 32 with at least as many bits replaces them.

    Args:
        name: in the file.
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


def _type_bytes(shape: tuple[int, ...], type_name: str) -> int:
    """Bytes of a tensor in a type."""
    kind = block_type_named(type_name)
    return math.prod(shape) // kind.numbers * kind.nbytes


def write_quantized(
    source: GGUFSource,
    path: Path,
    mix: str,
    importance: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[int, int], object] = lambda *_: None,
) -> QuantizedFile:
    """Write a model's file with its matrices in the types of a mix.

    Args:
        source: matrices that are quantized already are restored first, unless they have the requested type.
        path: a file that may be overwritten.
        importance: by Hugging Face's names, [in] fp32 each: mean squares of what a matrix's columns are multiplied with.
        on_tensor: called with (tensors written, tensors in all).
    Raises:
        InputError: a tensor cannot be restored or quantized, by name; or no such mix.
        OSError: the file cannot be written.
    """
    weights, tensors = source.by_stored_name(importance or {}), source.file.tensors
    types = _tensor_types(source, mix)
    copied = {name for name, tensor in tensors.items() if block_type(tensor.kind).name == types[name]}
    writer = _open_writer(source, path, types, mix)
    try:
        for done, name in enumerate(tensors):
            on_tensor(done, len(tensors))
            raw_rows = source.file.stored_rows(tensors[name])
            blocks = raw_rows if name in copied else _encode(source, name, types[name], weights.get(name))
            writer.write_tensor_data(blocks.numpy())
        on_tensor(len(tensors), len(tensors))
    finally:
        writer.close()
    names = list(types.values())
    return QuantizedFile(
        {name: names.count(name) for name in dict.fromkeys(names)},
        sum(_type_bytes(tensors[name].shape, type_name) for name, type_name in types.items()),
        len(copied), len(weights.keys() - copied),
    )  # fmt: skip


def _tensor_types(source: GGUFSource, mix: str) -> dict[str, str]:
    """gguf's name of each tensor's type in a mix; an InputError names one that cannot be restored."""
    tensors, block_count = source.file.tensors, source.file.entries.get(f"{source.architecture}.block_count")
    tied, layers, types = "output.weight" not in tensors, block_count if isinstance(block_count, int) else 0, {}
    for name, tensor in tensors.items():
        if tensor.fault is not None:
            raise InputError(f"{source.path}: {name} {tensor.fault}")
        types[name] = mix_type(name, tensor.shape, mix, layers, tied=tied) or block_type(tensor.kind).name
    return types


def _open_writer(source: GGUFSource, path: Path, types: Mapping[str, str], mix: str) -> gguf.GGUFWriter:
    """A writer that has written all but the tensors."""
    for key, (_, inner) in source.file.kinds.items():
        if inner == gguf.GGUFValueType.ARRAY:
            raise InputError(f"{source.path}: {key} is a list of lists, which is not written")
    writer = gguf.GGUFWriter(path, source.architecture)
    for key, value in source.file.entries.items():
        if key not in _REWRITTEN_KEYS and value != []:
            kind, inner = source.file.kinds[key]
            sub_type = None if inner is None else gguf.GGUFValueType(inner)
            # gguf's writer takes truth values as such.
            exact = bool(value) if kind == gguf.GGUFValueType.BOOL else value
            writer.add_key_value(key, exact, gguf.GGUFValueType(kind), sub_type)
    writer.add_file_type(_FILE_TYPES[mix.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, type_name in types.items():
        shape, kind = source.file.tensors[name].shape, gguf.GGMLQuantizationType[type_name]
        byte_shape = (*shape[:-1], _type_bytes(shape[-1:], type_name))
        writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), _type_bytes(shape, type_name), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _encode(source: GGUFSource, name: str, type_name: str, importance: Tensor | None) -> Tensor:
    """Bytes of a tensor in its new type: [rows, bytes of a row] uint8."""
    tensor = source.file.tensors[name]
    raw_rows, restore = source.file.stored_rows(tensor), block_type(tensor.kind).restore
    # Each matrix for itself: of experts, each has its own importance.
    width, each = tensor.shape[-1], tensor.shape[-2]
    step, parts = max(1, _AT_ONCE // width), list[Tensor]()
    for first in range(0, len(raw_rows), each):
        counts = importance if importance is None or importance.ndim == 1 else importance[first // each]
        for begin in range(first, first + each, step):
            rows = restore(raw_rows[begin : min(begin + step, first + each)]).view(-1, width)
            try:
                parts.append(quantize(rows, type_name, counts))
            except InputError as error:
                raise InputError(f"{source.path}: {name}: {error}") from None
    return torch.cat(parts)
