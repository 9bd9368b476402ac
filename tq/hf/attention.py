"""The attention implementation `tq` of transformers: decode steps read a `TQCache` as it is packed.

    model.set_attn_implementation("tq")

Importing this module registers it by transformers' own interface. A step of one token a row, padded on the left or not, goes
through the attention kernels for the device; everything else goes to transformers' SDPA with K and V restored, as it does
without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.cuda.available import unavailable
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.reads import Reads, misfit, wrong_head_dim
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.table import OpTable
from tq.hf.store import SideStore

IMPLEMENTATION = "tq"
"""Its name."""

Attend = Callable[[Tensor, float, tuple[int, ...]], Tensor]


class Stored(Tensor):
    """K or V of a layer that is still packed: any op of torch restores it first, except attention that reads it packed.

    Args:
        restore: makes the tensor [B, Hkv, n, D].
        attend: (q [B, Hq, 1, D], softmax_scale, padding at the beginning of each row) -> [B, 1, Hq, D], attention over this
            layer's K and V.
        like: gives dtype and device.
        shape: of the tensor.
        padded: `attend` takes padding.
    """

    @staticmethod
    def __new__(
        cls, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int], *, padded: bool = False
    ) -> Stored:
        stored: Stored = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False
        )
        return stored

    def __init__(
        self, restore: Callable[[], Tensor], attend: Attend, like: Tensor, shape: Sequence[int], *, padded: bool = False
    ) -> None:
        self.attend, self.padded, self._restore = attend, padded, restore
        self._restored: Tensor | None = None

    def restored(self) -> Tensor:
        """[B, Hkv, n, D], made once."""
        if self._restored is None:
            self._restored = self._restore()
        return self._restored

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Stored, Stored.restored, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, {self.dtype})"


_NOT_COVERED = ("softcap", "position_bias", "s_aux", "cache", "sliding_window")
"""Arguments of models whose attention is more than a softmax over all tokens."""


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers asks for it.

    Args:
        module: the model's attention module.
        query: [B, Hq, n, D]; key, value: [B, Hkv, S, D].
        attention_mask: [B, 1, n, S], true where a query sees a token; None where it sees all up to its own.
    Returns:
        [B, n, Hq, D], and no weights.
    """
    scaling = kwargs.get("scaling")
    if (
        isinstance(key, Stored)
        and query.shape[2] == 1
        and query.dtype == key.dtype
        and scaling is not None
        and not kwargs.get("dropout")
        and all(kwargs.get(name) is None for name in _NOT_COVERED)
    ):
        padding = () if attention_mask is None else left_padding(attention_mask) if key.padded else None
        if padding is not None:
            return key.attend(query, scaling, padding), None
    restored = dense(key), dense(value)
    out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, *restored, attention_mask, **kwargs)
    return out


def left_padding(mask: Tensor) -> tuple[int, ...] | None:
    """How many tokens each row of a step's mask [B, 1, 1, S] hides at its beginning; None if it hides others, or all of a row.

    A mask of numbers, which are added to logits, is None as well.
    """
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
        return None
    seen = mask[:, 0, 0]
    counts = mask.shape[-1] - seen.sum(-1)
    if not torch.equal(seen, torch.arange(mask.shape[-1], device=mask.device) >= counts.unsqueeze(-1)):
        return None
    padding = tuple(counts.tolist())
    return None if max(padding) == mask.shape[-1] else padding


def dense(x: Tensor) -> Tensor:
    """K or V with numbers, whether it is packed or not."""
    return x.restored() if isinstance(x, Stored) else x


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that uses SDPA read packed K and V meanwhile; any other implementation is the caller's wish, and stays."""
    before = model.config._attn_implementation
    switched = before == "sdpa" and model._can_set_attn_implementation()
    if switched:
        model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        if switched:
            model.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


# -- Kernels ----------------------------------------------------------------------------------------------------------------


@cache
def kernels_on(device: str) -> tuple[OpTable, Reads] | None:
    """The op table for tensors on a kind of device, and what it reads; None where there is none, or it is not built."""
    if device == "cpu":
        from haarkv.tq_ops.cpu.ops import CpuOps

        try:
            return CpuOps(), cpu_layout.READS
        except KernelsMissingError:
            return None
    if device == "cuda" and unavailable() is None:
        from haarkv.tq_ops.cuda import ops

        return cast(OpTable, ops), cuda_layout.READS
    return None


