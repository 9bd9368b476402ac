"""Memory of a model, from the sizes of its tensors alone, before any is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that weights take.

    Attributes:
        private: of the process: restored, converted, reordered or drawn.
        mapped: used in the file's pages, which the system may drop and read again.
        gathered: part of `mapped`, an untied embedding; a forward touches only its tokens' rows.
    """

    private: int = 0
    mapped: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """Private and mapped."""
        return self.private + self.mapped

    def copied(self) -> WeightBytes:
        """The same with all but `gathered` copied from the file's pages to private memory."""
        return replace(self, private=self.private + self.mapped - self.gathered, mapped=self.gathered)


def keeps(tensor: CheckpointTensor, keep_blocks: KeptBlocks) -> bool:
    """Whether a tensor's blocks stay as they are."""
    return tensor.blocks is not None and (keep_blocks if isinstance(keep_blocks, bool) else tensor.blocks in keep_blocks)


def in_file_pages(
    source_tensor: CheckpointTensor, tensor: StoredTensor, dtype: torch.dtype, blocks: bool, whole: bool
) -> bool:
    """Whether a tensor loaded as `dtype` stays in its file's pages.

    Args:
        blocks: its blocks are kept; a part of them is a view, a part of dense rows a copy.
        whole: not one rank's part.
    """
    as_it_is = blocks or (source_tensor.dtype == tensor.memory_dtype(dtype) and not tensor.plus_one)
    return as_it_is and source_tensor.in_place and (blocks or whole)


def is_gathered(name: str, config: ModelConfig) -> bool:
    """Whether a forward reads only some rows: of an untied embedding."""
    return name == EMBEDDING and not config.tied


def weight_bytes(
    source_tensors: Mapping[str, CheckpointTensor],
    config: ModelConfig,
    dtype: torch.dtype,
    split: Split | None = None,
    keep_blocks: KeptBlocks = False,
    in_order: Mapping[str, float] = IN_PLACE,
) -> WeightBytes:
    """Bytes of weights that `checkpoint.load_weights` reads, with its arguments.

    Args:
        source_tensors: tensors that are not among them are shared and take nothing.
        in_order: bytes of memory a number, by type of blocks that the executor reorders; an untied embedding is not reordered.
    """
    private = file_bytes = gathered = 0
    for name, tensor in checkpoint_tensors(config).items():
        if (source_tensor := source_tensors.get(name)) is None or (config.tied and name == HEAD):
            continue
        share = _share(tensor, split)
        blocks = keeps(source_tensor, keep_blocks) and not (split and source_tensor.cuts(split.axis(tensor.axes[-1])))
        in_file = round(source_tensor.nbytes * share)
        bytes_per_number = in_order.get(source_tensor.blocks or "") if blocks else None
        if bytes_per_number is not None and not is_gathered(name, config):
            private += round(math.prod(tensor.shape) * share * bytes_per_number)
            continue
        if in_file_pages(source_tensor, tensor, dtype, blocks, whole=share == 1):
            file_bytes += in_file
            if is_gathered(name, config):
                gathered = in_file
        else:
            private += in_file if blocks else round(math.prod(tensor.shape) * share) * tensor.memory_dtype(dtype).itemsize
    return WeightBytes(private, file_bytes, gathered)


def random_bytes(config: ModelConfig, dtype: torch.dtype, split: Split | None = None) -> WeightBytes:
    """Bytes of random weights."""
    tensors = checkpoint_tensors(config).values()
    return WeightBytes(
        private=sum(
            round(math.prod(tensor.shape) * _share(tensor, split)) * tensor.memory_dtype(dtype).itemsize for tensor in tensors
        )
    )


def work_bytes(config: ModelConfig, tokens: int, sequences: int) -> int:
    """Bytes of a forward's activations, about, all FP32: of the widest layer, hidden state, norm, update, and logits.

    A mixer's outputs count twice, before and after norms and RoPE; an MLP's gate, up and product once each.
    """
    widest = 0
    for layer in dict.fromkeys(config.layers):
        tensors = mixer_kind(layer.mixer).tensors(layer.mixer, layer.norm, config.hidden_size).values()
        outputs = sum(tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2)
        widest = max(widest, 2 * outputs, 3 * max(layer.mlp.width, getattr(layer.mlp, "shared", 0)))
    logits = 2 * sequences * config.vocab_size
    return _FP32 * (tokens * (widest + 3 * config.hidden_size) + logits)


def _share(tensor: StoredTensor, split: Split | None) -> float:
    if split is None:
        return 1.0
    parts = (len(range(size)[part]) / size for size, part in zip(tensor.shape, split.slices(tensor.axes), strict=True))
    return math.prod(parts)
