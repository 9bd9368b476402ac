"""Tokens in BF16 in blocks of their own are read as those in a ring are, whatever the freed blocks hold now."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_contract.suite import REFERENCE
from op_tables import LAYER, TABLES, Case
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.residual_window import ResidualBlocks
from haarkv.tq_ops.kv.shapes import KVShape

CHUNK, HEADS, DIM, BLOCKS = 27, 2, 128, 60
FORWARDS = [[27, 5, 0], [27, 20, 9], [27, 0, 1], [1, 1, 1], [27, 1, 27], *([[1, 1, 1]] * 12)]
"""New tokens of three sequences; 0 sits a forward out."""


class WindowBlocks:
    """Blocks of tokens in BF16 as vLLM hands them out: a window's and the first stay, all others go to the next request.

    Block 0 belongs to no sequence, and stands in tables where a block was given back.

    Args:
        num_blocks, block_size: of the pool.
        tail, sink: newest tokens and first ones that are held.
    """

    def __init__(self, num_blocks: int, block_size: int, tail: int, sink: int = 0) -> None:
        self.block_size, self.tail, self.sink = block_size, tail, sink
        self._free = list(range(1, num_blocks))
        self._tables: dict[int, list[int]] = {}
        self.freed_blocks: list[int] = []

    def place(self, batch: Batch, sequences: list[int]) -> Batch:
        """A batch with slots and a table of BF16 tokens; what is before a sequence's window is given back first."""
        self.freed_blocks = []
        new, lengths = batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()
        for sequence, count, length in zip(sequences, new, lengths, strict=True):
            table_blocks = self._tables.setdefault(sequence, [])
            begin = max(0, length - count - max(self.tail, 1) + 1) // self.block_size
            for index in range(-(-self.sink // self.block_size), min(begin, len(table_blocks))):
                if table_blocks[index]:
                    self.freed_blocks.append(table_blocks[index])
                    self._free.append(table_blocks[index])
                    table_blocks[index] = 0
            table_blocks += [self._free.pop() for _ in range(-(-length // self.block_size) - len(table_blocks))]
        tables = [torch.tensor(self._tables[sequence], dtype=torch.int32) for sequence in sequences]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        owner = batch.of_tokens(torch.arange(len(sequences)))
        blocks = table[owner, batch.positions // self.block_size].long()
        return replace(
            batch, residual_slots=blocks * self.block_size + batch.positions % self.block_size, residual_table=table
        )


def spoil(vectors: Tensor, blocks: list[int]) -> None:
    """Blocks of no sequence hold NaN."""
    vectors[[0, *blocks]] = float("nan")


class CachePair:
    """The same tokens in a cache of our own, with a ring, and in one of another's memory, with blocks."""

    def __init__(self, kv: str, tail: int, sink: int) -> None:
        case = Case(kv, DIM, 5, HEADS, 16, (), (), tail=tail, sink=sink)
        self.ring = PagedKVCache(case.plan, KVShape(HEADS, DIM), block_size=16, num_blocks=BLOCKS, num_rows=3, chunk=CHUNK)
        self.kept = [ResidualBlocks(torch.empty(40, HEADS, 8, DIM).bfloat16(), tail=tail, sink=sink) for _ in range(2)]
        self.pair = self.ring.plan.layers[LAYER]
        fields = self.ring.kv[LAYER].k.fields, self.ring.kv[LAYER].v.fields
        self.fields = tuple({name: window.clone() for name, window in side.items()} for side in fields)
        self.paging, self.windows = PagedSequences(BLOCKS, 16, num_rows=3), WindowBlocks(40, 8, tail, sink)
        self.sequences = [self.paging.add() for _ in range(3)]
        for window in self.kept:
            window.vectors.fill_(float("nan"))

    def blocks(self) -> PagedKVCache:
        windows = tuple(window if kv_format.lossy else None for window, kv_format in zip(self.kept, self.pair, strict=True))
        return PagedKVCache.over(self.pair, LAYER, self.fields, windows, DIM)

    def batches(self):
        for new in FORWARDS:
            some = [sequence for sequence, count in zip(self.sequences, new, strict=True) if count]
            batch = self.windows.place(self.paging.batch(some, [count for count in new if count]), some)
            for window in self.kept:
                spoil(window.vectors, self.windows.freed_blocks)
            yield batch


@pytest.mark.parametrize("table", [*TABLES, REFERENCE], ids=lambda table: table.name)
@pytest.mark.parametrize(
    ("kv", "tail", "sink"), [("tq4", 40, 3), ("k=tq5,v=tq3", 16, 0), ("tq4", 1, 9), ("k=bf16,v=tq4", 0, 3)]
)
def test_blocks_are_read_as_a_ring_is(table, kv, tail, sink):
    both, ops, generator = CachePair(kv, tail, sink), table.open(), torch.Generator().manual_seed(0)
    blocks = both.blocks()
    for batch in both.batches():
        tokens = len(batch.positions)
        q, k, v = (torch.randn(tokens, n, DIM, generator=generator).bfloat16() for n in (10, HEADS, HEADS))
        outs = []
        for cache in (both.ring, blocks):
            ops.store_kv(k, v, cache.view(LAYER, batch))
            outs.append(ops.paged_attention(q, cache.view(LAYER, batch), DIM**-0.5))
        assert torch.equal(*outs)
    for fields, expected in zip(both.fields, (both.ring.kv[LAYER].k.fields, both.ring.kv[LAYER].v.fields), strict=True):
        assert all(torch.equal(fields[name], expected[name]) for name in expected)
