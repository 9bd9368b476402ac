"""Small random Qwen3 models whose logits depend on their context, and caches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from op_contract.caches import cache_tensors as cache_tensors
from torch import Tensor

from haarkv.executors import base as executors
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope, RopeScaling
from haarkv.models.rope import RopeTable
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import assemble, checkpoint_shapes
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

KV_FORMATS = ("fp32", "bf16", "tq4", "tq4_seed", "k=bf16,v=tq4")
"""Every format, and a mixture."""


def dense_layers(
    count: int, *, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int, rope_theta: float = 1e6,
    rms_norm_eps: float = 1e-6, head_norms: bool = False, bias: bool = False, rope_scaling: RopeScaling | None = None,
    windows: Sequence[int | None] | None = None,
) -> tuple[Layer, ...]:  # fmt: skip
    """Layers of the plain kind: attention with RoPE on whole heads, logits over sqrt(head_dim), a SiLU-gated MLP."""
    attention = Attention(
        num_heads, num_kv_heads, head_dim, Rope(rope_theta, head_dim, rope_scaling), head_dim**-0.5,
        head_norms=head_norms, bias=bias,
    )  # fmt: skip
    layer = Layer(attention, Dense(intermediate_size), Norm(rms_norm_eps))
    return tuple(
        replace(layer, mixer=replace(attention, window=window)) if window else layer for window in windows or [None] * count
    )


def dense_config(
    model_type: str = "qwen3", *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int,
    hidden_size: int, vocab_size: int, rope_theta: float = 1e6, rope_scaling: RopeScaling | None = None,
    rms_norm_eps: float = 1e-6, qkv_bias: bool | None = None, tie_word_embeddings: bool = False, **more: Any,
) -> ModelConfig:  # fmt: skip
    """A model whose layers are all alike, of a family as it is known: Qwen3 norms heads, Qwen2 has biases."""
    layers = dense_layers(
        num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=intermediate_size,
        rope_theta=rope_theta, rope_scaling=rope_scaling, rms_norm_eps=rms_norm_eps, head_norms="qwen3" in model_type,
        bias=model_type == "qwen2" if qkv_bias is None else qkv_bias,
    )  # fmt: skip
    norm = Norm(rms_norm_eps)
    return ModelConfig(model_type, layers, hidden_size, vocab_size, norm, tied=tie_word_embeddings, **more)


def resize_config(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A model like another whose layers are all alike, in other sizes; `changes` by the names of `dense_config`.

    num_experts, moe_intermediate_size, num_experts_per_tok and norm_topk_prob give every layer experts.
    """
    mixer, mlp, norm = config.common.attention, config.common.mlp, config.common.norm
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    experts = {name: changes.pop(name) for name in names if name in changes}
    before = {
        "model_type": config.model_type, "num_layers": config.num_layers, **mixer.heads._asdict(),
        "intermediate_size": mlp.width, "rope_theta": mixer.rope.theta, "rope_scaling": mixer.rope.scaling,
        "rms_norm_eps": norm.eps, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied, "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": config.eos_token_ids,
    }  # fmt: skip
    new_config = dense_config(**before | changes)
    if not experts:
        return new_config
    count, per_token, width = experts["num_experts"], experts.get("num_experts_per_tok", 2), experts["moe_intermediate_size"]
    mlps = Experts(count, per_token, width, normalized=experts.get("norm_topk_prob", False))
    return replace(new_config, layers=tuple(replace(layer, mlp=mlps) for layer in new_config.layers))


def small_config(
    model_type: str = "qwen3", *, num_layers: int = 3, num_heads: int = 10, num_kv_heads: int = 2, head_dim: int = 128,
    intermediate_size: int = 80, rope_theta: float = 1e4, head_norms: bool = True, bias: bool = False,
    hidden_size: int = 48, vocab_size: int = 61, max_position_embeddings: int = 512, tied: bool = False,
    windows: Sequence[int | None] | None = None,
) -> ModelConfig:  # fmt: skip
    """A small declaration; hidden_size is never heads * head_dim, so that the two cannot be mistaken for one another."""
    layers = dense_layers(
        num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=intermediate_size,
        rope_theta=rope_theta, head_norms=head_norms, bias=bias, windows=windows,
    )  # fmt: skip
    return ModelConfig(
        model_type, layers, hidden_size, vocab_size, Norm(1e-6), tied=tied, max_position_embeddings=max_position_embeddings
    )


def window_config(*windows: int | None) -> ModelConfig:
    """A small model whose layers see so many tokens."""
    base = SMALL.heads
    layers = dense_layers(
        len(windows), num_heads=base.num_heads, num_kv_heads=base.num_kv_heads, head_dim=base.head_dim, intermediate_size=80,
        head_norms=True, windows=windows,
    )  # fmt: skip
    return replace(SMALL, layers=layers)


def gemma_config(
    *, num_layers: int = 2, hidden_size: int = 48, num_heads: int = 4, head_dim: int = 256, window: int = 12
) -> ModelConfig:
    """A small declaration as Gemma 3's: each second layer with a window and a RoPE of its own, one KV head, 1 + w, norms
    behind, GELU, scaled embeddings."""
    attention = Attention(num_heads, 1, head_dim, Rope(1e6, head_dim), head_dim**-0.5, head_norms=True)
    local = replace(attention, window=window, rope=Rope(1e4, head_dim))
    norm = Norm(1e-6, plus_one=True)
    layers = tuple(
        Layer(attention if index % 2 else local, Dense(80, "gelu_tanh"), norm, post_norms=True) for index in range(num_layers)
    )
    return ModelConfig(
        "gemma3_text", layers, hidden_size, 61, norm, embedding_scale=hidden_size**0.5, tied=True, max_position_embeddings=4096
    )


