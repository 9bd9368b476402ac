"""An executor on several ranks, as the validator drives one: with the whole cache, on rank 0.

For each call rank 0 hands out the cache by KV heads and joins what the ranks have stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import Ranks, kv_heads_of
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.parts import Snapshot, layer_tensors, load, new_cache, snapshot


@dataclass(frozen=True)
class _Call:
    """One call of `forward`, `layers` or `head` (which needs no cache) for every rank.

    Attributes:
        layer_fields: caches of the layers in `span`, all KV heads.
        blocks: number and size of the cache's blocks.
    """

    method: str
    x: Tensor
    span: range
    batch: Batch | None
    layer_fields: dict[int, Snapshot]
    blocks: tuple[int, int]


class _Part:
    """A rank's executor and its part of the cache."""

    def __init__(self, executor: Executor, ranks: Ranks, whole: ModelConfig, plan: KVPlan) -> None:
        self.executor, self.ranks, self.plan = executor, ranks, plan
        self._heads = kv_heads_of(whole.heads.num_kv_heads, ranks.rank, ranks.size)
        self._caches: dict[tuple[int, int], PagedKVCache] = {}

    def run(self, call: _Call) -> tuple[Tensor, list[dict[int, Snapshot]]]:
        """The result and, on rank 0, what each rank has stored."""
        executor, x = self.executor, call.x.to(self.executor.device)
        if call.batch is None:
            return executor.head(x).cpu(), []
        cache, batch = self._cache(call.blocks), call.batch.to(executor.device)
        for layer, part_fields in call.layer_fields.items():
            part = {
                name: {field: whole[:, self._heads] for field, whole in fields.items()} for name, fields in part_fields.items()
            }
            load(cache, layer, part)
        whole = call.method == "forward"
        result = executor.forward(x, batch, cache) if whole else executor.layers(x, call.span, batch, cache)
        return result.cpu(), self.ranks.collect({layer: snapshot(cache, layer) for layer in call.layer_fields})

    def _cache(self, blocks: tuple[int, int]) -> PagedKVCache:
        if blocks not in self._caches:
            num_blocks, block_size = blocks
            self._caches[blocks] = new_cache(
                self.plan, self.executor.config, num_blocks, block_size=block_size, device=self.executor.device
            )
        return self._caches[blocks]


class MultiRankExecutor:
    """The executors of all ranks as one, on rank 0, with the whole model's config and cache; `plan` is rank 0's."""

    ops, device = None, torch.device("cpu")

    def __init__(self, executor: Executor, ranks: Ranks, whole: ModelConfig, plan: KVPlan) -> None:
        self.config, self.description = whole, f"{executor.description}, {ranks.size} ranks"
        self._part = _Part(executor, ranks, whole, plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part.executor, name)

    def supports(self, config: ModelConfig, plan: KVPlan) -> str | None:
        return self._part.executor.supports(self._part.executor.config, self._part.plan)

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> None:
        return None

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._call("forward", token_ids, range(self.config.num_layers), batch, cache)

    def head(self, hidden: Tensor) -> Tensor:
        return self._part.run(self._part.ranks.share(_Call("head", hidden, range(0), None, {}, (0, 0))))[0]

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._call("layers", hidden, span, batch, cache)

    def _call(self, method: str, x: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        ranks, fields_by_layer = self._part.ranks, {layer: layer_tensors(cache, layer) for layer in span}
        call = ranks.share(_Call(method, x, span, batch, fields_by_layer, (cache.num_blocks, cache.block_size)))
        result, parts = self._part.run(call)
        for rank, rank_fields in enumerate(parts):
            heads = kv_heads_of(self.config.heads.num_kv_heads, rank, ranks.size)
            for layer in span:
                for part, fields in layer_tensors(cache, layer).items():
                    for name, tensor in fields.items():
                        tensor[:, heads] = rank_fields[layer][part][name]
        return result


@contextmanager
def multi_rank_executor(executor: Executor, ranks: Ranks, whole: ModelConfig, plan: KVPlan) -> Iterator[Executor]:
    """On rank 0: all ranks as one executor while the context is open. On a single rank the executor itself."""
    if ranks.size == 1:
        yield executor
        return
    try:
        yield cast(Executor, MultiRankExecutor(executor, ranks, whole, plan))
    finally:
        ranks.share(None)


def follow(executor: Executor, ranks: Ranks, whole: ModelConfig, plan: KVPlan) -> None:
    """On every other rank: run what rank 0 runs, until it is done."""
    part = _Part(executor, ranks, whole, plan)
    with torch.inference_mode():
        while (call := ranks.share(cast(_Call | None, None))) is not None:
            part.run(call)
