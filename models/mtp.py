"""The drafting layer (multi-token prediction, MTP) of Qwen3.5 and Qwen3-Next.

    u = fc([norm(embedding of token t + 1), norm(h_t)]);   h' = norm(layer(u));   logits of token t + 2 = head(h')

h_t is the model's hidden state of token t after its final norm; for the next draft h' and the drafted token replace h_t and
token t + 1. Embedding and head are the model's. The layer is full attention at position t with its own K and V: a model of one
layer, `MTP.model`, with `MTP.layer_input` in place of its embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel, rope_tables
from haarkv.models.catalog import open_source
from haarkv.models.checkpoint import load_weights
from haarkv.models.config import Attention, ModelConfig
from haarkv.models.footprint import keeps
from haarkv.models.source import DRAFTING, CheckpointTensor, Empty, KeptBlocks, TensorSource
from haarkv.models.tensors import Axis, StoredTensor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks, Weight, dense


@dataclass(frozen=True)
class MTP:
    """The drafting layer of one model.

    Attributes:
        fc: [hidden, 2 * hidden]; columns of the embedding come first.
        embedding_norm, hidden_norm: [hidden], before `fc`.
    """

    model: DecoderModel
    fc: Weight
    embedding_norm: Tensor
    hidden_norm: Tensor

    def layer_input(self, token_ids: Tensor, hidden: Tensor, ops: OpTable) -> Tensor:
        """u [T, hidden] of the model's dtype from next tokens [T] and hidden [T, hidden]; norms and `fc` round once each."""
        eps = self.model.config.final_norm.eps
        embedding = ops.rms_norm(self.model.embed(token_ids), self.embedding_norm, eps)
        both = torch.cat([embedding, ops.rms_norm(hidden, self.hidden_norm, eps)], dim=-1)
        return ops.linear(both, self.fc).to(self.model.dtype)

    def on(self, device: torch.device) -> MTP:
        """The same with all but the layer's weights on a device; those its executor places."""
        if self.fc.device == device:
            return self
        model = replace(self.model, ropes=rope_tables(self.model.config, device))
        return MTP(model, dense(self.fc).to(device), self.embedding_norm.to(device), self.hidden_norm.to(device))


def config_of_mtp(config: ModelConfig) -> ModelConfig:
    """Declaration of the drafting layer as a model; an InputError if the model has no full attention."""
    like = next((layer for layer in config.layers if isinstance(layer.mixer, Attention) and layer.mixer.window is None), None)
    if like is None:
        raise InputError("--draft mtp takes a model with a layer of full attention")
    return replace(config, layers=(like,))


_ENTRY = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
"""Names of tensors before the layer."""


class _LayerSource:
    """The drafting layer of a source as a `TensorSource` of one layer."""

    def __init__(self, source: TensorSource) -> None:
        self.path, self._source, tensors = source.path, source, source.tensors()
        names = [name for name in tensors if name.startswith(DRAFTING) and name not in _ENTRY]
        self._names = {name.replace(DRAFTING, "" if "lm_head" in name else "model.", 1): name for name in names}

    def tensors(self) -> Mapping[str, CheckpointTensor]:
        tensors = self._source.tensors()
        return {name: tensors[stored_name] for name, stored_name in self._names.items()}

    def read(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None, empty: Empty | None = None) -> Tensor:
        return self._source.read(self._names[name], dtype, part, empty)

    def blocks(self, name: str, dtype: torch.dtype, part: tuple[slice, ...] | None = None) -> Blocks | None:
        return self._source.blocks(self._names[name], dtype, part)


def has_mtp(name: str | Path) -> bool:
    """Whether a model by name has a drafting layer."""
    source = open_source(name)
    return source is not None and not source.tensors().keys().isdisjoint(_ENTRY)


def load_mtp(
    name: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    shared_weights: Mapping[str, Weight],
    keep_blocks: KeptBlocks = False,
) -> MTP:
    """Read a model's drafting layer; `shared_weights` are the model's embedding and head, by name."""
    source = open_source(name)
    if source is None or source.tensors().keys().isdisjoint(_ENTRY):
        raise InputError(f"{name} has no layer that predicts several tokens: no tensors mtp.*, or nextn.* in a GGUF file")
    one = config_of_mtp(config)
    model = DecoderModel.from_weights(
        one, load_weights(_LayerSource(source), one, dtype, shared_weights=shared_weights, keep_blocks=keep_blocks)
    )
    hidden, plus_one = Axis(config.hidden_size, "hidden"), config.final_norm.plus_one
    shapes = ((hidden, Axis(2 * config.hidden_size)), (hidden,), (hidden,))
    weights = []
    for name_, axes in zip(_ENTRY, shapes, strict=True):
        tensor = StoredTensor(name_, axes, plus_one=plus_one and len(axes) == 1)
        weights.append(_read(source, tensor, dtype, keep_blocks))
    return MTP(model, weights[0], dense(weights[1]), dense(weights[2]))


def _read(entry: TensorSource, tensor: StoredTensor, dtype: torch.dtype, keep_blocks: KeptBlocks) -> Weight:
    source_tensor = entry.tensors().get(tensor.name)
    if source_tensor is None or source_tensor.shape != tensor.shape or source_tensor.fault:
        what = (
            "is missing"
            if source_tensor is None
            else source_tensor.fault or f"has shape {list(source_tensor.shape)}, not {list(tensor.shape)}"
        )
        raise InputError(f"{entry.path}: {tensor.name} {what}")
    blocks = entry.blocks(tensor.name, dtype) if keeps(source_tensor, keep_blocks) else None
    return blocks or tensor.in_memory(entry.read(tensor.name, tensor.memory_dtype(dtype)), dtype)
