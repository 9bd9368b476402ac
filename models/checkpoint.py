"""A model's weights from a source's tensors, or random ones of the true shapes; it knows no family and no file format."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.models.parallel import Split
from haarkv.models.source import DRAFTING, CheckpointTensor, KeptBlocks, Part
from haarkv.models.tensors import StoredTensor
from haarkv.models.weights import (
    HEAD,
    Weights,
    assemble,
    checkpoint_tensors,
    in_file_pages,
    is_gathered,
    keeps,
    weight_bytes,
)
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.memory import forget_pages, require_memory
from haarkv.tq_ops.weight import Blocks, Empty, Weight, empty_tensor

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights load."""

NO_SHARED_WEIGHTS: Mapping[str, Weight] = MappingProxyType({})

_AT_ONCE = 2**24
"""Bytes of a file that are in memory beside their copy, about."""
_ROPE_FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True)
class _DrawnTensor(CheckpointTensor):
    """Random numbers, drawn when they are read; all the same if `constant` says so."""

    generator: torch.Generator
    constant: float | None

    def read(self, dtype: torch.dtype, part: Part = None, empty: Empty = empty_tensor) -> Tensor:
        if self.constant is not None:
            whole = torch.full(self.shape, self.constant, dtype=dtype)
        else:
            allocate = empty if part is None else empty_tensor
            whole = allocate(self.shape, dtype).normal_(0.0, 0.02, generator=self.generator)
        return whole if part is None else whole[part].clone()


def random_tensors(specs: Mapping[str, StoredTensor], seed: int = 0) -> dict[str, CheckpointTensor]:
    """Tensors from N(0, 0.02), norms at 1. They share a generator: each is read once, in the order of `specs`."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, spec: StoredTensor) -> CheckpointTensor:
        is_drawn = len(spec.shape) > 1 or name.endswith(".bias")
        constant = None if is_drawn else 1.0 - spec.plus_one
        return _DrawnTensor(spec.shape, None, 0, Path(name), generator=generator, constant=constant)

    return {name: drawn(name, spec) for name, spec in specs.items()}


def random_weights(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0, progress: Progress | None = None, split: Split | None = None
) -> Weights:
    """Weights of `random_tensors`, or one rank's part."""
    tensors = random_tensors(checkpoint_tensors(config), seed)
    return load_weights(Path("random"), tensors, config, dtype, progress, split)


def load_weights(
    path: Path,
    tensors: Mapping[str, CheckpointTensor],
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    split: Split | None = None,
    shared_weights: Mapping[str, Weight] = NO_SHARED_WEIGHTS,
    keep_blocks: KeptBlocks = False,
    mmap: bool = True,
) -> Weights:
    """Load a source's tensors; those that need no conversion stay in the file's pages, others are converted one at a time.

    Args:
        path: of the model, for messages.
        dtype: of the weights in memory, torch.float32 or torch.bfloat16.
        split: read one rank's part of each tensor.
        shared_weights: another model's weights by name, for those that this checkpoint lacks.
        keep_blocks: quantized blocks that are not restored: all, or those of these types.
        mmap: False copies weights that a forward reads whole from the file's pages into faster memory of the process.
    Raises:
        InputError: no weights, or a missing, extra, mis-shaped or truncated tensor, with the tensor's and file's name.
    """
    specs, weights = checkpoint_tensors(config), dict[str, Any]()
    stored = stored_tensors(
        path, tensors, specs, dtype, split, require_room=True, shared_weights=shared_weights, empty=LargePages().empty,
        keep_blocks=keep_blocks, mmap=mmap,
    )  # fmt: skip
    for done, (name, weight) in enumerate(stored, 1):
        weights[name] = weight
        if progress:
            progress(done, len(specs))
    return assemble(config, weights.__getitem__)