# hidden_size is never heads * head_dim, so that the two cannot be mistaken for one another.
_BASE = dense_config(
    model_type="qwen3", hidden_size=48, num_layers=3, num_heads=10, num_kv_heads=2, head_dim=128, intermediate_size=80,
    vocab_size=61, rope_theta=1e4, max_position_embeddings=512,
)  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "gqa5_d128": _BASE,
    "gqa5_one_kv_head_d128_tied": resize_config(_BASE, num_heads=5, num_kv_heads=1, tie_word_embeddings=True),
    "mha_d64": resize_config(_BASE, num_heads=3, num_kv_heads=3, head_dim=64),
    "gqa2_d256_tied": resize_config(_BASE, num_layers=2, num_heads=4, head_dim=256, rope_theta=1e6, tie_word_embeddings=True),
}
"""Small shapes by name: grouped and ungrouped heads, every shipped head_dim, tied and untied heads."""
SMALL = CONFIGS["gqa5_d128"]
"""The small shape that resembles Qwen3-14B most: five query heads a KV head, head_dim 128, three rotations."""


def small_model(config: ModelConfig = SMALL, seed: int = 0, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """A random model with logits of size 1, attention that looks at some tokens far more than at others, uneven norms."""
    raw = random_weights(config, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def matrix(weight: Tensor) -> Tensor:
        return (weight * (weight.shape[1] ** -0.5 / 0.02)).to(dtype)

    def norm(weight: Tensor, low: float = 0.5, high: float = 1.5) -> Tensor:
        norm_dtype = torch.float32 if config.final_norm.plus_one else dtype  # as 1 + w is
        return torch.empty_like(weight).uniform_(low, high, generator=generator).to(norm_dtype)

    def layer(weights: LayerWeights) -> LayerWeights:
        new = {field: norm(t) if t.ndim == 1 else matrix(t) for field, _, t in weights.named_tensors()}
        # Scores q.k / sqrt(D) get a standard deviation of about 2: attention is neither uniform nor one-hot.
        new |= {field: norm(new[field], 0.7, 2.1) for field in ("q_norm", "k_norm") if field in new}
        return weights.map(lambda field, _: new[field])

    embedding = matrix(raw.embedding)
    weights = replace(
        raw,
        embedding=embedding,
        layers=tuple(layer(weights) for weights in raw.layers),
        final_norm=norm(raw.final_norm),
        lm_head=embedding if config.tied else matrix(raw.lm_head),
    )
    return DecoderModel.from_weights(config, weights)


def without_numbers(config: ModelConfig) -> DecoderModel:
    """A model of true shapes in bf16, without memory for its weights and without tables."""
    shapes = checkpoint_shapes(config)
    weights = assemble(config, lambda name: torch.empty(shapes[name], dtype=torch.bfloat16, device="meta"))
    return DecoderModel(config, weights, {})


def random_tokens(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    """Token ids of one prompt."""
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache(config: ModelConfig, kv: str | KVSpec = "tq4", num_blocks: int = 12, block_size: int = 8) -> PagedKVCache:
    """An empty cache for a model; `kv` as `formats.parse` takes it, or a whole spec."""
    spec = KVSpec(kv) if isinstance(kv, str) else kv
    return PagedKVCache(
        spec.plan(config.num_layers),
        config.kv_shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        states=config.state_shapes,
    )


def new_paging(cache: PagedKVCache, order: Sequence[int] | None = None) -> PagedSequences:
    """Bookkeeping of a whole cache, its blocks handed out in `order`."""
    return PagedSequences(cache.num_blocks, cache.block_size, order)


def at_slots(slots: Sequence[int] | Tensor) -> Batch:
    """The tokens of one sequence, stored at these slots."""
    slots = torch.as_tensor(slots)
    count = torch.tensor([len(slots)], dtype=torch.int32)
    starts = torch.nn.functional.pad(count, (1, 0))
    return Batch(torch.arange(len(slots)), slots, torch.zeros(1, 1, dtype=torch.int32), count, starts, torch.tensor([0]))


def prefill(
    executor: Executor, cache: PagedKVCache, paging: PagedSequences, sequences: Sequence[int], tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [B, vocab] after the next tokens of some sequences, in one ragged forward."""
    batch = paging.batch(sequences, [len(t) for t in tokens])
    return executors.prefill(executor, torch.tensor([t for row in tokens for t in row]), batch, cache)


def decode(
    executor: Executor, cache: PagedKVCache, paging: PagedSequences, sequences: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Logits [B, vocab] after one more token of each sequence."""
    return executors.verify(executor, torch.tensor(tokens), paging.batch(sequences, [1] * len(sequences)), cache)


def rope_table(config: ModelConfig) -> RopeTable:
    """The rotary table of a model whose layers are all alike."""
    return RopeTable(config.common.attention.rope, config.max_position_embeddings)
