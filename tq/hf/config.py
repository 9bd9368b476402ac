"""What a cache needs of a Hugging Face config, and of the weights: balance, and what is lost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from haarkv.engine.collapse import Guard
from haarkv.engine.plans import declaration_in
from haarkv.models import balance
from haarkv.models.balance import Moments, Scales, Uneven, key_moments, value_moments
from haarkv.models.hf_config import HFConfig, read_rope
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape


def decoder_config(config: Any) -> Any:
    """The decoder's part of a model's config; encoder-decoders and other objects are refused."""
    if not hasattr(config, "get_text_config"):
        raise InputError(f"TQCache takes a Hugging Face config, model.config, and not {type(config).__name__}")
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_encoder_decoder", False) or getattr(part, "add_cross_attention", False):
            raise InputError(f"{config.model_type} is an encoder-decoder with cross-attention, which TQCache does not hold")
    return config.get_text_config(decoder=True)


def head_dims(config: Any, layer: int) -> tuple[int, int]:
    """D of K and of V in one layer; a config that does not say is refused."""
    layers = getattr(config, "per_layer_config", None)
    layer_config = layers[layer] if layers is not None else config
    if getattr(layer_config, "qk_nope_head_dim", None) is not None:
        # Latent attention: head_dim exists too, but counts only the part that RoPE rotates.
        return layer_config.qk_nope_head_dim + layer_config.qk_rope_head_dim, layer_config.v_head_dim
    head_dim = getattr(layer_config, "head_dim", None)
    if head_dim is None:
        hidden, heads = getattr(layer_config, "hidden_size", None), getattr(layer_config, "num_attention_heads", None)
        if not hidden or not heads:
            raise InputError(f"the config of {config.model_type} names no attention heads; TQCache holds K and V of attention")
        head_dim = hidden // heads
    return head_dim, head_dim


def cache_layers(decoder: Any) -> list[Any]:
    """transformers' own cache layers, which ours replace; others than attention's are refused."""
    # Imported here: balancing weights reads a config as well, without transformers.
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    try:
        layers: list[Any] = DynamicCache(config=decoder).layers
    except KeyError as error:
        raise InputError(f"{decoder.model_type} has layers of type {error}, which TQCache does not hold") from None
    types = getattr(decoder, "layer_types", None) or [None] * len(layers)
    for layer, (their, word) in enumerate(zip(layers, types, strict=True)):
        # Not isinstance: transformers' other layers derive from these and hold more. A DummyLayer holds nothing.
        if type(their) not in (DynamicLayer, DynamicSlidingWindowLayer) and type(their).__name__ != "DummyLayer":
            raise InputError(
                f"layer {layer} of {decoder.model_type} is {word or type(their).__name__}, which is more than K and V; "
                "TQCache holds models of full and sliding-window attention"
            )
    return layers


def model_shape(config: Any) -> ModelShape:
    """What a plan file must match; a sliding window as wide as the context is dropped."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    positions = _positions(config)

    def window(their: Any) -> int | None:
        size = getattr(their, "sliding_window", None)
        return size if size and size < positions else None

    shapes = [KVShape(heads, head_dims(config, layer)[0], window(their)) for layer, their in enumerate(cache_layers(config))]
    return ModelShape(tuple(shapes), config.hidden_size, config.vocab_size, declaration=declaration_in(config.to_dict()))


def _positions(config: Any) -> float:
    """Positions that a model may be run with; as stated where its RoPE is unknown here."""
    limit = getattr(config, "max_position_embeddings", None)
    if not limit:
        return math.inf
    try:
        file = HFConfig(Path("config.json"), config.to_dict())
        return read_rope(file, head_dims(config, 0)[0], kind_of_layer="full_attention")[1]
    except InputError:
        return float(limit)


# -- Weights ----------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn\.([qkvo]_proj|[qk]_norm)|(input)_layernorm)\.(weight|bias)")
_REQUIRED_TENSORS = {"input_norm", "q_proj", "k_proj", "v_proj", "o_proj"}


def layer_tensors(model: Any) -> dict[int, dict[str, Tensor]]:
    """Each layer's tensors by the fields of `LayerWeights`; layers with other names are left out."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in model.named_parameters():
        if match := _NAME.fullmatch(name):
            layer, attention, norm, kind = match.groups()
            part = "input_norm" if norm else attention
            field_name = f"{part[0]}_bias" if kind == "bias" else part
            layers.setdefault(int(layer), {})[field_name] = tensor.detach()
    return {layer: tensors for layer, tensors in layers.items() if tensors.keys() >= _REQUIRED_TENSORS}


def layer_moments(model: Any, decoder: Any) -> dict[int, tuple[Moments, Moments]]:
    """Moments of K and V of each layer whose weights are understood; `decoder` is of `decoder_config`."""
    moments, parameters = {}, getattr(decoder, "rope_parameters", None) or {}
    rotated = parameters.get("partial_rotary_factor") or getattr(decoder, "partial_rotary_factor", None) or 1
    for layer, tensors in layer_tensors(model).items():
        k_dim, v_dim = head_dims(decoder, layer)
        heads = tensors["k_proj"].shape[0] // k_dim
        if _is_plain_attention(tensors, heads, k_dim, v_dim):
            moments[layer] = (
                key_moments(tensors, heads, k_dim, int(k_dim * rotated)),
                value_moments(tensors, heads, v_dim),
            )
    return moments


def _is_plain_attention(tensors: Mapping[str, Tensor], heads: int, k_dim: int, v_dim: int) -> bool:
    """Whether these are dense weights of grouped-query attention."""
    hidden = tensors["input_norm"].shape
    if any(x.is_meta or not x.is_floating_point() for x in tensors.values()) or k_dim != v_dim:
        return False
    if any(tensors[name].shape[1:] != hidden for name in ("q_proj", "k_proj", "v_proj")):
        return False
    rows = {name: tensors[name].shape[0] for name in ("q_proj", "k_proj", "v_proj")}
    whole = rows["k_proj"] == rows["v_proj"] == heads * k_dim and rows["q_proj"] % rows["k_proj"] == 0
    norms = {"q_norm", "k_norm"} & tensors.keys()
    both = len(norms) != 1 and all(tensors[name].shape == (k_dim,) for name in norms)
    return whole and both and tensors["o_proj"].shape[1] == rows["q_proj"]


def balance_scales(
    model: Any, decoder: Any, plan: KVPlan, *, balances: bool, allow_collapse: bool
) -> tuple[Mapping[int, Scales], tuple[Uneven, ...]]:
    """Scales of each uneven layer (none unless `balances`), and a check of what the cache would lose with them.

    A model whose text would be garbage is refused, or warned of with `allow_collapse`.
    """
    scaling = balance.choose_scaling(layer_moments(model, decoder), balance.where_lossy(plan, balances))
    Guard(plan, scaling.moments, head_dims(decoder, 0)[0] ** -0.5, not balances, allow_collapse).at_load(warn)
    return scaling.scales, scaling.uneven
