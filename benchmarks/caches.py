"""Caches of random K and V: what every variant of a case stores."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.benchmarks.decode_cost import Case
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVPlan

_FILL = 4096


def random_kv(config: ModelConfig, case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V of one layer, each [B, Hkv, context, D] bf16: what every variant of a case stores."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (case.batch, config.heads.num_kv_heads, case.context, config.heads.head_dim)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in "kv")
    return k, v


def filled(
    plan: KVPlan, config: ModelConfig, case: Case, k: Tensor, v: Tensor, steps: int
) -> tuple[PagedKVCache, PagedSequences]:
    """A cache that holds all but the last token of a case in every layer, with room for so many steps.

    Layer 0 is quantized; the others hold the same bytes where they have its formats, since no time depends on them.
    """
    blocks = blocks_for(case.context + steps)
    cache = PagedKVCache(
        plan, config.kv_shapes, num_blocks=case.batch * blocks,
        num_rows=case.batch, device=k.device,
    )  # fmt: skip
    paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=case.batch)
    for sequence in [paging.add() for _ in range(case.batch)]:
        for begin in range(0, case.context - 1, cache.most_new_tokens or _FILL):
            end = min(begin + (cache.most_new_tokens or _FILL), case.context - 1)
            batch = paging.batch([sequence], [end - begin]).to(k.device)
            new_k, new_v = (x[sequence, :, begin:end].transpose(0, 1) for x in (k, v))
            for layer in range(len(plan.layers)):
                if layer == 0 or plan.layers[layer] != plan.layers[0] or plan.keeps_tokens:
                    cache.write(layer, new_k, new_v, batch)
    for layer in range(1, len(plan.layers)):
        if plan.layers[layer] == plan.layers[0] and not plan.keeps_tokens:
            for fields in (PagedKVCache.k_fields, PagedKVCache.v_fields):
                for name, tensor in fields(cache, layer).items():
                    tensor.copy_(fields(cache, 0)[name])
    return cache, paging
