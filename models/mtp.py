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
from haarkv.models.checkpoint import load_weights, stored_tensors
from haarkv.models.config import Attention, ModelConfig
from haarkv.models.source import DRAFTING, KeptBlocks
from haarkv.models.tensors import Axis, StoredTensor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Weight, dense


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
    """Read the drafting layer of a model that has one; `shared_weights` are the model's embedding and head, by name."""
    source = open_source(name)
    assert source is not None, "a model for which `has_mtp`"
    one, tensors = config_of_mtp(config), source.tensors()
    layer_tensors = {
        name.replace(DRAFTING, "" if "lm_head" in name else "model.", 1): tensor
        for name, tensor in tensors.items()
        if name.startswith(DRAFTING) and name not in _ENTRY
    }
    weights = load_weights(source.path, layer_tensors, one, dtype, shared_weights=shared_weights, keep_blocks=keep_blocks)
    hidden, plus_one = Axis(config.hidden_size), config.final_norm.plus_one
    shapes = ((hidden, Axis(2 * config.hidden_size)), (hidden,), (hidden,))
    specs = {
        name: StoredTensor(name, axes, plus_one=plus_one and len(axes) == 1) for name, axes in zip(_ENTRY, shapes, strict=True)
    }
    entry_tensors = {name: tensors[name] for name in _ENTRY if name in tensors}
    entry = stored_tensors(source.path, entry_tensors, specs, dtype, keep_blocks=keep_blocks)
    return MTP(DecoderModel.from_weights(one, weights), *(weight for _, weight in entry))
