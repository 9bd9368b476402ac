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
from torch import Tensor

from haarkv.models.base import DecoderModel, new_cache
from haarkv.models.catalog import TINY, load_model
from haarkv.models.tensors import LayerWeights
from haarkv.models.text import load_tokenizer
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.models.weights import layer_weight_specs
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVSpec
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
    """`tiny` as a Qwen2: its norms of Q and K are fixed where they are on average, its biases are 0."""
    rms_values: list[Tensor] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim == 3:
            rms_values.append(x.float().square().mean(-1).sqrt().mean(0))
        return reference.rms_norm(x, weight, eps)

    run(tiny(), token_ids(128), with_ops(reference, {"rms_norm": rms_norm}))
    return without_norms(tiny(), "qwen2", torch.stack(rms_values[0::2]).clone(), torch.stack(rms_values[1::2]).clone())


def run(model, ids, ops=reference, kv="bf16"):
    """Logits [T, vocab] after each of some tokens."""
    config = model.config
    cache, paging = new_cache(config, KVSpec(kv).plan(config.num_layers), sequences=1, tokens=len(ids))
    batch = paging.batch([paging.add()], [len(ids)])
    with torch.inference_mode():
        hidden = model.layers(model.embed(torch.tensor(ids)), range(config.num_layers), batch, cache, ops)
        return model.head(hidden, ops)


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


def dead_head(model: DecoderModel, head: int = 0) -> DecoderModel:
    """A KV head whose V is 0 in every layer: its query heads give nothing. The function differs."""
    dim = model.config.heads.head_dim
    rows = torch.ones(model.config.heads.num_kv_heads * model.config.heads.head_dim)
    rows[head * dim : (head + 1) * dim] = 0.0

    def change(field: str, tensor: Tensor) -> Tensor:
        return tensor * rows[:, None].to(tensor.dtype) if field == "v_proj" else tensor

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
