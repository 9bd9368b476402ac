"""The forward of a model over fused ops, with packed projections and stacked experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import Dense, Experts, ModelConfig, unknown_layer
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import Weights
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import Heads, Stack
from haarkv.tq_ops.weight import Blocks, Weight, dense


@dataclass(frozen=True)
class Packed:
    """Packed projections of a layer; blocks of different types stay a tuple.

    Attributes:
        qkv_proj: [(Hq + 2 Hkv) * D, hidden].
        gate_up_proj: [2 * intermediate, hidden]; None with experts.
    """

    qkv_proj: Weight | tuple[Weight, ...]
    gate_up_proj: Weight | tuple[Weight, ...] | None
    heads: Heads


@dataclass(frozen=True)
class FusedModel(DecoderModel):
    """A model of attention layers over `FusedOps`: 9 ops a dense layer, rounded as `models.layer.decoder_layer`.

    Attributes:
        packed: by layer; the projections of `weights` are views of it. `fuse` fills it.
    """

    packed: tuple[Packed, ...] = ()

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: Any) -> Tensor:
        """As `DecoderModel.layers`; the norm of a layer's input is fused with the residual of the layer before."""
        config, weights, ropes = self.config, self.weights, self.rope_at(batch.positions)
        norms = [*(layer["input_norm"] for layer in weights.layers), weights.final_norm]
        x = ops.rms_norm(hidden, norms[span.start], config.layers[span.start].norm.eps) if span else hidden
        for index in span:
            layer, packed, layer_config = weights.layers[index], self.packed[index], config.layers[index]
            mixer, eps = layer_config.attention, layer_config.norm.eps
            qkv = ops.linear(x, packed.qkv_proj)
            with cache.open(index, batch) as at:
                attention_out = ops.attention(qkv, packed.heads, ropes[mixer.rope], at, mixer.scale)
            out_norms = [(layer[f"{part}_out_norm"], eps) if layer_config.post_norms else None for part in ("mixer", "mlp")]
            hidden, x = ops.add_norm(
                hidden, ops.linear(attention_out, layer.matrix("o_proj")), layer["post_norm"], eps, out_norms[0]
            )
            if layer.stack is not None:
                update = ops.experts(x, ops.linear(x, layer.matrix("router")), layer.stack)
            else:
                assert packed.gate_up_proj is not None
                gate, up = ops.linear(x, packed.gate_up_proj).chunk(2, dim=-1)
                activation_mul = ops.silu_mul if layer_config.mlp.activation == "silu" else ops.gelu_mul
                update = ops.linear(activation_mul(gate, up, hidden.dtype), layer.matrix("down_proj"))
            next_eps = config.layers[index + 1].norm.eps if index + 1 < config.num_layers else config.final_norm.eps
            hidden, x = ops.add_norm(hidden, update, norms[index + 1], next_eps, out_norms[1])
        return hidden


_KNOWS = ("head_norms", "bias", "window", "activation", "plus_one", "post_norms", "experts")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_bias", "k_bias", "v_bias"))


def _restore(weight: Weight, device: torch.device) -> Weight:
    return dense(weight).to(device)


def unsupported(config: ModelConfig) -> str | None:
    """Why a model has no fused layers, or None."""
    return unknown_layer(config, _KNOWS)


def fuse(model: DecoderModel, device: torch.device, place: PlaceWeight = _restore) -> FusedModel:
    """A model on a device with packed projections.

    Every tensor is on the device once: weights of the result are views of packed ones. A model that is on the device already
    is copied, unless it is an earlier result.

    Args:
        model: of one rank, for which `unsupported` returns None.
        place: puts a weight in blocks on the device; restored by default.
    """
    weights, layers, packed = model.weights, [], []
    for layer_config, layer in zip(model.config.layers, weights.layers, strict=True):
        tensors, wholes = _packed(layer, layer_config.mlp, device, place)
        layers.append(tensors)
        heads = Heads(
            layer_config.attention.num_heads, model.dtype, wholes.get("q_bias"), tensors.get("q_norm"), tensors.get("k_norm"),
            layer_config.norm.eps,
        )  # fmt: skip
        packed.append(Packed(wholes["q_proj"], wholes.get("gate_proj"), heads))
    outer = replace(weights, layers=()).map(lambda weight: place(weight, device))
    moved = model.with_weights(replace(outer, layers=tuple(layers)), device)
    return FusedModel(moved.config, moved.weights, moved.ropes, moved.ranks, tuple(packed))


PlaceWeight = Callable[[Weight, torch.device], Weight]
"""Puts a weight on a device."""
_PARTS = ("gate", "up", "down")


