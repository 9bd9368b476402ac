"""Packed weights: projections of one input as one matrix, made once, of which the model's own tensors are views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel, tables_of
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.models.fused.model import FusedModel, Packed
from haarkv.models.tensors import LayerWeights
from haarkv.tq_ops.fused import Heads
from haarkv.tq_ops.weight import Blocks, Weight, dense

_KNOWS = ("head_norms", "bias", "window", "activation", "plus_one", "norms_behind")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_bias", "k_bias", "v_bias"))


def _restored(weight: Weight, device: torch.device) -> Weight:
    return dense(weight).to(device)


def unsupported(config: ModelConfig) -> str | None:
    """In one sentence why such a model has no fused layers, or None."""
    return unknown_layer(config, _KNOWS)


def fuse(model: DecoderModel, device: torch.device, place: Callable[[Weight, torch.device], Weight] = _restored) -> FusedModel:
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
        moved, wholes = _packed(layer, device, place)
        layers.append(moved)
        heads = Heads(
            declared.attention.num_heads, model.dtype, wholes.get("q_bias"), moved.get("q_norm"), moved.get("k_norm"),
            declared.norm.eps,
        )  # fmt: skip
        packed.append(Packed(wholes["q_proj"], wholes["gate_proj"], heads))
    embedding = place(weights.embedding, device)
    head = embedding if weights.lm_head is weights.embedding else place(weights.lm_head, device)
    moved_weights = replace(
        weights, embedding=embedding, layers=tuple(layers), final_norm=weights.final_norm.to(device), lm_head=head
    )
    same = weights.embedding.device == device
    ropes = model.ropes if same else tables_of(model.config, device)
    return FusedModel(replace(model, weights=moved_weights, ropes=ropes), tuple(packed))


def _packed(
    layer: LayerWeights, device: torch.device, place: Callable[[Weight, torch.device], Weight]
) -> tuple[LayerWeights, dict[str, Any]]:
    """A layer on a device, and what is packed of it by the field of its first part."""
    views: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for fields in _TOGETHER:
        if fields[0] in layer:
            parts = [layer.matrix(field) for field in fields]
            # Dense parts are copied straight to where they are packed.
            parts = [place(part, device) if isinstance(part, Blocks) else part for part in parts]
            made: Sequence[Weight]
            if any(isinstance(part, Blocks) for part in parts):
                wholes[fields[0]], made = _blocks_together(parts, device)
            else:
                wholes[fields[0]], made = _below_one_another(cast("list[Tensor]", parts), device)
            views.update(zip(fields, made, strict=True))
    return layer.changed(lambda field, weight: views[field] if field in views else place(weight, device)), wholes


def _blocks_together(parts: Sequence[Weight], device: torch.device) -> tuple[Weight | tuple[Weight, ...], tuple[Weight, ...]]:
    """One weight of some in blocks of one type, and its parts; those themselves where they differ."""
    first = parts[0]
    if not isinstance(first, Blocks) or not all(_alike(first, part) for part in parts[1:]):
        moved = tuple(part if isinstance(part, Blocks) else part.to(device) for part in parts)
        return moved, moved
    of = cast("Sequence[Blocks]", parts)
    data, views = _below_one_another([part.data for part in of], device)
    scales = None if first.row_scales is None else torch.cat([cast(Tensor, part.row_scales) for part in of])
    whole = replace(first, data=data, row_scales=scales)
    return whole, tuple(replace(part, data=view) for part, view in zip(of, views, strict=True))


def _alike(first: Blocks, other: Weight) -> bool:
    """Whether one weight can hold both, row below row."""
    return (
        isinstance(other, Blocks) and other.type == first.type and other.dtype == first.dtype
        and first.column_scales is None and other.column_scales is None
        and (first.row_scales is None) == (other.row_scales is None)
    )  # fmt: skip


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
