"""Tokens in BF16 in blocks of their own, which another owner hands out, shares and takes back as it does packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kept import Kept


class KeptBlocks(Kept):
    """Tokens of K or of V of one layer in BF16, where the batch says: `kept_slots` of the new ones, `kept_table` of all.

    Which tokens a query sees so follows from positions, as with a ring. The owner keeps the blocks of those alone; what else a
    table names may be anything, and is not looked at.

    Args:
        vectors: [num_blocks, Hkv, block_size, D] bf16; a block is one piece of memory, and blocks may lie apart.
        tail, sink: as of `Kept`.
    """

    def __init__(self, vectors: Tensor, *, tail: int, sink: int = 0) -> None:
        assert vectors.dtype == torch.bfloat16
        self.tail, self.sink, self.group, self.ring = tail, sink, 1, 0
        self.vectors = vectors

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.vectors.shape[2]

    def write(self, x: Tensor, batch: Batch) -> None:
        assert batch.kept_slots is not None
        kept = batch.kept_slots >= 0
        slots = batch.kept_slots[kept]
        self.vectors[slots // self.block_size, :, slots % self.block_size] = x[kept].to(torch.bfloat16)

    def read(self, batch: Batch, tokens: int) -> Tensor:
        assert batch.kept_table is not None
        stored, lengths = torch.arange(tokens, device=self.vectors.device), batch.seq_lens.long()
        first = self.first_recent(lengths - batch.query_start_loc.diff()).unsqueeze(1)
        held = ((stored < self.sink) | (stored >= first)) & (stored < lengths.unsqueeze(1))
        column = (stored // self.block_size).clamp(max=batch.kept_table.shape[1] - 1)
        blocks = batch.kept_table.long()[:, column].masked_fill(~held, 0)
        vectors = self.vectors[blocks, :, stored % self.block_size].transpose(1, 2).float()
        return vectors.masked_fill(~held[:, None, :, None], 0.0)
