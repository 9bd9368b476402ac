"""The programs of a DecoderModel: a decoder layer, for decode and for prefill, and the head. What they take; no PyPTO here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from haarkv.models.config import Activation, Layer, ModelConfig, unknown_layer
from haarkv.tq_ops.kv import kernel_support
from haarkv.tq_ops.kv.kernel_support import wrong_head_dim
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK
from haarkv.tq_ops.npu.program import Argument, AttentionShape, Kernel, heads_at_once, with_tuned
from haarkv.tq_ops.npu.sides import MOST_PLACES, MOST_SINKS, READS, TQ4, Side, WindowShape, fixed_sides, window_shape

BLOCK = 128


@dataclass(frozen=True)
class Parts:
    """In what layers of the families differ, beside their sizes; all are built from one text.

    Attributes:
        head_norms, bias, activation, norms_behind: as a layer declares them.
        plus_one: norms' weights are FP32; else they are BF16.
    """

    head_norms: bool = True
    bias: bool = False
    activation: Activation = "silu"
    norms_behind: bool = False
    plus_one: bool = False

    @classmethod
    def from_layer(cls, layer: Layer) -> Parts:
        """Those of a declared layer with attention and a dense MLP."""
        mixer, mlp = layer.attention, layer.mlp
        return cls(mixer.head_norms, mixer.bias, mlp.activation, layer.post_norms, layer.norm.plus_one)


@dataclass(frozen=True)
class LayerProgram:
    """A whole decoder layer.

    Attributes:
        rows: tokens of a tile: projections run on so many rows at once; a multiple of the attention's unit.
        k, v: how K and V are stored.
        parts: what it is made of.
        kept: what stays of both in BF16.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rows: int
    attention: AttentionShape
    k: Side = TQ4
    v: Side = TQ4
    kept: WindowShape | None = None
    parts: Parts = Parts()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = (
            "hidden", "input_norm", "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o_proj",
            "mixer_out_norm", "post_norm", "gate_proj", "up_proj", "down_proj", "mlp_out_norm", "rotation", "rotation_fp16",
            "mask", "left_behind", "cos", "sin", "tile_tokens", "back", "slot", "position", "sequence", "block_table",
        )  # fmt: skip
        cache = (*self.k.arguments("k"), *self.v.arguments("v"))
        in_bf16 = tuple(Argument(name, output=self.kept is not None) for name in ("k_kept", "v_kept"))
        places = (Argument(name) for name in ("kept_begin", "kept_seen", "tile_keeps", "keep_token", "keep_row", "sinks"))
        fixed_arguments = (Argument(name) for name in names)
        return (*fixed_arguments, *self.k.domain_arguments(), *cache, *in_bf16, *places, Argument("out", output=True))

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import layer_kernel

        kernel: Kernel = layer_kernel.build(self, with_tuned(options))
        return kernel


@dataclass(frozen=True)
class HeadProgram:
    """Final norm and LM head.

    Attributes:
        vocab_size: rows of the head it projects to, padded to a multiple of 128.
        rows: tokens of a tile.
        piece: rows of the head projected at once.
        plus_one: the norm's weight is FP32; else it is BF16.
    """

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


DECODE_ROWS, PREFILL_ROWS, PREFILL_UNIT = 16, 128, 32
DECODE_STEP, PREFILL_STEP = 2048, 256
_VOCAB_MULTIPLE, _VOCAB_PIECE = 128, 4096
_MULTIPLE = 64
"""Of hidden and intermediate size: whole lines of the cube's tiles."""
SUPPORTED_FIELDS = ("head_norms", "bias", "window", "activation", "plus_one", "post_norms")
"""What a layer may declare as it likes: `models.config.unknown_part`."""


