"""One case of one op: its inputs, and whether a table gets what the reference gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.judge import stored_figures
from haarkv.validation.layers.null import Sums, of_numbers
from haarkv.validation.layers.parts import Stored, take
from haarkv.validation.ops.caches import LAYER, CacheCase, cache_tensors, filled, poisoned_cache, windows_of
from haarkv.validation.ops.finding import Finding, beside, changed, honest_runs, misshapen, same

FP32, BF16 = torch.float32, torch.bfloat16


# -- Ops without a cache -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """An op without a cache, against its formula in float64.

    Attributes:
        op: of `OP_NAMES`.
        shape: what the op's sizes are, in the order of its docstring.
        dtype: of the activations, and of the result where the op rounds.
        small: quick enough for an interpreter.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    small: bool = True
    plan: ClassVar[None] = None
    head_dim: ClassVar[None] = None

    def __str__(self) -> str:
        return f"{self.op}-{'x'.join(map(str, self.shape))}-{str(self.dtype).removeprefix('torch.')}"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """Random inputs; the two of a gated product are halves of one tensor."""
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        *rows, last = self.shape
        if self.op == "rms_norm":
            return random(*rows, last), random(last), 1e-6
        if self.op == "linear":
            return random(rows[0], rows[1]), random(last, rows[1])
        if self.op == "rope":
            angles = random(rows[0], last // 2, dtype=FP32)
            return random(*rows, last, dtype=FP32), angles.cos(), angles.sin()
        return (*random(*rows, 2 * last, dtype=FP32).chunk(2, dim=-1), self.dtype)

    def expected(self) -> Tensor:
        """The formula in float64."""
        a, b, c = (x.double() if isinstance(x, Tensor) else x for x in (*self.arguments(torch.device("cpu")), None)[:3])
        if self.op == "rms_norm":
            return a * torch.rsqrt((a * a).mean(-1, keepdim=True) + c) * b
        if self.op == "linear":
            return a @ b.T
        if self.op == "rope":
            low, high = a.chunk(2, dim=-1)
            b, c = b.unsqueeze(1), c.unsqueeze(1)
            return torch.cat([low * b - high * c, high * b + low * c], dim=-1)
        if self.op == "sigmoid_mul":
            return b / (1 + torch.exp(-a))
        if self.op == "gelu_mul":
            return a / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (a + 0.044715 * a**3))) * b
        return a / (1 + torch.exp(-a)) * b

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """Against the formula, rounded where the op rounds to BF16, and beside honest runs."""
        arguments, before = self.arguments(device), self.arguments(device)
        ours, (expected, runs) = getattr(table, self.op)(*arguments), _plain(self)
        fault = misshapen(ours, expected, expected.dtype) or changed(arguments, before)
        return _numbers(self.op, expected, ours, runs, self.dtype, fault)


@cache
def _plain(case: Plain) -> tuple[Tensor, list[Sums]]:
    rounds = case.dtype == BF16 and case.op in ("rms_norm", "silu_mul", "gelu_mul", "sigmoid_mul")
    expected = case.expected().to(BF16 if rounds else FP32)
    arguments = case.arguments(torch.device("cpu"))
    return expected, honest_runs(lambda ops: of_numbers(case.op, expected, getattr(ops, case.op)(*arguments)))


def _numbers(
    op: str, expected: Tensor, ours: Tensor, runs: list[Sums], dtype: torch.dtype, fault: str | None, heads: int = 0
) -> Finding:
    """The finding on an op's result."""
    if fault is not None:
        return Finding(math.nan, "", fault)
    return beside(runs, of_numbers(op, expected, ours.cpu(), heads), dtype)


# -- Ops over a cache ---------------------------------------------------------------------------------------------------

_filled_once = cache(filled)


class _OnCache:
    """What the two ops that use a cache share."""

    cache: CacheCase
    dtype: torch.dtype
    op: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.op}-{self.cache}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def plan(self) -> KVPlan:
        """Of its cache."""
        return self.cache.plan

    @property
    def head_dim(self) -> int:
        """Of its cache."""
        return self.cache.head_dim