def stored_tensors(
    path: Path,
    tensors: Mapping[str, CheckpointTensor],
    specs: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    split: Split | None = None,
    require_room: bool = False,
    shared_weights: Mapping[str, Weight] = NO_SHARED_WEIGHTS,
    empty: Empty = empty_tensor,
    keep_blocks: KeptBlocks = False,
    mmap: bool = True,
) -> Iterator[tuple[str, Any]]:
    """`load_weights` one by one, in the order of `specs`; all are checked before the first comes.

    Args:
        require_room: refuse what memory has no room for, all together.
        empty: allocates each that is converted or copied.
    """
    shared_weights = {
        name: tensor
        for name, tensor in shared_weights.items()
        if name in specs and name not in tensors and tensor.shape == specs[name].shape
    }
    require_tensors(path, tensors, specs, shared_weights)

    if require_room:
        weight_memory = weight_bytes(tensors, specs, dtype, split, keep_blocks)
        # The system may drop pages of the file: they do not count.
        private = (weight_memory if mmap else weight_memory.copied()).private
        require_memory(private, "its weights", "give --dtype bfloat16, or a smaller model")
    for name, spec in specs.items():
        if name in shared_weights:
            yield name, shared_weights[name]
            continue
        tensor, part = tensors[name], split.slices(spec.axes) if split else None
        blocks = tensor.read_blocks(dtype, part) if keeps(tensor.blocks, keep_blocks) else None
        weight: Weight = blocks or spec.in_memory(tensor.read(spec.memory_dtype(dtype), part, empty), dtype)
        in_pages = in_file_pages(tensor, spec, dtype, blocks is not None, split is None)
        yield name, _copy_from_file(weight, empty) if not mmap and in_pages and not is_gathered(name, specs) else weight


def _copy_from_file(weight: Weight, empty: Empty) -> Weight:
    """A weight copied from a file's pages, which the system may drop."""
    data = weight.data if isinstance(weight, Blocks) else weight
    memory_copy = empty(tuple(data.shape), data.dtype)
    rows = max(1, _AT_ONCE * len(data) // data.nbytes)
    for source, copy in zip(torch.split(data, rows), torch.split(memory_copy, rows), strict=True):
        copy.copy_(source)
        if source.is_contiguous():
            forget_pages(source.data_ptr(), source.nbytes)
    return replace(weight, data=memory_copy) if isinstance(weight, Blocks) else memory_copy


def require_tensors(
    path: Path,
    source_tensors: Mapping[str, CheckpointTensor],
    specs: Mapping[str, StoredTensor],
    shared_weights: Container[str] = (),
) -> Mapping[str, CheckpointTensor]:
    """A source's tensors, unless one is missing, extra, mis-shaped or damaged; none is read."""
    shapes = {name: spec.shape for name, spec in specs.items() if name not in shared_weights}
    missing = [name for name in shapes if name not in source_tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{path} lacks the tensor {missing[0]}{more}, which its config asks for")
    # Extra but harmless: the head of a tied model, the drafting layer, and RoPE's frequencies in older Llama checkpoints.
    extra = [
        name
        for name in source_tensors
        if name not in shapes and name != HEAD and not name.startswith(DRAFTING) and not name.endswith(_ROPE_FREQUENCIES)
    ]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(f"{source_tensors[extra[0]].file} holds {extra[0]}{more}, which the config does not know")
    for name, shape in shapes.items():
        if (tensor := source_tensors[name]).shape != shape:
            raise InputError(f"{tensor.file}: {name} has shape {shown(list(tensor.shape))}, the config asks for {list(shape)}")
        if tensor.fault:
            raise InputError(f"{tensor.file}: {name} {tensor.fault}")
    return source_tensors


PAGE = 2 * 2**20
_CHUNK = 256 * 2**20
_LINE = 64


class LargePages:
    """Allocates tensors in chunks of large pages, or the usual ones; a chunk is freed with its last tensor."""

    def __init__(self) -> None:
        self._chunk: Any = None
        self._used = self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `torch.empty` on the host."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        if self._used + nbytes > self._size:
            self._chunk, self._size = _allocate_chunk(nbytes)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-nbytes // _LINE) * _LINE
        return tensor


def _allocate_chunk(nbytes: int) -> tuple[mmap.mmap, int]:
    """A chunk of at least `nbytes` bytes, and its size; without room for a whole chunk, `nbytes`."""
    sizes = [-(-count // PAGE) * PAGE for count in (max(nbytes, _CHUNK), nbytes)]
    try:
        return _memory(sizes[0]), sizes[0]
    except OSError:
        return _memory(sizes[1]), sizes[1]


def _memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on this system, or switched off
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
