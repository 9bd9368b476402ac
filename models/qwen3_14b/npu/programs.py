"""The programs of a DecoderModel: a decoder layer, for decode and for prefill, and the head. What they take; no PyPTO here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from haarkv.models.config import Layer, ModelConfig, unknown_layer
from haarkv.tq_ops.kv import kernel_support
from haarkv.tq_ops.kv.kernel_support import wrong_head_dim
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK
from haarkv.tq_ops.npu.program import Argument, AttentionShape, Kernel, heads_at_once, with_tuned
from haarkv.tq_ops.npu.sides import (
    MOST_PLACES,
    MOST_SINKS,
    READS,
    TQ4,
    Side,
    WindowShape,
    fixed_sides,
    layer_sides,
    window_shape,
)

BLOCK = 128
_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class LayerProgram:
    """A whole decoder layer.

    Attributes:
        declared: its norms' weights are FP32 with `plus_one`, else BF16.
        rows: tokens of a tile: the rows on which projections run at once; a multiple of the attention's unit.
        k, v: how K and V are stored.
        kept: what stays of both in BF16.
    """

    name: str
    hidden_size: int
    declared: Layer
    rows: int
    attention: AttentionShape
    k: Side = TQ4
    v: Side = TQ4
    kept: WindowShape | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = (
            "hidden", "input_norm", "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o_proj",
            "mixer_out_norm", "post_norm", "gate_proj", "up_proj", "down_proj", "mlp_out_norm", "rotation", "rotation_fp16",
            "mask", "left_behind", "cos", "sin", "tile_tokens", "back", "slot", "position", "sequence", "block_table",
        )  # fmt: skip
        window = ("k_kept", "v_kept", "kept_begin", "kept_seen", "tile_keeps", "keep_token", "keep_row", "sinks")
        unread = self._unread()
        cache = (*self.k.domain_arguments(), *self.k.arguments("k"), *self.v.arguments("v"))
        in_bf16 = (Argument(n, self.kept is not None and n in ("k_kept", "v_kept"), unread.get(n)) for n in window)
        return (*(Argument(n, unread=unread.get(n)) for n in names), *cache, *in_bf16, Argument("out", output=True))

    def _unread(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Zeros for what this layer lacks."""
        shape, declared = self.attention, self.declared
        mixer, dim, norm = declared.attention, shape.head_dim, _FP32 if declared.norm.plus_one else _BF16
        zeros: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"back": (_FP32, (1, dim))}
        if not mixer.bias:
            zeros |= {f"{x}_bias": (_BF16, (1, shape.num_kv_heads, dim)) for x in "kv"}
            zeros["q_bias"] = _BF16, (1, shape.num_heads, dim)
        if not mixer.head_norms:
            zeros |= dict.fromkeys(("q_norm", "k_norm"), (norm, (1, 1, dim)))
        if not declared.post_norms:
            zeros |= dict.fromkeys(("mixer_out_norm", "mlp_out_norm"), (norm, (1, self.hidden_size)))
        if shape.window is None:
            zeros["left_behind"] = _FP32, (1, 2 * shape.step_tokens + shape.unit_tokens)
        if self.kept is None:
            zeros |= dict.fromkeys(("k_kept", "v_kept"), (_BF16, (1, dim)))
            zeros |= dict.fromkeys(("kept_begin", "tile_keeps", "keep_token", "keep_row"), (_INT32, (1,)))
            zeros |= {"kept_seen": (_FP32, (1, dim)), "sinks": (_FP32, (1, shape.step_tokens))}
        return zeros

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import layer_kernel

        kernel: Kernel = layer_kernel.build(self, with_tuned(options))
        return kernel


@dataclass(frozen=True)
class HeadProgram:
    """Final norm and LM head: `vocab_size` a multiple of 128, `piece` rows at once; FP32 norm with `plus_one`."""

    name: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    rows: int
    piece: int
    plus_one: bool = False

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("hidden"), Argument("final_norm"), Argument("lm_head"), Argument("logits", output=True)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import layer_kernel

        kernel: Kernel = layer_kernel.build_head(self, options)
        return kernel


_VOCAB_MULTIPLE, _VOCAB_PIECE = 128, 4096
_MULTIPLE = 64  # of hidden and intermediate size: whole lines of the cube's tiles
SUPPORTED_FIELDS = ("head_norms", "bias", "window", "activation", "plus_one", "post_norms")
"""What a layer may declare as it likes: `models.config.unknown_part`."""


