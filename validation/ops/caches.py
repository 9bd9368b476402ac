"""Caches that cases of the contract store to and attend to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.formats import Calibration, made_up
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

LAYER = 1
"""Of every cache: not the first, so that a layer's own rotation counts."""


@dataclass(frozen=True)
class CacheCase:
    """A cache with `stored` tokens of each sequence, and a batch of `new` ones.

    Attributes:
        kv: formats, as `--kv` takes them; `lrB` of made-up coordinates.
        group: query heads of a KV head.
        pages: the cache lies in pages of another owner, which are apart.
        tail, sink: tokens that stay in BF16.
        window: tokens that a query sees, of a layer with a sliding window, whose cache keeps a ring; 0 for all.
    """

    kv: str
    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    stored: tuple[int, ...]
    new: tuple[int, ...]
    pages: bool = False
    tail: int = 0
    sink: int = 0
    window: int = 0

    def __str__(self) -> str:
        tokens = f"{len(self.new)}x{max(self.stored)}+{max(self.new)}"
        name = f"{self.kv}-d{self.head_dim}-gqa{self.group}-{tokens}-block{self.block_size}"
        kept = f"-tail{self.tail}-sink{self.sink}" if self.tail + self.sink else ""
        return name + "-pages" * self.pages + kept + (f"-window{self.window}" if self.window else "")

    @property
    def shape(self) -> KVShape:
        """Of its layers' K and V."""
        return KVShape(self.kv_heads, self.head_dim, self.window or None)

    @property
    def ring_chunk(self) -> int:
        """New tokens at a time where there is a window: few, so that a ring begins anew."""
        return max(16, *self.new)

    @cached_property
    def plan(self) -> KVPlan:
        """Of as many layers as `LAYER` needs."""
        return KVSpec(self.kv, tail=self.tail or None, sink=self.sink, calibration=self.calibration).plan(LAYER + 1)

    @property
    def calibration(self) -> Calibration | None:
        """Made-up coordinates of its KV heads, where a format needs them."""
        if not formats.needs_calibration(self.kv):
            return None
        return made_up.calibration(LAYER + 1, self.kv_heads, self.head_dim)

    def vectors(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """K and V [T, Hkv, D] fp32 of new tokens: normal, or as the learned coordinates expect them."""
        k, v = torch.randn(2, tokens, self.kv_heads, self.head_dim, generator=generator)
        if learned := self.calibration:
            k = made_up.vectors(learned.k[LAYER], tokens, generator).transpose(0, 1).contiguous()
        return k, v


def cache_tensors(made: PagedKVCache) -> Iterator[tuple[int, str, str, Tensor]]:
    """(layer, side, field, the very tensor) of everything that a cache stores."""
    for layer in made.held:
        for side, tensors in (("k", made.k_fields(layer)), ("v", made.v_fields(layer))):
            for name, tensor in tensors.items():
                yield layer, side, name, tensor


def windows_of(made: PagedKVCache) -> list[Tensor]:
    """The very tensors of what a cache keeps in BF16."""
    return [window.vectors for layer in made.held for window in made.kept(layer) if window]


def poisoned_cache(case: CacheCase, device: torch.device | str = "cpu") -> PagedKVCache:
    """A cache whose every slot holds the highest levels at scale NaN, so that reading one that was not written shows.

    So does every place in BF16: NaN. It takes everything that is stored in one batch.
    """
    blocks = sum(-(-(s + n) // case.block_size) for s, n in zip(case.stored, case.new, strict=True)) + 2
    # Another layer's pages lie between.
    size = page_bytes(case.plan.layers[LAYER], case.kv_heads, case.head_dim, case.block_size)
    pages = torch.empty(blocks, 2, size, dtype=torch.uint8, device=device)
    owned = {LAYER: pages[:, 1]} if case.pages else None
    chunk = max(*case.stored, *case.new)
    cache = PagedKVCache(
        case.plan, case.shape, num_blocks=blocks, num_rows=len(case.new) + 2, chunk=chunk, ring_chunk=case.ring_chunk,
        block_size=case.block_size, device=device, pages=owned,
    )  # fmt: skip
    for vectors in windows_of(cache):
        vectors.fill_(float("nan"))
    for *_, name, tensor in cache_tensors(cache):
        if name != "data" and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(255)
    return cache


def filled(case: CacheCase, device: torch.device | str = "cpu") -> tuple[PagedKVCache, Batch]:
    """A cache with everything stored by the reference, its blocks permuted, and the batch of the new tokens."""
    generator = torch.Generator().manual_seed(0)
    cache = poisoned_cache(case)
    order = torch.randperm(cache.num_blocks, generator=generator).tolist()
    paging = PagedSequences(cache.num_blocks, case.block_size, order=order, num_rows=cache.num_rows)
    ids = [paging.add() for _ in (0, *case.new)][:0:-1]  # rows in another order than sequences, the first of them nobody's
    step = case.ring_chunk if case.window else max(*case.stored, 1)
    older = [
        [(i, min(step, n - done)) for i, n in zip(ids, case.stored, strict=True) if n > done]
        for done in range(0, max(case.stored), step)
    ]
    for pairs in (*older, list(zip(ids, case.new, strict=True))):
        batch = paging.batch(*zip(*pairs, strict=True))
        k, v = case.vectors(len(batch.positions), generator)
        reference.store_kv(k, v, cache, LAYER, batch)
    if torch.device(device).type == "cpu":
        return cache, batch
    copy = poisoned_cache(case, device)
    for (*_, ours), (*_, theirs) in zip(cache_tensors(copy), cache_tensors(cache), strict=True):
        ours.copy_(theirs)
    for vectors, theirs in zip(windows_of(copy), windows_of(cache), strict=True):
        vectors.copy_(theirs)
    return copy, batch.to(device)
