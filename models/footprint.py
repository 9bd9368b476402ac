"""What a model takes in memory, by what a source says of its tensors: counted before any of it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from haarkv.models.config import ModelConfig
from haarkv.models.layer import mixer_kind
from haarkv.models.parallel import Split
from haarkv.models.source import CheckpointTensor, KeptBlocks
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
        private: of the process: restored, converted, put in another order than the file's, or drawn.
        mapped: in the pages of their file and computed with there. The system may drop those pages and read them again.
        streamed: pages that are read once, as what they hold is restored, and may be dropped for good.
        gathered: of `mapped`, an embedding that is not the head as well: of it a forward reads its tokens' rows alone.
        rows: of that embedding.
    """

    private: int = 0
    mapped: int = 0
    streamed: int = 0
    gathered: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        """What is computed with."""
        return self.private + self.mapped

    def copied(self) -> WeightBytes:
        """The same weights once what a forward reads whole was copied from the file's pages into memory of the process."""
        return replace(self, private=self.private + self.mapped - self.gathered, mapped=self.gathered)

    @property
    def file_bytes(self) -> int:
        """Of the file's pages, what was read when the model is loaded."""
        return self.mapped + self.streamed

    def mapped_by(self, tokens: Iterable[int], more: int) -> int:
        """Of the file's pages, what was read once a text has been written: of `gathered` what lies around its tokens' rows."""
        if not self.gathered:
            return self.file_bytes
        row = self.gathered // self.rows
        around = {place // _AROUND for token in set(tokens) for place in (token * row, (token + 1) * row - 1)}
        return self.file_bytes - self.gathered + min(self.gathered, _AROUND * (len(around) + more))


def keeps(tensor: CheckpointTensor, keep_blocks: KeptBlocks) -> bool:
    """Whether a tensor's blocks stay as they are."""
    return tensor.blocks is not None and (keep_blocks if isinstance(keep_blocks, bool) else tensor.blocks in keep_blocks)


def in_file_pages(
    source_tensor: CheckpointTensor, tensor: StoredTensor, dtype: torch.dtype, blocks: bool, whole: bool
) -> bool:
    """Whether a tensor as it is loaded lies in the pages of its file.

    Args:
        dtype: that weights are loaded as.
        blocks: it is kept in blocks. Some rows and columns of them are a view; a part of dense rows is copied.
        whole: no part of it is taken.
    """
    as_it_is = blocks or (source_tensor.dtype == tensor.kept_as(dtype) and not tensor.plus_one)
    return as_it_is and source_tensor.in_place and (blocks or whole)


def is_gathered(name: str, config: ModelConfig) -> bool:
    """Whether a forward reads some rows of a tensor alone: of an embedding that is not the head as well."""
    return name == EMBEDDING and not config.tied


def weight_bytes(
    source_tensors: Mapping[str, CheckpointTensor],
    config: ModelConfig,
    dtype: torch.dtype,
    split: Split | None = None,
    keep_blocks: KeptBlocks = False,
    in_order: Mapping[str, float] = IN_PLACE,
) -> WeightBytes:
    """What weights take that `checkpoint.load_weights` reads.

    Args:
        source_tensors: of the source; what it lacks is shared, and takes nothing.
        dtype, split, keep_blocks: as of `load_weights`.
        in_order: bytes of memory a number, by type, of blocks that an executor reorders. It does not reorder an embedding that
            is no head: rows of that are restored from the file.
    """
    private = file_bytes = streamed = gathered = rows = 0
    for name, tensor in checkpoint_tensors(config).items():
        if (source_tensor := source_tensors.get(name)) is None or (config.tied and name == HEAD):
            continue
        share = _share(tensor, split)
        blocks = keeps(source_tensor, keep_blocks) and not (split and source_tensor.cuts(split.axis(tensor.axes[-1])))
        in_file = round(source_tensor.nbytes * share)
        bytes_per_number = in_order.get(source_tensor.blocks or "") if blocks else None
        if bytes_per_number is not None and not is_gathered(name, config):
            private += round(math.prod(tensor.shape) * share * bytes_per_number)
            streamed += in_file
            continue
        if in_file_pages(source_tensor, tensor, dtype, blocks, whole=share == 1):
            file_bytes += in_file
            if is_gathered(name, config):
                gathered, rows = in_file, round(tensor.shape[0] * share)
        else:
            private += in_file if blocks else round(math.prod(tensor.shape) * share) * tensor.kept_as(dtype).itemsize
            streamed += in_file
    return WeightBytes(private, file_bytes, streamed, gathered, rows)


def random_bytes(config: ModelConfig, dtype: torch.dtype, split: Split | None = None) -> WeightBytes:
    """What random weights take."""
    tensors = checkpoint_tensors(config).values()
    return WeightBytes(
        private=sum(
            round(math.prod(tensor.shape) * _share(tensor, split)) * tensor.kept_as(dtype).itemsize for tensor in tensors
        )
    )


def work_bytes(config: ModelConfig, tokens: int, sequences: int) -> int:
    """What a forward computes with, about: what the widest layer makes of all tokens that come at once, and logits.

    A mixer's outputs are there twice, before and after norms and RoPE; an MLP's gate, up and product once each. Beside them
    the hidden state, normed, and its update. All are counted as FP32, which products give.
    """
    widest = 0
    for layer in dict.fromkeys(config.layers):
        tensors = mixer_kind(layer.mixer).tensors(layer.mixer, layer.norm, config.hidden_size).values()
        outputs = sum(tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2)
        widest = max(widest, 2 * outputs, 3 * max(layer.mlp.width, getattr(layer.mlp, "shared", 0)))
    logits = 2 * sequences * config.vocab_size
    return _FP32 * (tokens * (widest + 3 * config.hidden_size) + logits)


def _share(tensor: StoredTensor, split: Split | None) -> float:
    """The part of a tensor's numbers that a rank holds."""
    if split is None:
        return 1.0
    parts = (len(range(size)[part]) / size for size, part in zip(tensor.shape, split.slices(tensor.axes), strict=True))
    return math.prod(parts)