@dataclass(frozen=True)
class Attention(_OnCache):
    """`paged_attention` over stored codes, against the reference."""

    cache: CacheCase
    dtype: torch.dtype
    small: bool = False
    op: ClassVar[str] = "paged_attention"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """q, cache, layer, batch, softmax_scale; the cache is shared, since attention only reads it."""
        cache, batch = _filled_once(self.cache, device)
        shape = (len(batch.positions), self.cache.kv_heads * self.cache.group, self.cache.head_dim)
        q = (2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(self.dtype).to(device)
        return q, cache, LAYER, batch, self.cache.head_dim**-0.5

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """The output of each KV head's queries."""
        arguments = self.arguments(device)
        before = arguments[0].clone()
        stored = [tensor.clone() for tensor in _tensors(arguments[1])]
        ours, (theirs, runs) = table.paged_attention(*arguments), _attended(self)
        fault = misshapen(ours, theirs, self.dtype) or changed(arguments[:1], (before,))
        if any(not same(was, now) for was, now in zip(stored, _tensors(arguments[1]), strict=True)):
            fault = "it changed the cache"
        return _numbers(self.op, theirs, ours, runs, self.dtype, fault, self.cache.kv_heads)


@cache
def _attended(case: Attention) -> tuple[Tensor, list[Sums]]:
    arguments, heads = case.arguments(torch.device("cpu")), case.cache.kv_heads
    expected = reference.paged_attention(*arguments)
    return expected, honest_runs(lambda ops: of_numbers(case.op, expected, ops.paged_attention(*arguments), heads))


@dataclass(frozen=True)
class Store(_OnCache):
    """`store_kv` of new tokens into an untouched cache, against the reference."""

    cache: CacheCase
    dtype: torch.dtype = FP32
    small: bool = False
    op: ClassVar[str] = "store_kv"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """k, v, cache, layer, batch; among K and V a zero vector, tiny ones, one along an axis and a mean that was learned.

        Tokens before the new ones have their slots, in which nothing is.
        """
        cache = poisoned_cache(self.cache, device)
        order = list(reversed(range(cache.num_blocks)))
        paging = PagedSequences(cache.num_blocks, self.cache.block_size, order=order, num_rows=cache.num_rows)
        ids = [paging.add() for _ in (0, *self.cache.new)][:0:-1]
        if older := [(one, tokens) for one, tokens in zip(ids, self.cache.stored, strict=True) if tokens]:
            paging.batch(*zip(*older, strict=True))
        batch = paging.batch(ids, self.cache.new)
        k, v = self.cache.vectors(len(batch.positions), torch.Generator().manual_seed(2))
        k[0, 0] = 0.0
        v[0, 0] *= 1e-12  # its scale is below FP16
        v[-1, 0] = 0.0
        v[-1, 0, 3] = -2.5
        if learned := self.cache.calibration:
            k[-1, -1] = learned.k[LAYER].mean[-1]
        return k.to(self.dtype).to(device), v.to(self.dtype).to(device), cache, LAYER, batch.to(device)

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """Levels and lengths by KV head, what stays in BF16, and slots that must not change."""
        arguments, before = self.arguments(device), self.arguments(device)
        theirs, runs = _stored(self)
        table.store_kv(*arguments)
        fault = changed(arguments[:2], before[:2])
        batch = arguments[4].to("cpu")
        untouched = [_untouched(made, batch) for made in (arguments[2], before[2])]
        if any(not same(a, b) for a, b in zip(*untouched, strict=True)):
            fault = fault or "it changed a slot of no token"
        cache, ours = poisoned_cache(self.cache), take(arguments[2], LAYER, arguments[4])
        kept = [name for name in theirs if name not in ("k", "v")]
        if any(not same(ours[name]["data"], theirs[name]["data"]) for name in kept):
            fault = fault or "it does not keep the same in BF16"
        figures = stored_figures(cache, LAYER, batch, theirs, ours, before[:2])
        return beside(runs, figures, self.dtype, fault)


@cache
def _stored(case: Store) -> tuple[Stored, list[Sums]]:
    """What the reference stores, and the figures of honest runs."""

    def stored_by(ops: OpTable) -> Stored:
        arguments = case.arguments(torch.device("cpu"))
        ops.store_kv(*arguments)
        return take(arguments[2], LAYER, arguments[4])

    expected, (k, v, cache, _, batch) = stored_by(cast(OpTable, reference)), case.arguments(torch.device("cpu"))
    return expected, honest_runs(lambda ops: stored_figures(cache, LAYER, batch, expected, stored_by(ops), (k, v)))


def _tensors(made: PagedKVCache) -> list[Tensor]:
    """Whatever a cache holds."""
    return [*(tensor for *_, tensor in cache_tensors(made)), *windows_of(made)]


def _places(batch: Batch, block_size: int) -> tuple[Tensor, Tensor]:
    """The block of each new token, and its place there."""
    return batch.slot_mapping // block_size, batch.slot_mapping % block_size


def _untouched(made: PagedKVCache, batch: Batch) -> list[Tensor]:
    """Whatever a cache holds outside the slots of a batch."""
    parts = []
    for layer, _, _, tensor in cache_tensors(made):
        outside = torch.ones(tensor.shape[:3], dtype=torch.bool)
        if layer == LAYER:
            block, place = _places(batch, made.block_size)
            outside[block, :, place] = False
        parts.append(tensor.cpu()[outside])
    return parts
