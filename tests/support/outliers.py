"""Models with channels and biases far larger than the rest, as real checkpoints have them.

Each is made of another model. Where nothing else is said it computes the same, up to the rounding of its weights, so that any
loss in a quantized cache is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import layer_weight_specs
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import with_ops


def outlier_channels(
    model: DecoderModel, factor: float, pairs: Sequence[int] = (20, 45), channels: Sequence[int] = (7, 90)
) -> DecoderModel:
    """K and V with a few large channels in every layer, which whatever meets them takes back.

    Args:
        model: of a family that norms each head of Q and K.
        factor: what k_norm's weights and v_proj's rows are multiplied with, q_norm's and o_proj's columns divided by.
        pairs: of K's channels that RoPE rotates together, the i-th and the (D/2 + i)-th.
        channels: of V, of each KV head.
    """
    dim = model.config.heads.head_dim
    k = torch.ones(dim)
    k[[c + half for c in pairs for half in (0, dim // 2)]] = factor
    v = torch.ones(dim)
    v[list(channels)] = factor

    def change(field: str, tensor: Tensor) -> Tensor:
        scale = {
            "k_norm": k, "q_norm": 1 / k, "v_proj": v.repeat(model.config.heads.num_kv_heads)[:, None],
            "o_proj": 1 / v.repeat(model.config.heads.num_heads),
        }.get(field)  # fmt: skip
        return tensor if scale is None else (tensor.float() * scale).to(tensor.dtype)

    return _map_layers(model, lambda _, layer: layer.map(change))


def _map_layers(model: DecoderModel, change: Callable[[int, LayerWeights], LayerWeights]) -> DecoderModel:
    layers = tuple(change(index, layer) for index, layer in enumerate(model.weights.layers))
    return replace(model, weights=replace(model.weights, layers=layers))


def without_norms(model: DecoderModel, model_type: str, query_rms: Tensor, key_rms: Tensor) -> DecoderModel:
    """Norms of Q and K become fixed scales of their projections, beside which stand biases of 0. The function differs.

    Args:
        model: a dense Qwen3.
        model_type: to make of it, of a family with biases and without those norms.
        query_rms: [layers, num_heads] root mean square of Q as projected, by which its norm divided.
        key_rms: [layers, num_kv_heads] of K.
    """
    layer_configs = tuple(
        replace(layer, mixer=replace(layer.attention, head_norms=False, bias=True)) for layer in model.config.layers
    )
    config = replace(model.config, model_type=model_type, layers=layer_configs)
    layers = []
    for index, (layer, q_rms, k_rms) in enumerate(zip(model.weights.layers, query_rms, key_rms, strict=True)):
        tensors = dict(layer)
        for name, rms in (("q", q_rms), ("k", k_rms)):
            rows = (tensors.pop(f"{name}_norm") / rms[:, None]).flatten()
            tensors[f"{name}_proj"] = (tensors[f"{name}_proj"] * rows[:, None]).to(model.dtype)
        biases = {f"{name}_bias": tensors[f"{name}_proj"].new_zeros(len(tensors[f"{name}_proj"])) for name in "qkv"}
        names = {field: tensor.name for field, tensor in layer_weight_specs(layer_configs[index], config.hidden_size).items()}
        layers.append(LayerWeights(tensors | biases, names))
    return replace(model, config=config, weights=replace(model.weights, layers=tuple(layers)))


def key_biases(model: DecoderModel, norm: float, layers: Sequence[int], pairs: Sequence[int] = (62, 63)) -> DecoderModel:
    """Large biases of K on a few channels of a few layers.

    On the pairs that RoPE rotates slowest a bias adds nearly the same to all logits of a query: softmax drops it.

    Args:
        model: of a family with biases.
        norm: of the bias of each KV head.
        pairs: of channels that RoPE rotates together.
    """
    dim = model.config.heads.head_dim
    places = [c + half for c in pairs for half in (0, dim // 2)]
    bias = torch.zeros(model.config.heads.num_kv_heads, dim)
    bias[:, places] = norm / len(places) ** 0.5

    def change(index: int, layer: LayerWeights) -> LayerWeights:
        if index not in layers:
            return layer
        return layer.map(lambda field, x: x + bias.flatten().to(x.dtype) if field == "k_bias" else x)

    return _map_layers(model, change)


def measured_rms(model: DecoderModel, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """By what the norms of Q and K divide on average: [layers, num_heads] and [layers, num_kv_heads] fp32.

    Args:
        token_ids: a text, at most as long as a block of a cache is.
    """
    rms_values: list[Tensor] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim == 3:
            rms_values.append(x.float().square().mean(-1).sqrt().mean(0))
        return reference.rms_norm(x, weight, eps)

    config = model.config
    plan = KVSpec("bf16").plan(config.num_layers)
    cache = PagedKVCache(plan, config.kv_shapes, num_blocks=1)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    batch = paging.batch([paging.add()], [len(token_ids)])
    with torch.inference_mode():
        model.forward(torch.tensor(token_ids), batch, cache, with_ops(reference, {"rms_norm": rms_norm}))
    return torch.stack(rms_values[0::2]).clone(), torch.stack(rms_values[1::2]).clone()
