"""Packed weights: projections of one input as one matrix, made once, of which the model's own tensors are views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel, tables_of
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.models.fused.model import FusedModel, Packed
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.fused import Heads
from haarkv.tq_ops.weight import dense

_KNOWS = ("head_norms", "bias", "window", "activation", "plus_one", "norms_behind")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_bias", "k_bias", "v_bias"))


def unsupported(config: ModelConfig) -> str | None:
    """In one sentence why such a model has no fused layers, or None."""
    return unknown_layer(config, _KNOWS)


def fuse(model: DecoderModel, device: torch.device) -> FusedModel:
    """A model on a device, its projections packed as they are copied there.

    Every tensor is on the device once: what the fused model's own `model` shows under a checkpoint's names are views of what
    it multiplies with. A model that is on that device already is copied where it is packed: let go of it, and keep `model` of
    the result, which is taken as it is the next time.

    Args:
        model: of one rank and a family for which `unsupported` returns None.
    """
    weights, layers, packed = model.weights, [], []
    for declared, layer in zip(model.config.layers, weights.layers, strict=True):
        moved, wholes = _packed(layer, device)
        layers.append(moved)
        heads = Heads(
            declared.attention.num_heads, model.dtype, wholes.get("q_bias"), moved.get("q_norm"), moved.get("k_norm"),
            declared.norm.eps,
        )  # fmt: skip
        packed.append(Packed(wholes["q_proj"], wholes["gate_proj"], heads))
    embedding = dense(weights.embedding).to(device)
    head = embedding if weights.lm_head is weights.embedding else dense(weights.lm_head).to(device)
    moved_weights = replace(
        weights, embedding=embedding, layers=tuple(layers), final_norm=weights.final_norm.to(device), lm_head=head
    )
    same = weights.embedding.device == device
    ropes = model.ropes if same else tables_of(model.config, device)
    return FusedModel(replace(model, weights=moved_weights, ropes=ropes), tuple(packed))


def _packed(layer: LayerWeights, device: torch.device) -> tuple[LayerWeights, dict[str, Tensor]]:
    """A layer on a device, and what is packed of it by the field of its first part."""
    views: dict[str, Tensor] = {}
    wholes: dict[str, Tensor] = {}
    for fields in _TOGETHER:
        if fields[0] in layer:
            wholes[fields[0]], parts = _below_one_another([layer[field] for field in fields], device)
            views.update(zip(fields, parts, strict=True))
    return layer.changed(lambda field, weight: views[field] if field in views else dense(weight).to(device)), wholes


def _below_one_another(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One tensor of some with as many columns, and its views that are they; parts that lie so already stay where they are."""
    first, rows = parts[0], sum(map(len, parts))
    if first.device == device and _adjacent(parts):
        return first.as_strided((rows, *first.shape[1:]), first.stride()), tuple(parts)
    whole = torch.empty(rows, *first.shape[1:], dtype=first.dtype, device=device)
    views = torch.split(whole, [len(part) for part in parts])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return whole, views


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether each part begins in memory where the one before it ends."""
    held = {part.untyped_storage().data_ptr() for part in parts}
    ends = [part.data_ptr() + part.nbytes for part in parts]
    begins = [part.data_ptr() for part in parts]
    return len(held) == 1 and begins[1:] == ends[:-1] and all(part.is_contiguous() for part in parts)