class Phase(NamedTuple):
    """Sizes of a layer's program: tokens of a tile and of a unit, keys of a step, and most heads of an iteration."""

    name: str
    rows: int
    unit: int
    step: int
    most_heads: int


DECODE, PREFILL = Phase("decode_layer", 16, 1, 2048, 8), Phase("prefill_layer", 128, 32, 256, 1)
"""One new token of each sequence, or many; a program serves any batch and context."""


def layer_program(
    phase: Phase, config: ModelConfig, k: Side | None = None, v: Side | None = None, kept: WindowShape | None = None, *,
    layer: int = 0, step_tokens: int | None = None,
) -> LayerProgram:  # fmt: skip
    """A layer's program, which layers of one declaration and the same formats (`tq4` if None) share."""
    declared = config.layers[layer]
    mixer = declared.attention
    k, v = (side or fixed_sides(mixer.head_dim)[TQ4.name] for side in (k, v))
    at_once = heads_at_once(mixer.num_kv_heads, min(phase.most_heads, k.most_heads, v.most_heads))
    step = step_tokens or phase.step
    if mixer.window is not None:
        # What lies before a window is skipped step by step, so that steps are no longer than the window.
        step = min(step, max(PREFILL.step, 1 << (mixer.window.bit_length() - 1)))
    attention = AttentionShape(
        mixer.num_heads, mixer.num_kv_heads, phase.unit, step, at_once, head_dim=mixer.head_dim, window=mixer.window,
        scale=mixer.scale,
    )  # fmt: skip
    return LayerProgram(phase.name, config.hidden_size, declared, phase.rows, attention, k, v, kept)


decode_program, prefill_program = partial(layer_program, DECODE), partial(layer_program, PREFILL)


def plan_program(phase: Phase, config: ModelConfig, plan: KVPlan, layer: int, chunk: int = WINDOW_CHUNK) -> LayerProgram:
    """The program of a layer with a plan's K and V; `chunk` is the cache's."""
    mixer = config.layers[layer].attention
    kept = window_shape(plan, layer, chunk, mixer.window)
    return layer_program(phase, config, *layer_sides(plan, layer, mixer.head_dim), kept, layer=layer)


def head_program(config: ModelConfig, most_vocab: int | None = None) -> HeadProgram:
    """Final norm and LM head, or an even slice of at most `most_vocab` rows of the vocabulary."""
    slices = math.ceil(config.vocab_size / (most_vocab or config.vocab_size))
    vocab = math.ceil(config.vocab_size / slices / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    norm, piece = config.final_norm, min(vocab, _VOCAB_PIECE)
    return HeadProgram("head", config.hidden_size, vocab, norm.eps, DECODE.rows, piece, norm.plus_one)


def unsupported(config: ModelConfig, plan: KVPlan | None = None) -> str | None:
    """None, or in one sentence why no program can be built for such a model, or such a cache of it."""
    if other := unknown_layer(config, SUPPORTED_FIELDS):
        return f"its programs are those of dense layers with attention, and {other}"
    if len({mixer.heads for mixer in config.attentions}) > 1:
        return "its programs need heads of one number and size in all layers"
    if reason := wrong_head_dim(READS, config.heads.head_dim):
        return reason
    widths = {layer.mlp.width for layer in config.layers}
    for name, sizes in (("hidden_size", {config.hidden_size}), ("intermediate_size", widths)):
        for size in sizes:
            if size % _MULTIPLE:
                return f"its programs need a {name} that is a multiple of {_MULTIPLE}, not {size}"
    if plan is None:
        return None
    shapes = config.kv_shapes[: len(plan.layers)]
    return kernel_support.unsupported(READS, plan, shapes) or _unsupported_cache(plan, config.heads.head_dim)


def _unsupported_cache(plan: KVPlan, head_dim: int) -> str | None:
    for layer, (k, v) in enumerate(plan.layers):
        if plan.has_window(k) != plan.has_window(v):
            return f"its programs keep tokens in BF16 beside both K and V, and {k.name} or {v.name} is stored as it is"
        shape = window_shape(plan, layer)
        if shape and (shape.span > MOST_PLACES or shape.sink > MOST_SINKS):
            most = MOST_PLACES - WINDOW_CHUNK
            return f"its programs keep up to {MOST_SINKS} sinks, and {most:,} tokens with the tail; leave some out"
        turns = k.rope_shift(layer)
        if turns and 2 * len(turns.inv_freq) != head_dim:
            return f"its programs turn all {head_dim} numbers of a key, and {k.name} turns {2 * len(turns.inv_freq)} of them"
    return None