def _packed(
    layer: LayerWeights, mlp: Dense | Experts, device: torch.device, place: PlaceWeight,
    groups: Sequence[tuple[str, ...]] = _TOGETHER,
) -> tuple[LayerWeights, dict[str, Any]]:  # fmt: skip
    """A layer on a device with its experts in one `Stack`, and its packed weights by the first field of their group."""
    views: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for fields in groups:
        if fields[0] in layer:
            parts = [layer.matrix(field) for field in fields]
            wholes[fields[0]], part_views = together(parts, device, place)
            views.update(zip(fields, part_views, strict=True))
    stack, expert_views = stack_experts(layer, mlp, device, place) if isinstance(mlp, Experts) else (None, {})
    views |= expert_views
    return layer.map(lambda field, weight: views[field] if field in views else place(weight, device), stack), wholes


def with_stacks(weights: Weights, config: ModelConfig, device: torch.device, place: PlaceWeight) -> Weights:
    """A model's weights on a device, experts of a layer as views of one `Stack`; stacked ones are not copied."""
    layers = tuple(
        _packed(layer, layer_config.mlp, device, place, groups=())[0]
        for layer, layer_config in zip(weights.layers, config.layers, strict=True)
    )
    return replace(replace(weights, layers=()).map(lambda weight: place(weight, device)), layers=layers)


def stack_experts(
    layer: LayerWeights, mlp: Experts, device: torch.device, place: PlaceWeight
) -> tuple[Stack, dict[str, Weight]]:
    """A layer's experts on a device, and views of them by field."""
    wholes: dict[str, Weight] = {}
    views: dict[str, Weight] = {}
    for part in _PARTS:
        fields = [f"experts.{expert}.{part}_proj" for expert in range(mlp.count)]
        whole, part_views = together([layer.matrix(field) for field in fields], device, place)
        if isinstance(whole, tuple):  # of different types
            whole, part_views = below_one_another([dense(one) for one in whole], device)
        wholes[part] = whole
        views |= zip(fields, part_views, strict=True)
    return Stack(mlp.count, mlp.per_token, mlp.normalized, mlp.activation, **wholes), views


def together(
    parts: Sequence[Weight], device: torch.device, place: PlaceWeight
) -> tuple[Weight | tuple[Weight, ...], tuple[Weight, ...]]:
    """Weights concatenated by rows on a device, and views of each; blocks of different types stay a tuple.

    Args:
        place: puts a weight in blocks on the device; dense ones are copied into the result.
    """
    parts = [place(part, device) if isinstance(part, Blocks) else part for part in parts]
    if any(isinstance(part, Blocks) for part in parts):
        return _blocks_together(parts, device)
    return below_one_another(cast("list[Tensor]", parts), device)


def _blocks_together(parts: Sequence[Weight], device: torch.device) -> tuple[Weight | tuple[Weight, ...], tuple[Weight, ...]]:
    first = parts[0]
    if not isinstance(first, Blocks) or not all(_can_stack(first, part) for part in parts[1:]):
        device_parts = tuple(part if isinstance(part, Blocks) else part.to(device) for part in parts)
        return device_parts, device_parts
    blocks = cast("Sequence[Blocks]", parts)
    data, views = below_one_another([part.data for part in blocks], device)
    scales = None if first.row_scales is None else torch.cat([cast(Tensor, part.row_scales) for part in blocks])
    whole = replace(first, data=data, row_scales=scales)
    return whole, tuple(replace(part, data=view) for part, view in zip(blocks, views, strict=True))


def _can_stack(first: Blocks, other: Weight) -> bool:
    return (
        isinstance(other, Blocks) and other.type == first.type and other.dtype == first.dtype
        and first.column_scales is None and other.column_scales is None
        and (first.row_scales is None) == (other.row_scales is None)
    )  # fmt: skip


def below_one_another(parts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Tensors concatenated by rows, and views of each; adjacent ones are not copied."""
    first, rows = parts[0], sum(map(len, parts))
    if first.device == device and _adjacent(parts):
        return first.as_strided((rows, *first.shape[1:]), first.stride()), tuple(parts)
    whole = torch.empty(rows, *first.shape[1:], dtype=first.dtype, device=device)
    views = torch.split(whole, [len(part) for part in parts])
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return whole, views


def _adjacent(parts: Sequence[Tensor]) -> bool:
    storages = {part.untyped_storage().data_ptr() for part in parts}
    ends = [part.data_ptr() + part.nbytes for part in parts]
    begins = [part.data_ptr() for part in parts]
    return len(storages) == 1 and begins[1:] == ends[:-1] and all(part.is_contiguous() for part in parts)
