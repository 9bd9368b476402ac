"""What a cache needs from a Hugging Face config."""

from __future__ import annotations

from typing import Any

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import ModelShape


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


def model_shape(config: Any, num_layers: int) -> ModelShape:
    """The shapes that a plan file must match."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return ModelShape.uniform(num_layers, heads, head_dims(config, 0)[0], config.hidden_size, config.vocab_size)
