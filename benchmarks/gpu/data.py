"""K and V in a paged cache, several copies of them in blocks of their own, so that calls that take turns find them cold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVPlan

DISTINCT = 2
"""Sequences with numbers of their own; further ones repeat these, which no time depends on."""


@dataclass(frozen=True)
class Stored:
    """A cache of one layer and the batches that read it, a copy each.

    Attributes:
        batches: the new tokens of all sequences of one copy, already stored.
    """

    cache: PagedKVCache
    batches: list[Batch]


def kv_of(config: ModelConfig, batch: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V [B, Hkv, context, D] bf16, drawn for the first `DISTINCT` sequences and repeated."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (min(batch, DISTINCT), config.heads.num_kv_heads, context, config.heads.head_dim)
    drawn = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator) for _ in "kv")
    k, v = (x[torch.arange(batch, device=device) % len(x)] for x in drawn)
    return k, v


def queries(config: ModelConfig, batch: int, new: int, device: torch.device) -> Tensor:
    """[B * new, Hq, D] bf16, repeated from sequence to sequence as K and V are."""
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (min(batch, DISTINCT), new, config.heads.num_heads, config.heads.head_dim)
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    return drawn[torch.arange(batch, device=device) % len(drawn)].flatten(0, 1)


def stored(plan: KVPlan, k: Tensor, v: Tensor, copies: int, new: int = 1) -> Stored:
    """A cache that holds K and V, each copy in blocks of its own, in an order of no meaning.

    Args:
        plan: of one layer.
        k, v: [B, Hkv, context, D] bf16; sequences from `DISTINCT` on repeat the first.
        new: how many of each sequence's last tokens the batches bring.
    """
    sequences, heads, context, head_dim = k.shape
    each, device = blocks_for(context), k.device
    blocks = copies * sequences * each
    cache = PagedKVCache(
        plan, KVShape(heads, head_dim), num_blocks=blocks, num_rows=copies * sequences, device=device
    )
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)).tolist()
    paging = PagedSequences(blocks, cache.block_size, order=order, num_rows=copies * sequences)
    whole = [paging.batch([paging.add()], [context]) for _ in range(copies * sequences)]
    for number, batch in enumerate(whole[:sequences][:DISTINCT]):
        cache.write(0, k[number].transpose(0, 1), v[number].transpose(0, 1), batch.to(device))
    for number, batch in enumerate(whole):
        source = whole[number % sequences % DISTINCT].block_table[0].long().to(device)
        target = batch.block_table[0].long().to(device)
        if number >= min(sequences, DISTINCT):
            for tensor in (*cache.k_fields(0).values(), *cache.v_fields(0).values()):
                tensor[target] = tensor[source]
    groups = [whole[begin : begin + sequences] for begin in range(0, len(whole), sequences)]
    return Stored(cache, [together(group, new).to(device) for group in groups])


def together(whole: list[Batch], new: int) -> Batch:
    """One batch of the last `new` tokens of sequences of one length, of which each comes as a batch of all its tokens."""
    count = len(whole)
    return replace(
        whole[0],
        positions=torch.cat([batch.positions[-new:] for batch in whole]),
        slot_mapping=torch.cat([batch.slot_mapping[-new:] for batch in whole]),
        block_table=torch.cat([batch.block_table for batch in whole]),
        seq_lens=torch.cat([batch.seq_lens for batch in whole]),
        query_start_loc=torch.arange(0, new * count + 1, new, dtype=torch.int32),
        rows=torch.cat([batch.rows for batch in whole]),
    )
