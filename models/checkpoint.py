"""A model's weights from what holds them, or random of the true shapes. It knows no family and no file format."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.models.footprint import WeightBytes, in_file_pages, is_picked, keeps, random_bytes, weight_bytes
from haarkv.models.parallel import Split
from haarkv.models.source import DRAFTING, Empty, Held, KeptBlocks, TensorSource
from haarkv.models.weights import HEAD, Weights, assemble, checkpoint_shapes, checkpoint_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.memory import forget_pages, require_memory
from haarkv.tq_ops.weight import Blocks, Weight

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights load."""

NOTHING_LENT: Mapping[str, Weight] = MappingProxyType({})

_AT_ONCE = 2**24
"""Bytes of a file's pages that are in memory beside their copy, about."""
_ROPE_FREQUENCIES = ".rotary_emb.inv_freq"


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    progress: Progress | None = None,
    split: Split | None = None,
    device: torch.device | str = "cpu",
) -> Weights:
    """Weights of the true shapes drawn from N(0, 0.02), norms at 1: for latency work without a checkpoint.

    Args:
        split: keep one rank's part of what the whole model would hold.
        device: where they are drawn and stay; another kind of device draws other numbers.
    """
    on_host = torch.device(device).type == "cpu"
    tensors = random_tensors(config, dtype, seed, device, LargePages().empty if on_host and split is None else None)
    if on_host:
        _require_room(random_bytes(config, dtype, split))
    if split:
        stored, part = checkpoint_tensors(config), split
        tensors = ((name, tensor[part.of(stored[name].axes)].clone()) for name, tensor in tensors)
    return _gathered(config, tensors, progress)


def random_tensors(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | str = "cpu",
    empty: Empty | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `checkpoint_shapes`: one of them is in memory at a time.

    Args:
        empty: makes room for each on the host; torch on `device` unless given.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in checkpoint_tensors(config).items():
        shape = tensor.shape
        if len(shape) == 1 and not name.endswith(".bias"):
            yield name, torch.ones(shape, dtype=tensor.kept_as(dtype), device=device)
        else:
            kept = tensor.kept_as(dtype)
            room = torch.empty(shape, dtype=kept, device=device) if empty is None else empty(shape, kept)
            yield name, room.normal_(0.0, 0.02, generator=generator)


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    split: Split | None = None,
    lent: Mapping[str, Weight] = NOTHING_LENT,
    keep_blocks: KeptBlocks = False,
    mmap: bool = True,
) -> Weights:
    """Load what a source holds.

    Files are memory-mapped: a tensor that needs no conversion stays in the file's pages and takes no memory of its own; others
    are converted one at a time.

    Args:
        dtype: of the weights in memory, torch.float32 or torch.bfloat16.
        split: read one rank's part of each tensor, and no more.
        lent: tensors of another model by name, for those that this checkpoint leaves out.
        keep_blocks: leave matrices that are stored in quantised blocks as they are, instead of restoring them now: all, or
            those of some types, by name.
        mmap: leave in the file's pages what needs no conversion. False copies what a forward reads whole into memory of this
            process, from which it is read faster.
    Raises:
        InputError: no weights, or a missing, extra, mis-shaped or truncated tensor, with the tensor's and file's name.
    """
    converted = stored_tensors(
        source, config, dtype, split, before=_require_room, lent=lent, empty=LargePages().empty, keep_blocks=keep_blocks,
        mmap=mmap,
    )  # fmt: skip
    return _gathered(config, converted, progress)


def _require_room(weights: WeightBytes) -> None:
    """Refuse weights that this machine cannot hold now; what stays in the file's pages can be dropped, and is not counted."""
    require_memory(weights.own, "its weights", "give --dtype bfloat16, or a smaller model")