def decode_program(
    config: ModelConfig, k: Side | None = None, v: Side | None = None, kept: WindowShape | None = None, *,
    step_tokens: int = DECODE_STEP, layer: int = 0,
) -> LayerProgram:  # fmt: skip
    """One new token of each sequence; layers declared alike of the same formats share it, and any batch, context and block
    table.

    Args:
        k, v: how K and V are stored; `tq4` if None.
        layer: whose declaration it follows.
    """
    k, v = (side or fixed_sides(config.heads.head_dim)[TQ4.name] for side in (k, v))
    at_once = heads_at_once(config.heads.num_kv_heads, min(k.most_heads, v.most_heads))
    return _layer(config, layer, "decode_layer", DECODE_ROWS, (1, step_tokens, at_once), k, v, kept)


def prefill_program(
    config: ModelConfig, k: Side | None = None, v: Side | None = None, kept: WindowShape | None = None, *, layer: int = 0
) -> LayerProgram:
    """Many new tokens of each sequence; the same pieces, with more tokens to a tile and to a unit."""
    k, v = (side or fixed_sides(config.heads.head_dim)[TQ4.name] for side in (k, v))
    return _layer(config, layer, "prefill_layer", PREFILL_ROWS, (PREFILL_UNIT, PREFILL_STEP, 1), k, v, kept)


def _layer(
    config: ModelConfig, index: int, name: str, rows: int, at_once: tuple[int, int, int], k: Side, v: Side,
    kept: WindowShape | None,
) -> LayerProgram:  # fmt: skip
    """A layer's program; `at_once` is tokens of a unit, keys of a step and heads of an iteration."""
    layer = config.layers[index]
    mixer = layer.attention
    unit, step, heads = at_once
    if mixer.window is not None:
        # What lies before a window is skipped step by step, so that steps are no longer than the window.
        step = min(step, max(PREFILL_STEP, 1 << (mixer.window.bit_length() - 1)))
    attention = AttentionShape(
        mixer.num_heads, mixer.num_kv_heads, unit, step, heads, head_dim=mixer.head_dim, window=mixer.window, scale=mixer.scale
    )
    sizes = config.hidden_size, layer.mlp.width, layer.norm.eps
    return LayerProgram(name, *sizes, rows, attention, k, v, kept=kept, parts=Parts.from_layer(layer))


def head_program(config: ModelConfig, most_vocab: int | None = None) -> HeadProgram:
    """Final norm and LM head of a model, or of an even slice of at most `most_vocab` rows of its vocabulary."""
    slices = math.ceil(config.vocab_size / (most_vocab or config.vocab_size))
    vocab = math.ceil(config.vocab_size / slices / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return HeadProgram(
        "head",
        config.hidden_size,
        vocab,
        config.final_norm.eps,
        DECODE_ROWS,
        min(vocab, _VOCAB_PIECE),
        config.final_norm.plus_one,
    )


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
    return (
        kernel_support.unsupported(READS, plan, shapes) or _unkept(plan) or _partial_rope_reason(plan, config.heads.head_dim)
    )


def _unkept(plan: KVPlan) -> str | None:
    for layer, (k, v) in enumerate(plan.layers):
        if plan.has_window(k) != plan.has_window(v):
            return f"its programs keep tokens in BF16 beside both K and V, and {k.name} or {v.name} is stored as it is"
        shape = window_shape(plan, layer)
        if shape and (shape.span > MOST_PLACES or shape.sink > MOST_SINKS):
            most = MOST_PLACES - WINDOW_CHUNK
            return f"its programs keep up to {MOST_SINKS} sinks, and {most:,} tokens with the tail; leave some out"
    return None


def _partial_rope_reason(plan: KVPlan, head_dim: int) -> str | None:
    for layer, (k, _) in enumerate(plan.layers):
        turns = k.rope_shift(layer)
        if turns and 2 * len(turns.inv_freq) != head_dim:
            return f"its programs turn all {head_dim} numbers of a key, and {k.name} turns {2 * len(turns.inv_freq)} of them"
    return None
