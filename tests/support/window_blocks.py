"""Blocks of tokens in BF16 as vLLM hands them out: a window's and the first stay; all others go to whoever asks next."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch


class WindowBlocks:
    """Which blocks each sequence holds. Block 0 is nobody's, and stands in tables where a block was given back.

    Args:
        num_blocks, block_size: of the pool.
        tail, sink: newest tokens and first ones that are held.
    """

    def __init__(self, num_blocks: int, block_size: int, tail: int, sink: int = 0) -> None:
        self.block_size, self.tail, self.sink = block_size, tail, sink
        self._free = list(range(1, num_blocks))
        self._held: dict[int, list[int]] = {}
        self.given_back: list[int] = []

    def place(self, batch: Batch, sequences: list[int]) -> Batch:
        """A batch with slots and a table of BF16 tokens; what is before a sequence's window is given back first."""
        self.given_back = []
        new, lengths = batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()
        for sequence, count, length in zip(sequences, new, lengths, strict=True):
            held = self._held.setdefault(sequence, [])
            begin = max(0, length - count - max(self.tail, 1) + 1) // self.block_size
            for index in range(-(-self.sink // self.block_size), min(begin, len(held))):
                if held[index]:
                    self.given_back.append(held[index])
                    self._free.append(held[index])
                    held[index] = 0
            held += [self._free.pop() for _ in range(-(-length // self.block_size) - len(held))]
        tables = [torch.tensor(self._held[sequence], dtype=torch.int32) for sequence in sequences]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        owner = torch.repeat_interleave(torch.arange(len(sequences)), batch.query_start_loc.diff().long())
        blocks = table[owner, batch.positions // self.block_size].long()
        return replace(batch, kept_slots=blocks * self.block_size + batch.positions % self.block_size, kept_table=table)

    def end(self, sequence: int) -> None:
        """Give back all that a sequence holds."""
        self._free += [block for block in self._held.pop(sequence) if block]


def spoil(vectors: Tensor, blocks: list[int]) -> None:
    """What is nobody's is no number."""
    vectors[[0, *blocks]] = float("nan")
