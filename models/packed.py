"""Weights that are multiplied with together as one matrix, made once, of which the model's own tensors are views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from haarkv.models.config import Dense, Experts, ModelConfig
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import Weights
from haarkv.tq_ops.fused import Stack
from haarkv.tq_ops.weight import Blocks, Weight, dense

Place = Callable[[Weight, torch.device], Weight]
"""Puts a weight on a device."""
_PARTS = ("gate", "up", "down")


def with_stacks(weights: Weights, config: ModelConfig, device: torch.device, place: Place) -> Weights:
    """A model's weights on a device, the experts of each layer in one `Stack`.

    Every tensor is there once: an expert's are views. Experts that lie so already stay where they are.

    Args:
        place: puts one weight on the device.
    """
    layers = tuple(
        _with_stack(layer, declared.mlp, device, place) for layer, declared in zip(weights.layers, config.layers, strict=True)
    )
    return replace(replace(weights, layers=()).placed(lambda weight: place(weight, device)), layers=layers)


def _with_stack(layer: LayerWeights, mlp: Dense | Experts, device: torch.device, place: Place) -> LayerWeights:
    stack, views = stacked(layer, mlp, device, place) if isinstance(mlp, Experts) else (None, {})
    return layer.changed(lambda field, weight: views[field] if field in views else place(weight, device), stack)


def stacked(layer: LayerWeights, mlp: Experts, device: torch.device, place: Place) -> tuple[Stack, dict[str, Weight]]:
    """A layer's experts on a device, and their tensors by field, which are views."""
    wholes: dict[str, Weight] = {}
    views: dict[str, Weight] = {}
    for part in _PARTS:
        fields = [f"experts.{expert}.{part}_proj" for expert in range(mlp.count)]
        whole, made = together([layer.matrix(field) for field in fields], device, place)
        if isinstance(whole, tuple):  # of different types
            whole, made = below_one_another([dense(one) for one in whole], device)
        wholes[part] = whole
        views |= zip(fields, made, strict=True)
    return Stack(mlp.count, mlp.per_token, mlp.normalized, mlp.activation, **wholes), views


def together(
    parts: Sequence[Weight], device: torch.device, place: Place
) -> tuple[Weight | tuple[Weight, ...], tuple[Weight, ...]]:
    """One weight of some that have as many columns, row below row on a device, and its views that are they.

    In place of the one weight those themselves where they lie in blocks of different types.

    Args:
        place: puts a weight in blocks on the device; dense ones are copied straight to where they are packed.
    """
    parts = [place(part, device) if isinstance(part, Blocks) else part for part in parts]
    if any(isinstance(part, Blocks) for part in parts):
        return _blocks_together(parts, device)
    return below_one_another(cast("list[Tensor]", parts), device)


def _blocks_together(parts: Sequence[Weight], device: torch.device) -> tuple[Weight | tuple[Weight, ...], tuple[Weight, ...]]:
    """One weight of some in blocks of one type, and its parts; those themselves where they differ."""
    first = parts[0]
    if not isinstance(first, Blocks) or not all(_alike(first, part) for part in parts[1:]):
        moved = tuple(part if isinstance(part, Blocks) else part.to(device) for part in parts)
        return moved, moved
    of = cast("Sequence[Blocks]", parts)
    data, views = below_one_another([part.data for part in of], device)
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


def below_one_another(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
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
