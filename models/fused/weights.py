"""Packed weights: projections of one input as one matrix, made once, of which the model's own tensors are views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from haarkv.models.base import DecoderModel, tables_of
from haarkv.models.config import Experts, Layer, ModelConfig, unknown_layer
from haarkv.models.fused.model import FusedModel, Packed
from haarkv.models.packed import Place, stacked, together
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.fused import Heads
from haarkv.tq_ops.weight import Weight, dense

_KNOWS = ("head_norms", "bias", "window", "activation", "plus_one", "norms_behind", "experts")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_bias", "k_bias", "v_bias"))


def _restored(weight: Weight, device: torch.device) -> Weight:
    return dense(weight).to(device)


def unsupported(config: ModelConfig) -> str | None:
    """In one sentence why such a model has no fused layers, or None."""
    return unknown_layer(config, _KNOWS)


def fuse(model: DecoderModel, device: torch.device, place: Place = _restored) -> FusedModel:
    """A model on a device, its projections packed as they are copied there.

    Every tensor is on the device once: what the fused model's own `model` shows under a checkpoint's names are views of what
    it multiplies with. A model that is on that device already is copied where it is packed: let go of it, and keep `model` of
    the result, which is taken as it is the next time.

    Args:
        model: of one rank and a family for which `unsupported` returns None.
        place: puts a weight in blocks on the device; they are restored unless it is given.
    """
    weights, layers, packed = model.weights, [], []
    for declared, layer in zip(model.config.layers, weights.layers, strict=True):
        moved, wholes = _packed(layer, declared, device, place)
        layers.append(moved)
        heads = Heads(
            declared.attention.num_heads, model.dtype, wholes.get("q_bias"), moved.get("q_norm"), moved.get("k_norm"),
            declared.norm.eps,
        )  # fmt: skip
        packed.append(Packed(wholes["q_proj"], wholes.get("gate_proj"), heads))
    embedding = place(weights.embedding, device)
    head = embedding if weights.lm_head is weights.embedding else place(weights.lm_head, device)
    moved_weights = replace(
        weights, embedding=embedding, layers=tuple(layers), final_norm=weights.final_norm.to(device), lm_head=head
    )
    same = weights.embedding.device == device
    ropes = model.ropes if same else tables_of(model.config, device)
    return FusedModel(replace(model, weights=moved_weights, ropes=ropes), tuple(packed))


def _packed(layer: LayerWeights, declared: Layer, device: torch.device, place: Place) -> tuple[LayerWeights, dict[str, Any]]:
    """A layer on a device, and what is packed of it by the field of its first part."""
    views: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    stack = None
    for fields in _TOGETHER:
        if fields[0] in layer:
            parts = [layer.matrix(field) for field in fields]
            wholes[fields[0]], made = together(parts, device, place)
            views.update(zip(fields, made, strict=True))
    if isinstance(declared.mlp, Experts):
        stack, of_experts = stacked(layer, declared.mlp, device, place)
        views |= of_experts
    return layer.changed(lambda field, weight: views[field] if field in views else place(weight, device), stack), wholes
