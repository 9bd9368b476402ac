"""What a cache needs from a Hugging Face config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from haarkv.engine.plans import declaration_in
from haarkv.models.hf_config import HFConfig, read_rope
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.shapes import KVShape


def decoder_config(config: Any) -> Any:
    """The part of a model's config that describes the decoder.

    Raises:
        InputError: not a config, or one of an encoder-decoder.
    """
    if not hasattr(config, "get_text_config"):
        raise InputError(f"TQCache takes a Hugging Face config, model.config, and not {type(config).__name__}")
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "is_encoder_decoder", False) or getattr(part, "add_cross_attention", False):
            raise InputError(f"{config.model_type} is an encoder-decoder with cross-attention, which TQCache does not hold")
    return config.get_text_config(decoder=True)


def head_dims(config: Any, layer: int) -> tuple[int, int]:
    """D of K and of V in one layer.

    Raises:
        InputError: the config does not say.
    """
    layers = getattr(config, "per_layer_config", None)
    described = layers[layer] if layers is not None else config
    if getattr(described, "qk_nope_head_dim", None) is not None:
        # Latent attention: head_dim exists too, but counts only the part that RoPE rotates.
        return described.qk_nope_head_dim + described.qk_rope_head_dim, described.v_head_dim
    head_dim = getattr(described, "head_dim", None)
    if head_dim is None:
        hidden, heads = getattr(described, "hidden_size", None), getattr(described, "num_attention_heads", None)
        if not hidden or not heads:
            raise InputError(f"the config of {config.model_type} names no attention heads; TQCache holds K and V of attention")
        head_dim = hidden // heads
    return head_dim, head_dim


def cache_layers(decoder: Any) -> list[Any]:
    """transformers' own cache layers for a model, which ours replace.

    Raises:
        InputError: a layer is none of attention over all tokens, over a window, or over another layer's.
    """
    # Who balances weights reads a config as well, and may not have transformers.
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
    """What a plan file must match; a window that is as wide as the context hides nothing and is dropped."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    positions = _positions(config)

    def window(their: Any) -> int | None:
        size = getattr(their, "sliding_window", None)
        return size if size and size < positions else None

    shapes = [KVShape(heads, head_dims(config, layer)[0], window(their)) for layer, their in enumerate(cache_layers(config))]
    return ModelShape(tuple(shapes), config.hidden_size, config.vocab_size, declaration=declaration_in(config.to_dict()))


def _positions(config: Any) -> float:
    """That a model may be run with, as this project reads configs; as many as are stated where its RoPE is not built."""
    stated = getattr(config, "max_position_embeddings", None)
    if not stated:
        return math.inf
    try:
        return read_rope(HFConfig(Path("config.json"), config.to_dict()), stated, kind_of_layer="full_attention").positions
    except InputError:
        return float(stated)
