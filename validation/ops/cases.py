"""One case of one op: its inputs, and whether a table gets what the reference gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_tokens
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.slack import nearer, of_op
from haarkv.validation.ops.caches import LAYER, CacheCase, cache_tensors, filled, poisoned_cache, windows_of
from haarkv.validation.ops.finding import Finding, changed, misshapen, relative, same, worse

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
        """Against the formula; one rounding is allowed where the op rounds to BF16."""
        arguments, before = self.arguments(device), self.arguments(device)
        ours, expected = getattr(table, self.op)(*arguments), self.expected()
        rounds = self.dtype == BF16 and self.op in ("rms_norm", "silu_mul", "gelu_mul", "sigmoid_mul")
        fault = misshapen(ours, expected, BF16 if rounds else FP32) or changed(arguments, before)
        return Finding(relative(ours, expected), bounds.LAYER_BF16.rounded_op if rounds else bounds.LAYER_FP32.op, fault)


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
        """Each head's output of each token, against its own length."""
        arguments = self.arguments(device)
        before = arguments[0].clone()
        stored = [tensor.clone() for tensor in _tensors(arguments[1])]
        ours, theirs = table.paged_attention(*arguments), _attended(self)
        fault = misshapen(ours, theirs, self.dtype) or changed(arguments[:1], (before,))
        if any(not same(was, now) for was, now in zip(stored, _tensors(arguments[1]), strict=True)):
            fault = "it changed the cache"
        counted = nearer(theirs, ours.cpu(), _allowed(self)) if fault is None else ours
        return Finding(
            relative(counted, theirs), (bounds.LAYER_FP32 if self.dtype == FP32 else bounds.LAYER_BF16).attention, fault
        )


@cache
def _attended(case: Attention) -> Tensor:
    return reference.paged_attention(*case.arguments(torch.device("cpu")))


@cache
def _allowed(case: Attention) -> Tensor | None:
    arguments = case.arguments(torch.device("cpu"))
    return of_op(Call(case.op, case.op, arguments, _attended(case)), reference)


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
        """Levels by what explains a difference, stored vectors by their length, and slots that must not change."""
        arguments, theirs = self.arguments(device), self.arguments(torch.device("cpu"))
        before = self.arguments(device)
        table.store_kv(*arguments)
        reference.store_kv(*theirs)
        fault = changed(arguments[:2], before[:2])
        batch, error = theirs[4], 0.0
        for side, x in (("k", theirs[0]), ("v", theirs[1])):
            mine, other = (getattr(made, f"{side}_fields")(LAYER) for made in (arguments[2], theirs[2]))
            mine = {name: tensor.cpu() for name, tensor in mine.items()}
            kv_format = getattr(theirs[2], f"{side}_format")(LAYER)
            block, place = _places(batch, self.cache.block_size)
            wanted, got = ({name: t[block, :, place] for name, t in fields.items()} for fields in (other, mine))
            x = kv_format.as_stored(x.transpose(0, 1), LAYER, batch.positions).transpose(0, 1)
            compared, length = compare_tokens(kv_format, LAYER, wanted, got, x, bounds.ROTATED_FP32)
            if compared.unexplained:
                fault = fault or f"{compared.unexplained} unexplained levels of {side.upper()}"
            error = worse(error, float(length))
        untouched = [_untouched(made, batch) for made in (arguments[2], before[2])]
        if any(not same(a, b) for a, b in zip(*untouched, strict=True)):
            fault = fault or "it changed a slot of no token"
        kept = [windows_of(made) for made in (arguments[2], theirs[2])]
        if any(not same(ours.cpu(), wanted) for ours, wanted in zip(*kept, strict=True)):
            fault = fault or "it does not keep the same in BF16"
        return Finding(error, bounds.LAYER_FP32.length, fault)


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
