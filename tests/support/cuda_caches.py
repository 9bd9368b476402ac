"""Caches of the tests of GPU kernels: copies on their device, and what a batch stored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import bounds
import torch
from levels import compare_stored
from op_contract import caches
from op_contract.caches import everything_in
from op_tables import LAYER
from torch import Tensor

from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


on_device = partial(caches.on_device, device=DEVICE)


def as_bytes(cache: PagedKVCache) -> list[Tensor]:
    """Copies of all tensors of a cache, as bytes on the host, to be compared bit for bit, NaN included."""
    return [tensor.cpu().contiguous().view(torch.uint8).clone() for tensor in everything_in(cache)]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def pad_batch(batch: Batch, dead: int, *, table: int = 0, width: int = 0) -> Batch:
    """A batch of one new token a sequence and so many dead ones, as a captured step is padded: length 0, slot -1.

    Args:
        table: what stands in the dead ones' rows of the block table.
        width: columns more of that table, which hold the same.
    """
    pad = torch.nn.functional.pad
    count = len(batch.positions) + dead
    return replace(
        batch, positions=pad(batch.positions, (0, dead)), slot_mapping=pad(batch.slot_mapping, (0, dead), value=-1),
        block_table=pad(batch.block_table, (0, width, 0, dead), value=table), seq_lens=pad(batch.seq_lens, (0, dead)),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32), rows=pad(batch.rows, (0, dead)),
    )  # fmt: skip


def attention_bound(dtype: torch.dtype) -> float:
    """What attention may be off by."""
    return (bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16).attention


def check_stored(ours: PagedKVCache, theirs: PagedKVCache, k: Tensor, v: Tensor, batch: Batch, noise: float) -> None:
    """That a batch stored the same in both caches, at its slots and nowhere else.

    Args:
        noise: by which K and V may differ before they are quantized.
    """
    slots = theirs.kv[LAYER].place(batch).slot_mapping
    block, offset = slots // theirs.block_size, slots % theirs.block_size
    for index, x in enumerate((k, v)):
        mine, other = ({n: t.cpu() for n, t in cache.kv[LAYER].fields[index].items()} for cache in (ours, theirs))
        new = [by_token({name: t[block, :, offset] for name, t in fields.items()}) for fields in (other, mine)]
        kv_format = theirs.kv[LAYER].formats[index]
        stored_x = kv_format.as_stored(x.transpose(0, 1), LAYER, batch.positions)
        comparison, length = compare_stored(kv_format, LAYER, *new, stored_x, noise)
        assert comparison.unexplained == 0
        assert comparison.match > 0.999
        assert length <= bounds.LAYER_FP32.length
        for name, tensor in mine.items():
            other_slots = torch.ones(tensor.shape[:3], dtype=torch.bool)
            other_slots[block, :, offset] = False
            assert torch.equal(tensor[other_slots].view(torch.uint8), other[name][other_slots].view(torch.uint8))