def stored_tensors(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    split: Split | None = None,
    wanted: Callable[[str], bool] | None = None,
    before: Callable[[WeightBytes], object] | None = None,
    lent: Mapping[str, Weight] = NOTHING_LENT,
    empty: Empty | None = None,
    keep_blocks: KeptBlocks = False,
    mmap: bool = True,
) -> Iterator[tuple[str, Any]]:
    """The same one by one, in the order of `checkpoint_shapes`; all are checked before the first comes.

    Args:
        wanted: of a tensor's name, whether it is read; all are unless given.
        before: called once, before the first comes, with what all will take.
        lent, keep_blocks, mmap: as in `load_weights`; what is lent comes as it is.
        empty: makes room for each that is converted or copied; torch unless given.
    Raises:
        InputError: as `load_weights`.
    """
    shapes, held = checkpoint_shapes(config), source.tensors()
    lent = {name: tensor for name, tensor in lent.items() if name not in held and tensor.shape == shapes.get(name)}
    shapes = {name: shape for name, shape in shapes.items() if name not in lent}
    _compare(source.path, shapes, held, tied=config.tied)

    if before:
        counted = weight_bytes(held, config, dtype, split, keep_blocks)
        before(counted if mmap else counted.copied())
    for name, tensor in checkpoint_tensors(config).items():
        if wanted and not wanted(name):
            continue
        if name in lent:
            yield name, lent[name]
        else:
            part = split.of(tensor.axes) if split else None
            loaded: Weight | None = source.blocks(name, dtype, part) if keeps(held[name], keep_blocks) else None
            blocks = loaded is not None
            if loaded is None:
                loaded = tensor.in_memory(source.read(name, tensor.kept_as(dtype), part, empty), dtype)
            if not mmap and not is_picked(name, config) and in_file_pages(held[name], tensor, dtype, blocks, split is None):
                loaded = _copied(loaded, empty)
            yield name, loaded


def _copied(weight: Weight, empty: Empty | None) -> Weight:
    """A weight from pages of a file in memory of this process; the pages are not read again."""
    data = weight.data if isinstance(weight, Blocks) else weight
    own = torch.empty(data.shape, dtype=data.dtype) if empty is None else empty(tuple(data.shape), data.dtype)
    rows = max(1, _AT_ONCE * len(data) // data.nbytes)
    for source, copy in zip(torch.split(data, rows), torch.split(own, rows), strict=True):
        copy.copy_(source)
        if source.is_contiguous():
            forget_pages(source.data_ptr(), source.nbytes)
    return replace(weight, data=own) if isinstance(weight, Blocks) else own


def held_for(source: TensorSource, config: ModelConfig) -> Mapping[str, Held]:
    """Every tensor of a source by name, once those that a config asks for were compared with it; none is read."""
    held = source.tensors()
    _compare(source.path, checkpoint_shapes(config), held, tied=config.tied)
    return held


def _gathered(config: ModelConfig, tensors: Iterator[tuple[str, Any]], progress: Progress | None) -> Weights:
    """A whole model of a stream of its tensors."""
    total, found = len(checkpoint_shapes(config)), {}
    for done, (name, tensor) in enumerate(tensors, 1):
        found[name] = tensor
        if progress:
            progress(done, total)
    return assemble(config, found.__getitem__)


def _compare(path: Path, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Held], *, tied: bool) -> None:
    """Refuse tensors that are missing, that nobody asked for, of another shape, or that cannot be read."""
    missing = [name for name in shapes if name not in held]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{path} lacks the tensor {missing[0]}{more}, which its config asks for")
    # Not read are a copy of the embedding as the head of a tied model, the drafting layer, and RoPE's frequencies, which older
    # Llama checkpoints store in every layer and the config gives.
    unread = {HEAD} if tied else set()
    extra = [
        name
        for name in held
        if name not in shapes and name not in unread and not name.startswith(DRAFTING) and not name.endswith(_ROPE_FREQUENCIES)
    ]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(f"{held[extra[0]].file} holds {extra[0]}{more}, which the config does not know")
    for name, shape in shapes.items():
        if (stored := held[name]).shape != shape:
            raise InputError(f"{stored.file}: {name} has shape {shown(list(stored.shape))}, the config asks for {list(shape)}")
        if stored.fault:
            raise InputError(f"{stored.file}: {name} {stored.fault}")


PAGE = 2 * 2**20
_CHUNK = 256 * 2**20
_LINE = 64


class LargePages:
    """Tensors one after the other in chunks of large pages; a chunk is given back when its last tensor is gone.

    What no tensor is written to takes no memory. Where there are no large pages, these are the system's usual ones.
    """

    def __init__(self) -> None:
        self._chunk: Any = None
        self._used = self._size = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor on the host whose numbers are whatever they are, as of `torch.empty`."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        if self._used + nbytes > self._size:
            self._chunk, self._size = _chunk_of(nbytes)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-nbytes // _LINE) * _LINE
        return tensor


def _chunk_of(nbytes: int) -> tuple[mmap.mmap, int]:
    """A chunk of at least `nbytes` bytes, and its size. A process that may not have a whole one gets what it needs."""
    sizes = [-(-count // PAGE) * PAGE for count in (max(nbytes, _CHUNK), nbytes)]
    try:
        return _memory(sizes[0]), sizes[0]
    except OSError:
        return _memory(sizes[1]), sizes[1]


def _memory(nbytes: int) -> mmap.mmap:
    """Memory of this process alone. The kernel aligns whole large pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on this system, or switched off
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
