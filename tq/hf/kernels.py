"""Attention kernels for a cache of transformers: whether some read its formats, and one step of attention through them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.cuda.available import unavailable
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kept import Kept
from haarkv.tq_ops.kv.reads import Reads, misfit, wrong_head_dim
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.table import OpTable
from tq.hf.store import SideStore


@dataclass(frozen=True)
class Kernels:
    """Attention over packed codes on one kind of device.

    Attributes:
        ops: its op table.
        reads: what they take.
    """

    ops: OpTable
    reads: Reads


@cache
def kernels_on(device: str) -> Kernels | None:
    """The kernels for tensors on a kind of device; None where there are none, or they are not built."""
    if device == "cpu":
        from haarkv.tq_ops.cpu.ops import CpuOps

        try:
            return Kernels(CpuOps(), cpu_layout.READS)
        except KernelsMissingError:
            return None
    if device == "cuda" and unavailable() is None:
        from haarkv.tq_ops.cuda import ops

        return Kernels(cast(OpTable, ops), cuda_layout.READS)
    return None


class Reader:
    """Reads one layer of a cache through kernels, a new token of every row at a time.

    Args:
        layer: its index.
        sides: K's and V's store, which kernels can read: `readable`.
    """

    def __init__(self, layer: int, sides: tuple[SideStore, SideStore]) -> None:
        self._layer, self._sides = layer, sides
        self._cache: PagedKVCache | None = None
        self._memory: tuple[tuple[int, int], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        return Reader(self._layer, copy.deepcopy(self._sides, memo))

    @property
    def takes_padding(self) -> bool:
        """Whether rows may begin with padding: what lies in a tail or in sinks is found by its position alone."""
        return not any(side.max_tail or side.max_sink for side in self._sides)

    # Memory that moves here is written again later, in whatever mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def attend(self, q: Tensor, seen: int, softmax_scale: float, padding: tuple[int, ...] = ()) -> Tensor:
        """Attention of the newest token of every row over all that its row has stored, itself among them.

        Args:
            q: [B, Hq, 1, D] bf16 or fp32.
            seen: tokens of every row.
            softmax_scale: of the logits.
            padding: how many tokens at the beginning of each row are none, fewer than `seen`; none unless given. Where
                there are some, `takes_padding` must be true.
        Returns:
            [B, 1, Hq, D] of q's dtype.
        Rounding points: those of the op table's `paged_attention`.
        """
        k, v = self._sides
        blocks = -(-seen // BLOCK_SIZE) + (_SPARE if any(padding) else 0)
        most = max(k.packed.blocks, v.packed.blocks, blocks)
        for side in self._sides:
            side.packed.reserve(most * side.packed.block_groups)
        cache = self._view()
        for side, kept in zip(self._sides, cache.kept(self._layer), strict=True):
            if kept is not None:
                _fill(kept, side, seen)
        # A BF16 q times a power of two is exact, and so is a BF16 output.
        asked = _per_head(q, k.packed.scales, inverse=True).transpose(1, 2).flatten(0, 1)
        kernels = kernels_on(q.device.type)
        assert kernels is not None, "kernels that could read the layer are gone"
        batch = self._padded_batch(padding, seen) if any(padding) else self._batch(len(q), seen)
        out = kernels.ops.paged_attention(asked, cache, self._layer, batch, softmax_scale)
        return _per_head(out.unsqueeze(2), v.packed.scales, inverse=True).transpose(1, 2)

    def _view(self) -> PagedKVCache:
        """The layer's memory as a paged cache; made anew where memory moved, for kernels remember where it lies."""
        fields = tuple({name: tensor.flatten(0, 1) for name, tensor in side.packed.fields.items()} for side in self._sides)
        memory = tuple((tensor.data_ptr(), len(tensor)) for of in fields for tensor in of.values())
        if self._cache is None or memory != self._memory:
            k, v = self._sides
            formats = k.packed.kv_format, v.packed.kv_format
            kept = _kept(k), _kept(v)
            self._cache = PagedKVCache.over(formats, self._layer, (fields[0], fields[1]), kept, k.tail.shape[3])
            self._memory = memory
        return self._cache

    def _batch(self, rows: int, seen: int) -> Batch:
        device = self._sides[0].tail.device
        blocks = self._sides[0].packed.blocks
        row = torch.arange(rows, device=device)
        table = row.unsqueeze(1) * blocks + torch.arange(-(-seen // BLOCK_SIZE), device=device)
        last = table[:, -1] * BLOCK_SIZE + (seen - 1) % BLOCK_SIZE
        return Batch(
            positions=torch.full((rows,), seen - 1, device=device), slot_mapping=last, block_table=table.int(),
            seq_lens=torch.full((rows,), seen, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=device), rows=row,
        )  # fmt: skip

    def _padded_batch(self, padding: tuple[int, ...], seen: int) -> Batch:
        """The rows without their padding: tokens of the two blocks that are not read whole are copied to spare ones.

        One query sees every token, so their order is free; but only the last block that kernels read may be a part of one.
        """
        packed = [side.packed for side in self._sides]
        blocks = packed[0].blocks
        device = self._sides[0].tail.device
        places = _without_padding(padding, seen, blocks)
        row, source, target = (x.to(device) for x in (places.row, places.source, places.target))
        for of in packed:
            for field in of.fields.values():
                moved = field[row, source // BLOCK_SIZE, :, source % BLOCK_SIZE]
                field[row, target // BLOCK_SIZE, :, target % BLOCK_SIZE] = moved
        lengths = seen - torch.tensor(padding)
        return Batch(
            positions=(lengths - 1).to(device), slot_mapping=torch.zeros(len(padding), dtype=torch.int64, device=device),
            block_table=places.table.to(device), seq_lens=lengths.int().to(device),
            query_start_loc=torch.arange(len(padding) + 1, dtype=torch.int32, device=device),
            rows=torch.arange(len(padding), device=device),
        )  # fmt: skip


_SPARE = 2
"""Blocks of a row that take the tokens of blocks which are not read whole: those of two blocks, but for one token."""


@dataclass(frozen=True)
class _Places:
    """Where rows that begin with padding are read.

    Attributes:
        table: [B, most] int32, blocks in the memory of all rows; -1 pads.
        row, source, target: [n] int64 each, tokens that are copied first: of which row, from where in it and to where.
    """

    table: Tensor
    row: Tensor
    source: Tensor
    target: Tensor


@lru_cache(maxsize=2)
def _without_padding(padding: tuple[int, ...], seen: int, blocks: int) -> _Places:
    """The places of `seen` tokens a row, of `blocks` blocks whose last `_SPARE` are free; alike in all layers."""
    tables: list[list[int]] = []
    rows: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    last = (seen - 1) // BLOCK_SIZE
    for row, count in enumerate(padding):
        first = -(-count // BLOCK_SIZE)
        begin = min(first * BLOCK_SIZE, seen)  # of the tokens before it, some are read and some are padding
        copied = [*range(count, begin), *range(max(begin, last * BLOCK_SIZE), seen)] if begin > count else []
        spare = range(blocks - _SPARE, blocks - _SPARE + -(-len(copied) // BLOCK_SIZE))
        own = [*range(first, last), *spare] if copied else [*range(first, last + 1)]
        tables.append([row * blocks + block for block in own])
        rows += [row] * len(copied)
        sources += copied
        targets += range((blocks - _SPARE) * BLOCK_SIZE, (blocks - _SPARE) * BLOCK_SIZE + len(copied))
    longest = max(map(len, tables))
    table = torch.tensor([of + [-1] * (longest - len(of)) for of in tables], dtype=torch.int32)
    return _Places(table, *(torch.tensor(x, dtype=torch.int64) for x in (rows, sources, targets)))


def readable(sides: Sequence[SideStore]) -> bool:
    """Whether there are kernels that can read what is stored, as it is stored."""
    kernels = kernels_on(sides[0].tail.device.type)
    if kernels is None:
        return False
    head_dim = sides[0].tail.shape[3]
    kept = any(side.max_tail or side.max_sink for side in sides)
    dtype = sides[0].tail.dtype
    return (
        # Groups of tokens begin behind the sinks, where kernels look for them at their positions.
        all(side.packed.kv_format.group_tokens == 1 or not side.max_sink for side in sides)
        and all(side.tail.shape[3] == head_dim for side in sides)
        and wrong_head_dim(kernels.reads, head_dim) is None
        and all(misfit(kernels.reads, side.packed.kv_format, head_dim) is None for side in sides)
        # Kernels keep tokens in BF16, which is exact in a BF16 model alone.
        and (dtype == torch.bfloat16 or (dtype == torch.float32 and not kept))
    )


def _kept(side: SideStore) -> Kept | None:
    rows, heads, _, head_dim = side.tail.shape
    if not (side.max_tail or side.max_sink):
        return None
    return Kept(
        tail=side.max_tail, sink=side.max_sink, group=side.packed.kv_format.group_tokens, ring=side.max_tail, num_rows=rows,
        num_kv_heads=heads, head_dim=head_dim, device=side.tail.device,
    )  # fmt: skip


def _fill(kept: Kept, side: SideStore, seen: int) -> None:
    """Lay a side's sinks and tail where kernels look for them, in the scales of what is packed."""
    sink, tail = (_per_head(x, side.packed.scales) for x in (side.sink, side.tail))
    kept.vectors[:, :, : sink.shape[2]] = sink
    if kept.ring and (count := tail.shape[2]):
        first = (seen - count) % kept.ring
        whole = min(count, kept.ring - first)
        begin = kept.sink + first
        kept.vectors[:, :, begin : begin + whole] = tail[:, :, :whole]
        kept.vectors[:, :, kept.sink : kept.sink + count - whole] = tail[:, :, whole:]


def _per_head(x: Tensor, scales: Tensor | None, *, inverse: bool = False) -> Tensor:
    """x [B, H, n, D] times the scales [Hkv, D] of its KV heads; powers of two, so nothing is rounded."""
    if scales is None:
        return x
    each = scales.repeat_interleave(x.shape[1] // len(scales), 0).unsqueeze(1)
    return (x / each if inverse else x * each).to(x.dtype)
