"""Balance of a model: channels of K and V scaled by powers of two in the weights, so that a quantized cache loses less.

    K: k_norm * s, q_norm / s    (without those norms: rows and biases of the projections to K and Q)
    V: rows and bias of v_proj * s, columns of o_proj / s

Powers of two round nothing: with an exact cache the balanced model computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from haarkv.codebooks.balance import channel_scales, error_ratio
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import open_source, read_config
from haarkv.models.checkpoint import require_tensors
from haarkv.models.config import Attention
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import checkpoint_tensors, layer_tensors
from haarkv.tq_ops.kv.plan import KVPlan

Scales = tuple[Tensor | None, Tensor | None]
"""Multipliers of channels [H, D] of K and of V, powers of two; None for 1."""
LEAST_RATIO = 1.1
"""Least reduction of error for which K or V is balanced; two rotations differ as much."""


@dataclass(frozen=True)
class Moments:
    """Moments of the channels of K or V of one layer, from its weights.

    Attributes:
        use: [H, D] fp32, mean square of the queries, or of o_proj's columns.
        spread: [H, D] fp32, variance of the channel for isotropic inputs.
        constant: [H, D] fp32, bias; of K, root mean square over a RoPE pair.
    """

    use: Tensor
    spread: Tensor
    constant: Tensor

    @property
    def size(self) -> Tensor:
        """Mean square of each channel [H, D] fp32."""
        return self.spread + self.constant.square()

    def scaled(self, scales: Tensor) -> Moments:
        """Moments of channels times scales [H, D]."""
        return Moments(self.use / scales.square(), self.spread * scales.square(), self.constant * scales)


@dataclass(frozen=True)
class Uneven:
    """K or V of a layer, and by how much balance divides the squared error of its worst KV head."""

    layer: int
    side: str
    ratio: float


@dataclass(frozen=True)
class Scaling:
    """Scales of each layer, the sides that have some, and moments of scaled K and V."""

    scales: Mapping[int, Scales]
    uneven: tuple[Uneven, ...]
    moments: Mapping[int, tuple[Moments, Moments]]


def key_moments(tensors: Mapping[str, Tensor], heads: int, dim: int, rope_dims: int | None = None) -> Moments:
    """Moments of K, averaged over the two channels of a RoPE pair.

    Args:
        tensors: of one layer, by the fields of `LayerWeights`.
        heads, dim: KV heads H and head_dim D.
        rope_dims: number of rotated channels; all by default.
    """
    if "k_norm" in tensors:
        use, spread = (tensors[name].float().square().expand(heads, dim) for name in ("q_norm", "k_norm"))
        bias = torch.zeros(heads, dim)
    else:
        query_squares = _row_squares(tensors, "q_proj") + _bias(tensors, "q_bias", tensors["q_proj"]).square()
        use = query_squares.view(heads, -1, dim).mean(1)
        spread = _row_squares(tensors, "k_proj").view(heads, dim)
        bias = _bias(tensors, "k_bias", tensors["k_proj"]).view(heads, dim)

    def pair_means(squares: Tensor) -> Tensor:
        rotated = dim if rope_dims is None else rope_dims
        low, high = squares[:, :rotated].chunk(2, dim=-1)
        mean = (low + high) / 2
        return torch.cat([mean, mean, squares[:, rotated:]], dim=-1)

    return Moments(pair_means(use), pair_means(spread), pair_means(bias.square()).sqrt())


def value_moments(tensors: Mapping[str, Tensor], heads: int, dim: int) -> Moments:
    """Moments of V; arguments of `key_moments`."""
    use = torch.linalg.vector_norm(tensors["o_proj"], dim=0, dtype=torch.float32).square().view(heads, -1, dim).sum(1)
    bias = _bias(tensors, "v_bias", tensors["v_proj"]).view(heads, dim)
    return Moments(use, _row_squares(tensors, "v_proj").view(heads, dim), bias)


_READ = {"input_norm", *(f"{name}_proj" for name in "qkvo"), "q_norm", "k_norm", *(f"{name}_bias" for name in "qkv")}


def checkpoint_moments(name: str | Path) -> dict[int, tuple[Moments, Moments]]:
    """Moments of K and V by layer of a model by name, reading one layer's tensors at a time; {} of a random model."""
    config, source = read_config(name), open_source(name)
    if source is None:
        return {}
    stored = require_tensors(source.path, source.tensors(), checkpoint_tensors(config))
    moments: dict[int, tuple[Moments, Moments]] = {}
    for layer, shape in enumerate(config.kv_shapes):
        if shape is not None:
            specs = layer_tensors(config, layer)
            fields = {field: specs[field] for field in _moment_fields(specs)}
            tensors = {
                field: spec.in_memory(stored[spec.name].read(spec.memory_dtype(torch.bfloat16)), torch.bfloat16)
                for field, spec in fields.items()
            }
            moments[layer] = _layer_moments(tensors, config.layers[layer].attention)
    return moments