class Reader:
    """Reads one layer of a cache through kernels, a new token of every row at a time.

    Args:
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
        return not any(side.keeps for side in self._sides)

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
        sides = (k.packed, v.packed)
        most = max(packed.blocks for packed in sides)
        if blocks > most:
            most = max(packed.blocks_for(blocks * packed.block_groups) for packed in sides)
        for packed in sides:
            if packed.blocks < most:  # not one more: the other side would follow, and both grow at every step
                packed.move(most)
        cache = self._view()
        # A BF16 q times a power of two is exact, and so is a BF16 output.
        asked = _unscaled(q, k.scales).transpose(1, 2).flatten(0, 1)
        kernels = kernels_on(q.device.type)
        assert kernels is not None, "kernels that could read the layer are gone"
        batch = self._padded_batch(padding, seen) if any(padding) else self._batch(len(q), seen)
        out = kernels[0].paged_attention(asked, cache, self._layer, batch, softmax_scale)
        return _unscaled(out.unsqueeze(2), v.scales).transpose(1, 2)

    def _view(self) -> PagedKVCache:
        """The layer's memory as a paged cache; made anew where memory moved, for kernels remember where it lies."""
        fields = tuple({name: tensor.flatten(0, 1) for name, tensor in side.packed.fields.items()} for side in self._sides)
        k, v = self._sides
        tensors = (*fields[0].values(), *fields[1].values(), k.kept.vectors, v.kept.vectors)
        memory = tuple((tensor.data_ptr(), len(tensor)) for tensor in tensors)
        if self._cache is None or memory != self._memory:
            formats = k.packed.kv_format, v.packed.kv_format
            kept = k.kept if k.keeps else None, v.kept if v.keeps else None
            self._cache = PagedKVCache.over(formats, self._layer, (fields[0], fields[1]), kept, k.head_dim)
            self._memory = memory
        return self._cache

    def _batch(self, rows: int, seen: int) -> Batch:
        blocks, device = self._sides[0].packed.blocks, self._sides[0].device
        row = torch.arange(rows, device=device).unsqueeze(1)
        table = row * blocks + torch.arange(-(-seen // BLOCK_SIZE), device=device)
        return self._step(table, torch.full((rows,), seen, device=device), table[:, -1] * BLOCK_SIZE + (seen - 1) % BLOCK_SIZE)

    def _padded_batch(self, padding: tuple[int, ...], seen: int) -> Batch:
        """The rows without their padding: tokens of the two blocks that are not read whole are copied to spare ones.

        One query sees every token, so their order is free; but only the last block that kernels read may be a part of one.
        """
        packed = [side.packed for side in self._sides]
        table, *places = _without_padding(padding, seen, packed[0].blocks)
        row, source, target = (place.to(self._sides[0].device) for place in places)
        for field in (field for side in packed for field in side.fields.values()):
            moved = field[row, source // BLOCK_SIZE, :, source % BLOCK_SIZE]
            field[row, target // BLOCK_SIZE, :, target % BLOCK_SIZE] = moved
        return self._step(table, seen - torch.tensor(padding), torch.zeros(len(padding), dtype=torch.int64))

    def _step(self, table: Tensor, lengths: Tensor, slots: Tensor) -> Batch:
        """One new token at the end of each row."""
        row = torch.arange(len(table) + 1, device=table.device)
        batch = Batch(
            positions=lengths - 1, slot_mapping=slots, block_table=table.int(), seq_lens=lengths.int(),
            query_start_loc=row.int(), rows=row[:-1],
        )  # fmt: skip
        return batch.to(self._sides[0].device)


_SPARE = 2
"""Blocks of a row that take the tokens of blocks which are not read whole: those of two blocks, but for one token."""


@lru_cache(maxsize=2)
def _without_padding(padding: tuple[int, ...], seen: int, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where rows that begin with padding are read, of `blocks` blocks whose last `_SPARE` are free; alike in all layers.

    Returns:
        [B, most], blocks in the memory of all rows, where -1 pads; and of tokens that are copied first [n] each: of which row,
        from where in it, and to where.
    """
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
        table = [*range(first, last), *spare] if copied else [*range(first, last + 1)]
        tables.append([row * blocks + block for block in table])
        rows += [row] * len(copied)
        sources += copied
        targets += range((blocks - _SPARE) * BLOCK_SIZE, (blocks - _SPARE) * BLOCK_SIZE + len(copied))
    longest = max(map(len, tables))
    padded = torch.tensor([table + [-1] * (longest - len(table)) for table in tables])
    row_of, source, target = (torch.tensor(places, dtype=torch.int64) for places in (rows, sources, targets))
    return padded, row_of, source, target


def readable(sides: Sequence[SideStore]) -> bool:
    """Whether there are kernels that can read what is stored, as it is stored."""
    kernels = kernels_on(sides[0].device.type)
    if kernels is None:
        return False
    reads, head_dim, dtype = kernels[1], sides[0].head_dim, sides[0].dtype
    kept = any(side.keeps for side in sides)
    return (
        all(side.head_dim == head_dim for side in sides)
        and wrong_head_dim(reads, head_dim) is None
        and all(misfit(reads, side.packed.kv_format, head_dim) is None for side in sides)
        # Kernels keep tokens in BF16, which is exact in a BF16 model alone.
        and (dtype == torch.bfloat16 or (dtype == torch.float32 and not kept))
    )


def _unscaled(x: Tensor, scales: Tensor | None) -> Tensor:
    """x [B, H, n, D] divided by the scales [Hkv, D] of its KV heads; powers of two, so nothing is rounded."""
    if scales is None:
        return x
    return (x / scales.repeat_interleave(x.shape[1] // len(scales), 0).unsqueeze(1)).to(x.dtype)
