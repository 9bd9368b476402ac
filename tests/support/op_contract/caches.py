"""Ops over a cache: what they store to and attend to, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.formats import Calibration, synthetic
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation.layers.judge import stored_figures
from haarkv.validation.layers.null import Figure
from haarkv.validation.layers.parts import Snapshot, take
from op_contract.cases import FP32, HOST, Case, same

LAYER = 1
"""Not the first, so that a layer's own rotation counts."""


@dataclass(frozen=True)
class CacheCase:
    """A cache with `stored_lengths` tokens of each sequence, and a batch of `new` ones.

    Attributes:
        kv: formats, as `--kv` takes them; `lrB` of synthetic coordinates.
        group: query heads of a KV head.
        pages: the cache lies in pages of another owner, which are apart.
        window: of a layer with a sliding window, whose cache keeps a ring; 0 for all.
        rope_dims: numbers of a learned key that RoPE rotates, 0 where it is not known; all unless given.
    """

    kv: str
    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    stored_lengths: tuple[int, ...]
    new: tuple[int, ...]
    pages: bool = False
    tail: int = 0
    sink: int = 0
    window: int = 0
    rope_dims: int | None = None

    def __str__(self) -> str:
        tokens = f"{len(self.new)}x{max(self.stored_lengths)}+{max(self.new)}"
        name = f"{self.kv}-d{self.head_dim}-gqa{self.group}-{tokens}-block{self.block_size}"
        rope_suffix = "" if self.rope_dims is None else f"-rope{self.rope_dims}"
        window_suffix = f"-tail{self.tail}-sink{self.sink}" if self.tail + self.sink else ""
        return name + "-pages" * self.pages + window_suffix + (f"-window{self.window}" if self.window else "") + rope_suffix

    @property
    def shape(self) -> KVShape:
        return KVShape(self.kv_heads, self.head_dim, self.window or None)

    @property
    def ring_chunk(self) -> int:
        """New tokens at a time where there is a window: few, so that a ring begins anew."""
        return max(16, *self.new)

    @cached_property
    def plan(self) -> KVPlan:
        return KVSpec(self.kv, tail=self.tail or None, sink=self.sink, calibration=self.calibration).plan(LAYER + 1)

    @property
    def calibration(self) -> Calibration | None:
        if not formats.needs_calibration(self.kv):
            return None
        whole = synthetic.calibration(LAYER + 1, self.kv_heads, self.head_dim)
        if self.rope_dims is None:
            return whole
        bases = (replace(basis, inv_freq=basis.inv_freq[: self.rope_dims // 2]) for basis in whole.k)
        return Calibration(tuple(bases), f"{whole.digest}, {self.rope_dims} rotated")

    def vectors(self, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """K and V [T, Hkv, D] fp32 of new tokens: normal, or as the learned coordinates expect them."""
        k, v = torch.randn(2, tokens, self.kv_heads, self.head_dim, generator=generator)
        if calibration := self.calibration:
            k = synthetic_keys(calibration.k[LAYER], tokens, generator).transpose(0, 1).contiguous()
        return k, v


def synthetic_keys(key_basis: Basis, tokens: int, generator: torch.Generator) -> Tensor:
    """Vectors [H, tokens, D] fp32 of the distribution that a basis expects."""
    heads, dim = key_basis.mean.shape
    return torch.randn(heads, tokens, dim, generator=generator) @ key_basis.back / dim**0.5 + key_basis.mean.unsqueeze(1)


def cache_tensors(cache: PagedKVCache) -> Iterator[tuple[int, str, str, Tensor]]:
    """(layer, side, field, the cache's own tensor) of everything that a cache stores."""
    for layer, kv in cache.kv.items():
        for letter, side in kv.sides:
            for name, tensor in side.fields.items():
                yield layer, letter, name, tensor


def bf16_windows(cache: PagedKVCache) -> list[Tensor]:
    """A cache's own tensors in BF16."""
    return [window.vectors for kv in cache.kv.values() for window in kv.windows if window]


def everything_in(cache: PagedKVCache) -> list[Tensor]:
    """A cache's own tensors: codes, scales, and tokens in BF16."""
    return [*(tensor for *_, tensor in cache_tensors(cache)), *bf16_windows(cache)]


def on_device(cache: PagedKVCache, case: CacheCase, device: torch.device | str) -> PagedKVCache:
    """A copy of a case's cache."""
    copy = poisoned_cache(case, device)
    for ours, theirs in zip(everything_in(copy), everything_in(cache), strict=True):
        ours.copy_(theirs)
    return copy


def poisoned_cache(case: CacheCase, device: torch.device | str = "cpu") -> PagedKVCache:
    """A cache whose every slot holds the highest levels at scale NaN, and NaN in BF16: reading an unwritten one shows."""
    blocks = sum(-(-(s + n) // case.block_size) for s, n in zip(case.stored_lengths, case.new, strict=True)) + 2
    # Another layer's pages lie between.
    size = page_bytes(case.plan.layers[LAYER], case.kv_heads, case.head_dim, case.block_size)
    pages = torch.empty(blocks, 2, size, dtype=torch.uint8, device=device)
    layer_pages = {LAYER: pages[:, 1]} if case.pages else None
    chunk = max(*case.stored_lengths, *case.new)
    cache = PagedKVCache(
        case.plan, case.shape, num_blocks=blocks, num_rows=len(case.new) + 2, chunk=chunk, ring_chunk=case.ring_chunk,
        block_size=case.block_size, device=device, pages=layer_pages,
    )  # fmt: skip
    for vectors in bf16_windows(cache):
        vectors.fill_(float("nan"))
    for *_, name, tensor in cache_tensors(cache):
        if name != "data" and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(255)
    return cache


def fill_cache(case: CacheCase, device: torch.device | str = "cpu") -> tuple[PagedKVCache, Batch]:
    """A cache with everything stored by the reference, its blocks permuted, and the batch of the new tokens."""
    generator = torch.Generator().manual_seed(0)
    cache = poisoned_cache(case)
    order = torch.randperm(cache.num_blocks, generator=generator).tolist()
    paging = PagedSequences(cache.num_blocks, case.block_size, order=order, num_rows=cache.num_rows)
    ids = [paging.add() for _ in (0, *case.new)][:0:-1]  # rows in another order than sequences, the first of no sequence
    step = case.ring_chunk if case.window else max(*case.stored_lengths, 1)
    older = [
        [(i, min(step, n - done)) for i, n in zip(ids, case.stored_lengths, strict=True) if n > done]
        for done in range(0, max(case.stored_lengths), step)
    ]
    for pairs in (*older, list(zip(ids, case.new, strict=True))):
        batch = paging.batch(*zip(*pairs, strict=True))
        k, v = case.vectors(len(batch.positions), generator)
        reference.store_kv(k, v, cache.view(LAYER, batch))
    if torch.device(device).type == "cpu":
        return cache, batch
    return on_device(cache, case, device), batch.to(device)


# -- Ops over a cache ---------------------------------------------------------------------------------------------------

_fill_cache_once = cache(fill_cache)


class _OnCache(Case):
    cache: CacheCase

    def __str__(self) -> str:
        return f"{self.op}-{self.cache}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def plan(self) -> KVPlan:
        return self.cache.plan

    @property
    def head_dim(self) -> int:
        return self.cache.head_dim


@dataclass(frozen=True)
class Attention(_OnCache):
    """`paged_attention` over stored codes."""

    cache: CacheCase
    dtype: torch.dtype
    small: bool = False
    op: str = field(default="paged_attention", init=False)

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """q, view, softmax_scale; the cache is shared, since attention only reads it."""
        cache, batch = _fill_cache_once(self.cache, device)
        shape = (len(batch.positions), self.cache.kv_heads * self.cache.group, self.cache.head_dim)
        q = (2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(self.dtype).to(device)
        return q, cache.view(LAYER, batch), self.cache.head_dim**-0.5

    @property
    def heads(self) -> int:
        return self.cache.kv_heads

    def read_only_tensors(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        return [arguments[0], *everything_in(arguments[1].cache)]


@dataclass(frozen=True)
class Store(_OnCache):
    """`store_kv` of new tokens into an untouched cache."""

    cache: CacheCase
    dtype: torch.dtype = FP32
    small: bool = False
    op: str = field(default="store_kv", init=False)

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """k, v, view; among K and V a zero vector, tiny ones, one along an axis and a learned mean.

        Tokens before the new ones have their slots, in which nothing is.
        """
        cache = poisoned_cache(self.cache, device)
        order = list(reversed(range(cache.num_blocks)))
        paging = PagedSequences(cache.num_blocks, self.cache.block_size, order=order, num_rows=cache.num_rows)
        ids = [paging.add() for _ in (0, *self.cache.new)][:0:-1]
        if older := [(one, tokens) for one, tokens in zip(ids, self.cache.stored_lengths, strict=True) if tokens]:
            paging.batch(*zip(*older, strict=True))
        batch = paging.batch(ids, self.cache.new)
        k, v = self.cache.vectors(len(batch.positions), torch.Generator().manual_seed(2))
        k[0, 0] = 0.0
        v[0, 0] *= 1e-12  # its scale is below FP16
        v[-1, 0] = 0.0
        v[-1, 0, 3] = -2.5
        if calibration := self.cache.calibration:
            k[-1, -1] = calibration.k[LAYER].mean[-1]
        return k.to(self.dtype).to(device), v.to(self.dtype).to(device), cache.view(LAYER, batch.to(device))

    def read_only_tensors(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """K, V and slots of no token."""
        return [*arguments[:2], *_other_slots(arguments[2])]

    def outcome(self, result: None, arguments: tuple[Any, ...]) -> Snapshot:
        return take(arguments[2].cache, LAYER, arguments[2].batch)

    def fault(self, expected: Snapshot, outcome: Snapshot) -> str | None:
        """What stays in BF16 is the same, bit for bit."""
        bf16_parts = [name for name in expected if name not in ("k", "v")]
        identical = all(same(outcome[name]["data"], expected[name]["data"]) for name in bf16_parts)
        return None if identical else "it does not keep the same in BF16"

    def figures(self, expected: Snapshot, outcome: Snapshot) -> Iterator[tuple[Figure, Tensor]]:
        k, v, at = self._on_host
        return stored_figures(at.cache, LAYER, at.batch, expected, outcome, (k, v))

    @cached_property
    def _on_host(self) -> tuple[Any, ...]:
        return self.arguments(HOST)


def _other_slots(at: LayerView) -> list[Tensor]:
    """What a cache holds outside the slots of a batch."""
    parts, slots, size = [], at.batch.slot_mapping.cpu(), at.kv.block_size
    for layer, _, _, tensor in cache_tensors(at.cache):
        outside = torch.ones(tensor.shape[:3], dtype=torch.bool)
        if layer == LAYER:
            outside[slots // size, :, slots % size] = False
        parts.append(tensor.cpu()[outside])
    return parts
