"""The programs of a DecoderModel: a decoder layer, for decode and for prefill, and the head. What they take; no PyPTO here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.tq_ops.kv.reads import wrong_head_dim
from haarkv.tq_ops.npu.kept import KeptShape
from haarkv.tq_ops.npu.program import Argument, Kernel
from haarkv.tq_ops.npu.reads import READS
from haarkv.tq_ops.npu.scopes import AttentionShape, heads_at_once, with_tuned
from haarkv.tq_ops.npu.sides import TQ4, Side

BLOCK = 128


@dataclass(frozen=True)
class LayerProgram:
    """A whole decoder layer.

    Attributes:
        rows: tokens of a tile: projections run on so many rows at once; a multiple of the attention's unit.
        k, v: how K and V are stored.
        kept: what stays of both in BF16.
        partial: of one of several ranks: `out` is what its heads add to the output projection, FP32, and the layer ends
            there. The MLP's weights are arguments all the same, and are not read.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rows: int
    attention: AttentionShape
    k: Side = TQ4
    v: Side = TQ4
    partial: bool = False
    kept: KeptShape | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = (
            "hidden", "input_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "post_norm", "gate_proj",
            "up_proj", "down_proj", "rotation", "rotation_fp16", "mask", "cos", "sin", "tile_tokens", "back", "slot",
            "position", "sequence", "block_table",
        )  # fmt: skip
        cache = (*self.k.arguments("k"), *self.v.arguments("v"))
        in_bf16 = tuple(Argument(name, output=self.kept is not None) for name in ("k_kept", "v_kept"))
        places = (Argument(name) for name in ("kept_begin", "kept_seen", "tile_keeps", "keep_token", "keep_row", "sinks"))
        given = (Argument(name) for name in names)
        return (*given, *self.k.domain_arguments(), *cache, *in_bf16, *places, Argument("out", output=True))

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import layer_kernel

        kernel: Kernel = layer_kernel.build(self, with_tuned(options))
        return kernel


@dataclass(frozen=True)
class MlpProgram:
    """What follows a `partial` layer program on one of several ranks: what its columns add to the MLP's result, FP32.

    Attributes:
        rows: tokens of a tile.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rows: int

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = ("hidden", "post_norm", "gate_proj", "up_proj", "down_proj")
        return (*(Argument(name) for name in names), Argument("out", output=True))

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import mlp_kernel

        kernel: Kernel = mlp_kernel.build(self, options)
        return kernel


@dataclass(frozen=True)
class HeadProgram:
    """Final norm and LM head.

    Attributes:
        vocab_size: rows of the head it projects to, padded to a multiple of 128.
        rows: tokens of a tile.
        piece: rows of the head projected at once.
    """

    name: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    rows: int
    piece: int

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("hidden"), Argument("final_norm"), Argument("lm_head"), Argument("logits", output=True)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.models.qwen3_14b.npu import head_kernel

        kernel: Kernel = head_kernel.build(self, options)
        return kernel


DECODE_ROWS, PREFILL_ROWS, PREFILL_UNIT = 16, 128, 32
DECODE_STEP, PREFILL_STEP = 2048, 256
_VOCAB_MULTIPLE, _VOCAB_PIECE = 128, 4096


def decode_program(
    config: ModelConfig, k: Side = TQ4, v: Side = TQ4, kept: KeptShape | None = None, *, step_tokens: int = DECODE_STEP
) -> LayerProgram:
    """One new token of each sequence; layers of the same formats share it, and any batch, context and block table."""
    at_once = heads_at_once(config.heads.num_kv_heads, min(k.most_heads, v.most_heads))
    attention = AttentionShape(config.heads.num_heads, config.heads.num_kv_heads, 1, step_tokens, at_once)
    return _layer(config, "decode_layer", DECODE_ROWS, attention, k, v, kept)


def prefill_program(config: ModelConfig, k: Side = TQ4, v: Side = TQ4, kept: KeptShape | None = None) -> LayerProgram:
    """Many new tokens of each sequence; the same pieces, with more tokens to a tile and to a unit."""
    attention = AttentionShape(config.heads.num_heads, config.heads.num_kv_heads, PREFILL_UNIT, PREFILL_STEP, 1)
    return _layer(config, "prefill_layer", PREFILL_ROWS, attention, k, v, kept)


def _layer(
    config: ModelConfig, name: str, rows: int, attention: AttentionShape, k: Side, v: Side, kept: KeptShape | None
) -> LayerProgram:
    sizes = config.hidden_size, config.common.mlp.width, config.final_norm.eps
    return LayerProgram(name, *sizes, rows, attention, k, v, kept=kept)


def cut(program: LayerProgram) -> tuple[LayerProgram, MlpProgram]:
    """A layer's program in two, each ending where several ranks add up what they have."""
    first = replace(program, name=f"{program.name}_attention", partial=True)
    sizes = (program.hidden_size, program.intermediate_size, program.rms_norm_eps, program.rows)
    return first, MlpProgram(f"{program.name}_mlp", *sizes)


def head_program(config: ModelConfig, most_vocab: int | None = None) -> HeadProgram:
    """Final norm and LM head of a model, or of an even slice of at most `most_vocab` rows of its vocabulary."""
    slices = math.ceil(config.vocab_size / (most_vocab or config.vocab_size))
    vocab = math.ceil(config.vocab_size / slices / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return HeadProgram("head", config.hidden_size, vocab, config.final_norm.eps, DECODE_ROWS, min(vocab, _VOCAB_PIECE))


def unsupported(config: ModelConfig) -> str | None:
    """None, or in one sentence why no program can be built for such a model."""
    if other := unknown_layer(config, ("head_norms",)):
        return f"its programs are those of a dense Qwen3's layers, and {other}"
    if not all(mixer.head_norms for mixer in config.attentions):
        return f"its programs are those of a dense Qwen3's layers, and a {config.model_type} layer norms no heads"
    if len(set(config.layers)) > 1 or config.embedding_scale != 1:
        return "one program serves all layers of a dense Qwen3, and this model's differ"
    if reason := wrong_head_dim(READS, config.heads.head_dim):
        return reason
    for name, size in (("hidden_size", config.hidden_size), ("intermediate_size", config.common.mlp.width)):
        if size % 128:
            return f"its programs need a {name} that is a multiple of 128, not {size}"
    return None
