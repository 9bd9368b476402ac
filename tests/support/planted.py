"""`tiny` with planted faults, on disk and in memory: channels and biases far larger than the rest, as real checkpoints have.

Where nothing else is said a planted model computes what the other did, up to the rounding of its weights: any loss in a
quantized cache is its fault's.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from safetensors.torch import save_file
from small_models import text_logits
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import TINY, load_model
from haarkv.models.tensors import LayerWeights
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.models.weights import layer_weight_specs
from haarkv.tq_ops import reference
from haarkv.tq_ops.table import with_ops


@cache
def tiny():
    return load_model("tiny")


@cache
def text():
    """Held-out text of `tiny`."""
    return next(text for text in held_out_texts().values() if len(text) > 20_000)


@cache
def token_ids(count):
    return tuple(load_tokenizer("tiny", tiny().config).encode(text())[:count])


@cache
def tiny_qwen2():
    """`tiny` as a Qwen2: its norms of Q and K are scales of the projections, fixed where they are on average; biases are 0."""
    rms_values: list[Tensor] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim == 3:
            rms_values.append(x.float().square().mean(-1).sqrt().mean(0))
        return reference.rms_norm(x, weight, eps)

    model = tiny()
    run(model, token_ids(128), with_ops(reference, {"rms_norm": rms_norm}))
    layers = model.config.layers
    configs = tuple(replace(layer, mixer=replace(layer.attention, head_norms=False, bias=True)) for layer in layers)

    def change(index: int, layer: LayerWeights) -> LayerWeights:
        tensors = dict(layer)
        for name, rms in zip("qk", rms_values[2 * index : 2 * index + 2], strict=True):
            rows = (tensors.pop(f"{name}_norm") / rms[:, None]).flatten()
            tensors[f"{name}_proj"] = (tensors[f"{name}_proj"] * rows[:, None]).to(model.dtype)
        biases = {f"{name}_bias": tensors[f"{name}_proj"].new_zeros(len(tensors[f"{name}_proj"])) for name in "qkv"}
        specs = layer_weight_specs(configs[index], model.config.hidden_size)
        return LayerWeights(tensors | biases, {field: tensor.name for field, tensor in specs.items()})

    return replace(_map_layers(model, change), config=replace(model.config, model_type="qwen2", layers=configs))


def run(model, ids, ops=reference, kv="bf16"):
    """Logits [T, vocab] after each of some tokens."""
    return text_logits(ReferenceExecutor(model, ops), ids, kv)


PAIRS, CHANNELS = (20, 45), (7, 90)
"""Channels of K that RoPE rotates together, the i-th and the (D/2 + i)-th; and channels of V, of each KV head."""


def outlier_channels(factor: float) -> DecoderModel:
    """`tiny`, whose K and V have a few large channels in every layer, which whatever meets them takes back.

    Args:
        factor: what k_norm's weights and v_proj's rows are multiplied with, q_norm's and o_proj's columns divided by.
    """
    heads = tiny().config.heads
    k, v = torch.ones(2, heads.head_dim)
    k[[c + half for c in PAIRS for half in (0, heads.head_dim // 2)]] = factor
    v[list(CHANNELS)] = factor
    scales = {
        "k_norm": k, "q_norm": 1 / k, "v_proj": v.repeat(heads.num_kv_heads)[:, None], "o_proj": 1 / v.repeat(heads.num_heads),
    }  # fmt: skip

    def change(field: str, tensor: Tensor) -> Tensor:
        return (tensor.float() * scales[field]).to(tensor.dtype) if field in scales else tensor

    return _map_layers(tiny(), lambda _, layer: layer.map(change))


def _map_layers(model: DecoderModel, change: Callable[[int, LayerWeights], LayerWeights]) -> DecoderModel:
    layers = tuple(change(index, layer) for index, layer in enumerate(model.weights.layers))
    return replace(model, weights=replace(model.weights, layers=layers))


def key_biases(norm: float, layers: Sequence[int]) -> DecoderModel:
    """`tiny_qwen2` with large biases of K on a few channels of a few layers.

    They are on the pairs that RoPE rotates slowest: there a bias adds nearly the same to all logits of a query, which softmax
    drops.

    Args:
        norm: of the bias of each KV head.
    """
    heads = tiny_qwen2().config.heads
    places = [c + half for c in (62, 63) for half in (0, heads.head_dim // 2)]
    bias = torch.zeros(heads.num_kv_heads, heads.head_dim)
    bias[:, places] = norm / len(places) ** 0.5

    def change(index: int, layer: LayerWeights) -> LayerWeights:
        if index not in layers:
            return layer
        return layer.map(lambda field, x: x + bias.flatten().to(x.dtype) if field == "k_bias" else x)

    return _map_layers(tiny_qwen2(), change)


def dead_head(model: DecoderModel) -> DecoderModel:
    """The V of the first KV head is 0 in every layer: its query heads give nothing. The function differs."""

    def change(field: str, tensor: Tensor) -> Tensor:
        return tensor.index_fill(0, torch.arange(model.config.heads.head_dim), 0.0) if field == "v_proj" else tensor

    return _map_layers(model, lambda _, layer: layer.map(change))


def save_tiny(model, folder):
    """Write a model made of `tiny` as a checkpoint folder, which must not be there."""
    folder.mkdir(parents=True)
    settings = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    if settings["model_type"] != model.config.model_type:
        del settings["architectures"]  # readers know it by the model type
    settings |= {"model_type": model.config.model_type, "hidden_size": model.config.hidden_size, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder / name)
    save_file({name: tensor.contiguous() for name, tensor in model.weights.named_tensors()}, folder / "model.safetensors")
    return folder
