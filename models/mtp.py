"""The layer by which a model drafts its own next tokens (multi-token prediction, MTP), as Qwen3.5 and Qwen3-Next have one.

    u = fc([norm(embedding of token t + 1), norm(h_t)]);   h' = norm(layer(u));   logits of token t + 2 = head(h')

h_t is the model's hidden state of token t behind its last norm. For a further draft h' takes its place, and the drafted token
that of token t + 1. Embedding and head are the model's own. The layer is a full-attention one of the model's declaration, at
position t, with K and V of its own. So it is a model of one layer, `MTP.model`, whose last norm is the layer's own, and whose
hidden states come of `MTP.entered` in place of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.catalog import source_of
from haarkv.models.checkpoint import load_weights
from haarkv.models.config import Attention, ModelConfig
from haarkv.models.hf_folder import MORE_TOKENS, HFFolder
from haarkv.models.tensors import Axis, StoredTensor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Weight

_ENTRY = {
    "fc": "mtp.fc.weight",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
}
_LAYER, _NORM = "mtp.layers.0.", "mtp.norm.weight"


@dataclass(frozen=True)
class MTP:
    """The drafting layer of one model.

    Attributes:
        model: of one layer; its embedding and head are the model's.
        fc: [hidden, 2 * hidden], of the embedding first and of the hidden state behind it.
        embedding_norm, hidden_norm: [hidden], before `fc`.
    """

    model: DecoderModel
    fc: Weight
    embedding_norm: Tensor
    hidden_norm: Tensor

    def entered(self, token_ids: Tensor, hidden: Tensor, ops: OpTable) -> Tensor:
        """What the layer is given, [T, hidden] of the model's dtype.

        Args:
            token_ids: [T], the token behind each.
            hidden: [T, hidden] of the model's dtype, behind the last norm.
        Rounding points: each norm once, and what `fc` gives once.
        """
        eps = self.model.config.final_norm.eps
        embedded = ops.rms_norm(self.model.embed(token_ids), self.embedding_norm, eps)
        both = torch.cat([embedded, ops.rms_norm(hidden, self.hidden_norm, eps)], dim=-1)
        return ops.linear(both, self.fc).to(self.model.dtype)


class _Layer(HFFolder):
    """The tensors of the drafting layer and of its last norm, under the names of a model of one layer."""

    def name_of(self, stored: str) -> str | None:
        if stored in _ENTRY.values() or not stored.startswith(MORE_TOKENS):
            return None
        return "model.norm.weight" if stored == _NORM else stored.replace(_LAYER, "model.layers.0.", 1)


class _Entry(HFFolder):
    """The tensors before that layer."""

    def name_of(self, stored: str) -> str | None:
        return stored if stored in _ENTRY.values() else None


def config_of_mtp(config: ModelConfig) -> ModelConfig:
    """A model of the one layer that drafts for a model of this declaration.

    Raises:
        InputError: none of its layers attends to all tokens.
    """
    like = next((layer for layer in config.layers if isinstance(layer.mixer, Attention) and layer.mixer.window is None), None)
    if like is None:
        raise InputError("--draft mtp takes a model with a layer of full attention")
    return replace(config, layers=(like,))


def has_mtp(name: str | Path) -> bool:
    """Whether a model by name is a folder that holds a drafting layer."""
    source = source_of(name)
    return isinstance(source, HFFolder) and len(_Entry(source.path).tensors()) > 0


def load_mtp(name: str | Path, config: ModelConfig, dtype: torch.dtype, lent: Mapping[str, Weight]) -> MTP:
    """Read the drafting layer of a model.

    Args:
        name: a folder in Hugging Face format.
        config: of the model.
        lent: its embedding and head.
    Raises:
        InputError: it has none, or a tensor is missing, extra or mis-shaped.
    """
    source = source_of(name)
    if source is None or not has_mtp(name):
        raise InputError(f"{name} holds no mtp.* tensors in a folder in Hugging Face format")
    one = config_of_mtp(config)
    model = DecoderModel.of(one, load_weights(_Layer(source.path), one, dtype, lent=lent))
    entry, hidden = _Entry(source.path), Axis(config.hidden_size, "hidden")
    norm = config.final_norm.plus_one
    stored = {
        "fc": StoredTensor(_ENTRY["fc"], (hidden, Axis(2 * config.hidden_size))),
        **{field: StoredTensor(_ENTRY[field], (hidden,), plus_one=norm) for field in ("embedding_norm", "hidden_norm")},
    }
    found = {}
    for field, tensor in stored.items():
        held = entry.tensors().get(tensor.name)
        if held is None or held.shape != tensor.shape or held.fault:
            what = "is missing" if held is None else held.fault or f"has shape {list(held.shape)}, not {list(tensor.shape)}"
            raise InputError(f"{source.path}: {tensor.name} {what}")
        found[field] = tensor.in_memory(entry.read(tensor.name, tensor.kept_as(dtype)), dtype)
    return MTP(model, **found)