def _layer_moments(tensors: Mapping[str, Tensor], mixer: Attention) -> tuple[Moments, Moments]:
    """Moments of K and V."""
    sizes = mixer.num_kv_heads, mixer.head_dim
    return key_moments(tensors, *sizes, mixer.rope.dims), value_moments(tensors, *sizes)


def choose_scaling(
    moments: Mapping[int, tuple[Moments, Moments]], may_balance: Callable[[int, str], bool] = lambda *_: True
) -> Scaling:
    """Scales from moments of K and V by layer; `may_balance(layer, "K" or "V")` may exclude some."""
    scales: dict[int, Scales] = {}
    now: dict[int, tuple[Moments, Moments]] = {}
    uneven: list[Uneven] = []

    def scale_side(layer: int, side: str, before: Moments) -> tuple[Tensor | None, Moments]:
        if not may_balance(layer, side):
            return None, before
        side_scales = channel_scales(before.use, before.size)
        # Of the worst head.
        ratio = float(error_ratio(before.use, before.size, side_scales).max())
        if not ratio >= LEAST_RATIO:  # nor if it is no number
            return None, before
        uneven.append(Uneven(layer, side, ratio))
        return side_scales, before.scaled(side_scales)

    for layer, (k, v) in moments.items():
        (k_scales, k), (v_scales, v) = scale_side(layer, "K", k), scale_side(layer, "V", v)
        scales[layer], now[layer] = (k_scales, v_scales), (k, v)
    return Scaling(scales, tuple(uneven), now)


def where_lossy(plan: KVPlan, allow: bool = True) -> Callable[[int, str], bool]:
    """A `may_balance`: sides with a lossy format; none unless `allow`."""
    return lambda layer, side: allow and plan.layers[layer][side == "V"].lossy


def balance(model: DecoderModel, may_balance: Callable[[int, str], bool] = lambda *_: True) -> tuple[DecoderModel, Scaling]:
    """Balance a model on the host, or one rank's part, as `choose_scaling`; the model after it, and its scaling."""
    layers, moments = list(model.weights.layers), {}
    for index, shape in enumerate(model.config.kv_shapes):
        if shape is not None:
            fields = {field: layers[index][field] for field in _moment_fields(layers[index])}
            moments[index] = _layer_moments(fields, model.config.layers[index].attention)
    scaling = choose_scaling(moments, may_balance)
    for index, pair in scaling.scales.items():
        for side, scales in zip("KV", pair, strict=True):
            if scales is not None:
                layers[index] = fold_scales(layers[index], side, scales)
    return replace(model, weights=replace(model.weights, layers=tuple(layers))) if scaling.uneven else model, scaling


def name_layers(layers: Sequence[int]) -> str:
    """Layers in words.

    >>> name_layers([0, 1, 2, 5])
    'layers 0 to 2 and 5'
    """
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    names = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"layer{'s' * (len(set(layers)) > 1)} {names}"


def _moment_fields(fields: Iterable[str]) -> set[str]:
    """Fields of a layer that its moments need; a normed K needs no projections."""
    read_fields = _READ.intersection(fields)
    return read_fields - {"q_proj", "k_proj"} if "k_norm" in read_fields else read_fields


def _bias(tensors: Mapping[str, Tensor], name: str, projection: Tensor) -> Tensor:
    return tensors[name].float() if name in tensors else torch.zeros(len(projection), device=projection.device)


def _row_squares(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Mean square [rows] fp32 of each row's output for normed inputs."""
    rows: Tensor = torch.linalg.vector_norm(tensors[name].float() * tensors["input_norm"].float(), dim=1)
    return rows.square()


def fold_scales(layer: LayerWeights, side: str, scales: Tensor) -> LayerWeights:
    """A layer with K or V multiplied by scales [H, D], and Q or o_proj divided; scales of normed K are alike in all heads."""
    queries = (layer.matrix("q_proj").shape[0] if side == "K" else layer.matrix("o_proj").shape[1]) // scales.numel()
    rows, query_factors = scales.flatten(), 1 / scales.repeat_interleave(queries, dim=0).flatten()
    if side == "V":
        factors = {"v_proj": rows[:, None], "v_bias": rows, "o_proj": query_factors}
    elif "k_norm" in layer:  # one norm serves all heads, whose scales are then the same
        factors = {"k_norm": scales[0], "q_norm": 1 / scales[0]}
    else:
        factors = {"k_proj": rows[:, None], "k_bias": rows, "q_proj": query_factors[:, None], "q_bias": query_factors}
    return layer.map(lambda field, x: x * factors[field].to(x.dtype) if field in factors else x)
