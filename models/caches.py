"""A cache for a model: every layer's memory, as its declaration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KEPT_ROOM, blocks_for


def new_cache(
    config: ModelConfig, plan: KVPlan, *, sequences: int, tokens: int, device: torch.device | str = "cpu",
    order: Sequence[int] | None = None, room: int | None = KEPT_ROOM, **more: Any,
) -> tuple[PagedKVCache, PagedSequences]:  # fmt: skip
    """An empty cache for `sequences` of up to `tokens` tokens each, and its bookkeeping.

    Args:
        order: in which blocks are handed out; ascending unless given.
        room, more: as `PagedKVCache` takes it.
    """
    blocks = blocks_for(tokens, **({"block_size": more["block_size"]} if "block_size" in more else {}))
    cache = PagedKVCache(
        plan, config.kv_shapes, num_blocks=sequences * blocks, num_rows=sequences, row_blocks=blocks, device=device,
        states=config.state_shapes, room=room, **more,
    )  # fmt: skip
    return cache, PagedSequences(cache.num_blocks, cache.block_size, order, num_rows=sequences)
