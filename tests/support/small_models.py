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
from haarkv.models import base as models
from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import random_weights
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope
from haarkv.models.rope import RopeTable
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import assemble, checkpoint_tensors
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

KV_FORMATS = ("fp32", "bf16", "tq4", "tq4_seed", "k=bf16,v=tq4")
"""Every format, and a mixture."""


def resize_config(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A model like another whose layers are all alike, in other sizes: fields of its parts, or `windows` by layer.

    Qwen3 norms heads and Qwen2 has biases, unless `head_norms` and `bias` say otherwise. num_experts, moe_intermediate_size,
    num_experts_per_tok and norm_topk_prob give every layer experts.
    """
    layer, mixer = config.common, config.common.attention
    model_type, take = changes.get("model_type", config.model_type), changes.pop
    head_dim, norm = take("head_dim", mixer.head_dim), Norm(take("rms_norm_eps", layer.norm.eps))
    rope = Rope(take("rope_theta", mixer.rope.theta), head_dim, take("rope_scaling", mixer.rope.scaling))
    mixer = replace(
        mixer, num_heads=take("num_heads", mixer.num_heads), num_kv_heads=take("num_kv_heads", mixer.num_kv_heads),
        head_dim=head_dim, rope=rope, scale=head_dim**-0.5, head_norms=take("head_norms", "qwen3" in model_type),
        bias=take("bias", model_type == "qwen2"),
    )  # fmt: skip
    mlp: Dense | Experts = Dense(take("intermediate_size", layer.mlp.width))
    if "num_experts" in changes:
        experts = take("num_experts"), take("num_experts_per_tok", 2), take("moe_intermediate_size")
        mlp = Experts(*experts, normalized=take("norm_topk_prob", False))
    count = take("num_layers", config.num_layers)
    layers = tuple(
        Layer(replace(mixer, window=window), mlp, norm) for window in take("windows", None) or [mixer.window] * count
    )
    return replace(config, layers=layers, final_norm=norm, **{"tied": take("tie_word_embeddings", config.tied)} | changes)


def small_config(model_type: str = "qwen3", *, head_norms: bool = True, bias: bool = False, **changes: Any) -> ModelConfig:
    """`SMALL` in other sizes."""
    return resize_config(SMALL, model_type=model_type, head_norms=head_norms, bias=bias, **changes)


def window_config(*windows: int | None) -> ModelConfig:
    """A small model whose layers see this many tokens."""
    return resize_config(SMALL, windows=windows)


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


_ATTENTION = Attention(10, 2, 128, Rope(1e4, 128), 128**-0.5, head_norms=True)
SMALL = ModelConfig(
    "qwen3", (Layer(_ATTENTION, Dense(80), Norm(1e-6)),) * 3, hidden_size=48, vocab_size=61, final_norm=Norm(1e-6),
    max_position_embeddings=512,
)  # fmt: skip
"""The small shape that resembles Qwen3-14B most: five query heads a KV head, head_dim 128, three rotations. hidden_size is
never heads * head_dim, so that the two cannot be mistaken for one another."""
CONFIGS: dict[str, ModelConfig] = {
    "gqa5_d128": SMALL,
    "gqa5_one_kv_head_d128_tied": resize_config(SMALL, num_heads=5, num_kv_heads=1, tie_word_embeddings=True),
    "mha_d64": resize_config(SMALL, num_heads=3, num_kv_heads=3, head_dim=64),
    "gqa2_d256_tied": resize_config(SMALL, num_layers=2, num_heads=4, head_dim=256, rope_theta=1e6, tie_word_embeddings=True),
}
"""Small shapes by name: grouped and ungrouped heads, every shipped head_dim, tied and untied heads."""


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
    specs = checkpoint_tensors(config)
    weights = assemble(config, lambda name: torch.empty(specs[name].shape, dtype=torch.bfloat16, device="meta"))
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


def text_logits(executor: Executor, ids: Sequence[int] | Tensor, kv: str | KVSpec = "fp32") -> Tensor:
    """Logits [T, vocab] after each token of one text, in one forward."""
    spec = KVSpec(kv) if isinstance(kv, str) else kv
    cache, paging = models.new_cache(
        executor.config, spec.plan(executor.config.num_layers), sequences=1, tokens=len(ids), chunk=len(ids)
    )  # fmt: skip
    return executors.verify(executor, torch.as_tensor(ids), paging.batch([paging.add()], [len(ids)]), cache)


def rope_table(config: ModelConfig) -> RopeTable:
    """The rotary table of a model whose layers are all alike."""
    return RopeTable(config.common.attention.rope, config.max_position_embeddings)
