"""What a model takes in memory, by what a source says of its tensors: counted before any of it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from haarkv.models.config import ModelConfig
from haarkv.models.layer import kind_of
from haarkv.models.parallel import Split
from haarkv.models.source import Held, KeptBlocks
from haarkv.models.tensors import StoredTensor
from haarkv.models.weights import EMBEDDING, HEAD, checkpoint_tensors

IN_PLACE: Mapping[str, float] = MappingProxyType({})
_FP32 = torch.float32.itemsize
_AROUND = 2**16
"""Bytes of a file that Linux maps at once, where one of them is asked for and the others are in memory."""
CODE = 2**24
"""Bytes of torch's and the kernels' code that come into memory with a first forward, about."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that weights take.

    Attributes:
        own: of the process: restored, converted, put in another order than the file's, or drawn.
        kept: in the pages of their file and computed with there. The system may drop those pages and read them again.
        passed: pages that are read once, as what they hold is restored, and may be dropped for good.
        picked: of `kept`, an embedding that is not the head as well: of it a forward reads its tokens' rows alone.
        rows: of that embedding.
    """

    own: int = 0
    kept: int = 0
    passed: int = 0
    picked: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        """What is computed with."""
        return self.own + self.kept

    def copied(self) -> WeightBytes:
        """The same weights once what a forward reads whole was copied from the file's pages into memory of the process."""
        return replace(self, own=self.own + self.kept - self.picked, kept=self.picked)

    @property
    def mapped(self) -> int:
        """Of the file's pages, what was read when the model is loaded."""
        return self.kept + self.passed

    def mapped_by(self, tokens: Iterable[int], more: int) -> int:
        """Of the file's pages, what was read once a text has been written: of `picked`, what lies around its tokens' rows."""
        if not self.picked:
            return self.mapped
        row = self.picked // self.rows
        around = {place // _AROUND for token in set(tokens) for place in (token * row, (token + 1) * row - 1)}
        return self.mapped - self.picked + min(self.picked, _AROUND * (len(around) + more))


def keeps(held: Held, keep_blocks: KeptBlocks) -> bool:
    """Whether a tensor's blocks stay as they are."""
    return held.blocks is not None and (keep_blocks if isinstance(keep_blocks, bool) else held.blocks in keep_blocks)


def in_file_pages(held: Held, tensor: StoredTensor, dtype: torch.dtype, blocks: bool, whole: bool) -> bool:
    """Whether a tensor as it is loaded lies in the pages of its file.

    Args:
        dtype: that weights are loaded as.
        blocks: it is kept in blocks. Some rows and columns of them are a view; a part of dense rows is copied.
        whole: no part of it is taken.
    """
    as_it_is = blocks or (held.dtype == tensor.kept_as(dtype) and not tensor.plus_one)
    return as_it_is and held.in_place and (blocks or whole)


def is_picked(name: str, config: ModelConfig) -> bool:
    """Whether a forward reads some rows of a tensor alone: of an embedding that is not the head as well."""
    return name == EMBEDDING and not config.tied


def weight_bytes(
    held: Mapping[str, Held],
    config: ModelConfig,
    dtype: torch.dtype,
    split: Split | None = None,
    keep_blocks: KeptBlocks = False,
    in_order: Mapping[str, float] = IN_PLACE,
) -> WeightBytes:
    """What weights take that `checkpoint.load_weights` reads.

    Args:
        held: of the source; what it lacks is lent, and takes nothing.
        dtype, split, keep_blocks: as of `load_weights`.
        in_order: bytes of memory a number, by type, of blocks that an executor reorders. It does not reorder an embedding that
            is no head: rows of that are restored from the file.
    """
    own = kept = passed = picked = rows = 0
    for name, tensor in checkpoint_tensors(config).items():
        if (of := held.get(name)) is None or (config.tied and name == HEAD):
            continue
        share = _share(tensor, split)
        blocks = keeps(of, keep_blocks) and not (split and of.cuts(split.axis(tensor.axes[-1])))
        in_file = round(of.nbytes * share)
        of_number = in_order.get(of.blocks or "") if blocks else None
        if of_number is not None and not is_picked(name, config):
            own += round(math.prod(tensor.shape) * share * of_number)
            passed += in_file
            continue
        if in_file_pages(of, tensor, dtype, blocks, whole=share == 1):
            kept += in_file
            if is_picked(name, config):
                picked, rows = in_file, round(tensor.shape[0] * share)
        else:
            own += in_file if blocks else round(math.prod(tensor.shape) * share) * tensor.kept_as(dtype).itemsize
            passed += in_file
    return WeightBytes(own, kept, passed, picked, rows)


def random_bytes(config: ModelConfig, dtype: torch.dtype, split: Split | None = None) -> WeightBytes:
    """What random weights take."""
    tensors = checkpoint_tensors(config).values()
    return WeightBytes(own=sum(round(math.prod(of.shape) * _share(of, split)) * of.kept_as(dtype).itemsize for of in tensors))


def work_bytes(config: ModelConfig, tokens: int, sequences: int) -> int:
    """What a forward computes with, about: what the widest layer makes of all tokens that come at once, and logits.

    A mixer's outputs are there twice, before and after norms and RoPE; an MLP's gate, up and product once each. Beside them
    the hidden state, normed, and its update. All are counted as FP32, which products give.
    """
    widest = 0
    for layer in dict.fromkeys(config.layers):
        tensors = kind_of(layer.mixer).tensors(layer.mixer, layer.norm, config.hidden_size).values()
        made = sum(tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2)
        widest = max(widest, 2 * made, 3 * max(layer.mlp.width, getattr(layer.mlp, "shared", 0)))
    logits = 2 * sequences * config.vocab_size
    return _FP32 * (tokens * (widest + 3 * config.hidden_size) + logits)


def _share(tensor: StoredTensor, split: Split | None) -> float:
    """The part of a tensor's numbers that a rank holds."""
    if split is None:
        return 1.0
    parts = (len(range(size)[part]) / size for size, part in zip(tensor.shape, split.of(tensor.axes), strict=True))
    return math.prod(parts)
