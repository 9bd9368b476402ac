"""Weights of a dense DecoderModel: from Hugging Face safetensors, memory-mapped, or random of the true shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from haarkv.models.base import DecoderConfig
from haarkv.tq_ops.errors import InputError

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights load."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; projections are [out, in] as Hugging Face stores them."""

    input_norm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o_proj: Tensor
    post_norm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True)
class Weights:
    """A whole model; `lm_head` is `embedding` itself where the head is tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in the order in which a forward meets them."""
        yield EMBEDDING, self.embedding
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                yield _LAYER.format(index, _HF_NAMES[field.name]), getattr(layer, field.name)
        yield FINAL_NORM, self.final_norm
        if self.lm_head is not self.embedding:
            yield HEAD, self.lm_head

    def to(self, device: torch.device) -> Weights:
        """Copies on another device; a tied head stays tied."""
        embedding = self.embedding.to(device)
        layers = tuple(
            LayerWeights(**{f.name: getattr(layer, f.name).to(device) for f in fields(layer)}) for layer in self.layers
        )
        head = embedding if self.lm_head is self.embedding else self.lm_head.to(device)
        return Weights(embedding, layers, self.final_norm.to(device), head)


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.{}.{}.weight"
_HF_NAMES = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o_proj": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


def layer_names(index: int) -> dict[str, str]:
    """Hugging Face name of each field of a layer's `LayerWeights`."""
    return {field: _LAYER.format(index, name) for field, name in _HF_NAMES.items()}


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each field of `LayerWeights`."""
    hidden, dim = config.hidden_size, config.head_dim
    q, kv, mlp = config.num_heads * dim, config.num_kv_heads * dim, config.intermediate_size
    return {
        "input_norm": (hidden,), "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
        "q_norm": (dim,), "k_norm": (dim,), "o_proj": (hidden, q), "post_norm": (hidden,),
        "gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp),
    }  # fmt: skip


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor a checkpoint of this config must hold."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        for field, shape in layer_shapes(config).items():
            shapes[_LAYER.format(index, _HF_NAMES[field])] = shape
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def assemble(config: DecoderConfig, get: Callable[[str], Tensor]) -> Weights:
    """Build `Weights` from a lookup by Hugging Face name."""
    embedding = get(EMBEDDING)
    layers = tuple(
        LayerWeights(**{field: get(_LAYER.format(index, name)) for field, name in _HF_NAMES.items()})
        for index in range(config.num_layers)
    )
    final_norm = get(FINAL_NORM)
    return Weights(embedding, layers, final_norm, embedding if config.tie_word_embeddings else get(HEAD))


def random_weights(config: DecoderConfig, dtype: torch.dtype, seed: int = 0, progress: Progress | None = None) -> Weights:
    """Weights of the true shapes drawn from N(0, 0.02), norms at 1: for latency work without a checkpoint."""
    return _gathered(config, random_tensors(config, dtype, seed), progress)


def random_tensors(config: DecoderConfig, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `checkpoint_shapes`: one of them is in memory at a time."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in checkpoint_shapes(config).items():
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype)
        else:
            yield name, torch.empty(shape, dtype=dtype).normal_(0.0, 0.02, generator=generator)


def load_weights(folder: Path, config: DecoderConfig, dtype: torch.dtype, progress: Progress | None = None) -> Weights:
    """Load a checkpoint folder, one file or sharded.

    Files are memory-mapped: a tensor whose dtype is already `dtype` stays in the file's pages and takes no memory of its
    own; others are converted one at a time.

    Args:
        dtype: of the weights in memory, torch.float32 or torch.bfloat16.
    Raises:
        InputError: no weights, or a missing, extra, mis-shaped or truncated tensor, with the tensor's and file's name.
    """
    return _gathered(config, stored_tensors(folder, config, dtype), progress)


def stored_tensors(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `checkpoint_shapes`; all are checked before the first comes.

    Raises:
        InputError: as `load_weights`.
    """
    shapes = checkpoint_shapes(config)
    files = _files_of_tensors(folder)
    _compare_names(folder, shapes, files, tied=config.tie_word_embeddings)
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    for name, shape in shapes.items():
        _check_tensor(name, shape, files[name], headers[files[name]])
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in headers}
        for name in shapes:
            yield name, opened[files[name]].get_tensor(name).to(dtype)


def _gathered(config: DecoderConfig, tensors: Iterator[tuple[str, Tensor]], progress: Progress | None) -> Weights:
    """A whole model of a stream of its tensors."""
    total, found = len(checkpoint_shapes(config)), {}
    for done, (name, tensor) in enumerate(tensors, 1):
        found[name] = tensor
        if progress:
            progress(done, total)
    return assemble(config, found.__getitem__)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index of a sharded checkpoint or the header of a single file."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / str(file) for name, file in names.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is not an index of safetensors shards: {error}") from None
        for path in sorted(set(files.values())):
            if not path.is_file():
                first = next(name for name, file in files.items() if file == path)
                raise InputError(f"{path} is missing; {index.name} says that it holds {first}")
        return files
    single = folder / _SINGLE
    if not single.is_file():
        raise InputError(f"{folder} has a config but no weights: neither {_SINGLE} nor {_INDEX} is there")
    return dict.fromkeys(read_header(single), single)


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file, offsets from the file's beginning.

    Raises:
        InputError: not a safetensors file, or its header is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(f"{path} is truncated inside its header ({size} bytes); fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for entry in header.values():
                begin, end = entry["data_offsets"]
                entry["data_offsets"] = [begin + 8 + length, end + 8 + length]
                entry["dtype"], entry["shape"] = str(entry["dtype"]), list(entry["shape"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InputError(f"{path} is not a safetensors file") from None
    return dict(header)


def _compare_names(folder: Path, shapes: dict[str, tuple[int, ...]], files: dict[str, Path], *, tied: bool) -> None:
    missing = [name for name in shapes if name not in files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder} lacks the tensor {missing[0]}{more}, which its config asks for")
    # Some checkpoints of tied models carry a copy of the embedding as a head; it is not read.
    extra = [name for name in files if name not in shapes and not (tied and name == HEAD)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(f"{files[extra[0]]} holds {extra[0]}{more}, which the config does not know")


def _check_tensor(name: str, shape: tuple[int, ...], path: Path, header: dict[str, dict[str, Any]]) -> None:
    entry = header.get(name)
    if entry is None:
        raise InputError(f"{path} lacks the tensor {name}, which the index says it holds")
    if tuple(entry["shape"]) != shape:
        raise InputError(f"{path}: {name} has shape {list(entry['shape'])}, the config asks for {list(shape)}")
    if entry["dtype"] not in _WIDTHS:
        raise InputError(f"{path}: {name} is stored as {entry['dtype']}; BF16, F16 or F32 can be read")
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * _WIDTHS[entry["dtype"]]:
        raise InputError(f"{path}: {name} takes {end - begin} bytes, its shape asks for another number; the file is damaged")
    if end > path.stat().st_size:
        raise InputError(f"{path} is truncated: {name} ends at byte {end}, the file at {path.stat().st_size}; fetch it again")


_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
