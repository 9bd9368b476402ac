"""The residual window: BF16 copies of the newest tokens (the tail, in a ring) and of the first tokens (sinks).

Every token is also packed, as soon as its group is full. A newer token overwrites the copy in the ring. Positions alone decide
which copy a query reads, so results do not depend on how a prompt is cut. A sliding window hides a token in both forms.
"""

from __future__ import annotations

from copy import copy
from typing import TypeVar

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch

T = TypeVar("T", int, Tensor)


class ResidualWindow:
    """K or V of one layer in BF16. Token j is at place `sink + j % ring`, until token j + ring overwrites it; sink j is at j.

    Args:
        tail: R, the number of newest tokens that a query reads in BF16, its own token included.
        sink: number of first tokens that a query reads in BF16.
        group: G, number of tokens that are packed together.
        ring: tokens that the ring holds: R + `WINDOW_ROOM`, or R + a forward's new tokens; 0 without a tail.
        num_rows: the most sequences at a time.
        dtype: dtype of the vectors; kernels read BF16 only.
    """

    def __init__(
        self, *, tail: int, sink: int, group: int, ring: int, num_rows: int, num_kv_heads: int, head_dim: int,
        device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.tail, self.sink, self.group, self.ring = tail, sink, group, ring
        shape = (num_rows, num_kv_heads, sink + ring, head_dim)
        self.vectors = torch.zeros(shape, dtype=dtype, device=device)

    def in_ring(self, positions: Tensor) -> Tensor:
        """Places in the ring of tokens at these positions."""
        return self.sink + positions % max(self.ring, 1)

    def places(self, positions: Tensor) -> Tensor:
        """Places of tokens at these positions: of sinks their position, of others a place in the ring; 0 without a ring."""
        return torch.where(positions < self.sink, positions, self.in_ring(positions) if self.ring else 0)

    def first_recent(self, position: T) -> T:
        """Position of the oldest tail token for a query at `position`; 0 or less if the tail covers all tokens."""
        return self.group * ((position - self.tail) // self.group + 1)

    def write(self, x: Tensor, batch: Batch) -> None:
        """Store new vectors x [T, Hkv, D]; if the ring is too small for all, only the newest."""
        rows, x = batch.of_tokens(batch.rows), x.to(self.vectors.dtype)
        if self.ring and batch.at_most(self.ring):
            self.vectors[rows, :, self.in_ring(batch.positions)] = x
        elif self.ring:
            newest = batch.positions >= batch.of_tokens(batch.seq_lens) - self.ring
            self.vectors[rows[newest], :, self.in_ring(batch.positions[newest])] = x[newest]
        first = batch.positions < self.sink
        if first.any():
            self.vectors[rows[first], :, batch.positions[first]] = x[first]

    def wider(self, room: int, batch: Batch) -> ResidualWindow:
        """A copy with a ring of R + `room` tokens. It holds the sinks and the R tokens before the batch's new tokens."""
        wide = copy(self)
        wide.ring = self.tail + room
        heads, _, head_dim = self.vectors.shape[1:]
        wide.vectors = self.vectors.new_zeros(len(self.vectors), heads, self.sink + wide.ring, head_dim)
        starts = batch.seq_lens.long() - batch.query_start_loc.diff()
        # Positions below 0 use places that hold no token yet.
        before = starts.unsqueeze(1) - 1 - torch.arange(self.tail, device=starts.device)
        rows = batch.rows.unsqueeze(1)
        wide.vectors[rows, :, wide.in_ring(before)] = self.vectors[rows, :, self.in_ring(before)]
        wide.vectors[batch.rows, :, : self.sink] = self.vectors[batch.rows, :, : self.sink]
        return wide

    def take_newest(self, wide: ResidualWindow, batch: Batch) -> None:
        """Copy the newest tokens of a batch back from a `wider` copy, as many as fit. Waits for no device."""
        lengths, rows = batch.seq_lens.long(), batch.rows.unsqueeze(1)
        starts = (lengths - batch.query_start_loc.diff()).unsqueeze(1)
        newest = lengths.unsqueeze(1) - 1 - torch.arange(min(self.ring, wide.ring - wide.tail), device=lengths.device)
        place = self.in_ring(newest)
        new_vectors, old_vectors = wide.vectors[rows, :, wide.in_ring(newest)], self.vectors[rows, :, place]
        self.vectors[rows, :, place] = torch.where((newest >= starts)[..., None, None], new_vectors, old_vectors)
        self.vectors[batch.rows, :, : self.sink] = wide.vectors[batch.rows, :, : self.sink]

    def overwritten(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Vectors in bf16 that a batch will overwrite: [T, Hkv, D] in the ring (T = 0 without one), [n, Hkv, D] in sinks."""
        rows, first = batch.of_tokens(batch.rows), self._sink_tokens(batch)
        ring = self.vectors[rows, :, self.in_ring(batch.positions)] if self.ring else self.vectors[:0, :, 0]
        return ring, self.vectors[rows[first], :, batch.positions[first]]

    def put_back(self, snapshot: tuple[Tensor, Tensor], batch: Batch, tokens: Tensor) -> None:
        """Undo `write` for some tokens.

        Args:
            snapshot: result of `overwritten` for the whole batch, from before the write.
            tokens: [T] bool, the tokens to undo.
        """
        rows, first = batch.of_tokens(batch.rows), self._sink_tokens(batch)
        if self.ring:
            self.vectors[rows[tokens], :, self.in_ring(batch.positions[tokens])] = snapshot[0][tokens]
        firsts = first[tokens[first]]
        self.vectors[rows[firsts], :, batch.positions[firsts]] = snapshot[1][tokens[first]]

    def _sink_tokens(self, batch: Batch) -> Tensor:
        """[n] int64: indices of a batch's tokens that are sinks. Waits for a device only if the window has sinks."""
        return (batch.positions < self.sink).nonzero().flatten() if self.sink else batch.positions[:0]

    def full_groups(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The groups [n, Hkv, G, D] bf16 that new tokens x [T, Hkv, D] complete, and the token [n] int64 of the batch that
        completes each; call it before `write`.
        """
        last = ((batch.positions + 1) % self.group == 0).nonzero().flatten()
        offsets = torch.arange(1 - self.group, 1, device=x.device)
        token, position = last.unsqueeze(1) + offsets, batch.positions[last].unsqueeze(1) + offsets  # [n, G]
        inside = token >= batch.of_tokens(batch.query_start_loc[:-1])[last].unsqueeze(1)
        older = self.vectors[batch.of_tokens(batch.rows)[last].unsqueeze(1), :, self.in_ring(position)]
        vectors = torch.where(inside[..., None, None], x.to(older.dtype)[token.clamp(min=0)], older)
        return vectors.transpose(1, 2), last

    def occupied_places(self, length: int) -> Tensor:
        """[sink + ring] bool: places that hold a token of a sequence of this length."""
        newest = torch.arange(max(length - self.ring, 0), length)
        occupied = torch.zeros(self.sink + self.ring, dtype=torch.bool)
        occupied[: min(self.sink, length)] = True
        if self.ring:
            occupied[self.in_ring(newest)] = True
        return occupied

    def read(self, batch: Batch, tokens: int) -> Tensor:
        """Vectors of each sequence's first `tokens` tokens, 0 if the window does not hold them: [B, Hkv, tokens, D] fp32."""
        key_positions, lengths = torch.arange(tokens, device=self.vectors.device), batch.seq_lens.unsqueeze(1)
        in_window = ((key_positions < self.sink) | (key_positions >= lengths - self.ring)) & (key_positions < lengths)
        vectors = self.vectors[batch.rows][:, :, self.places(key_positions)].float()
        return vectors.masked_fill(~in_window[:, None, :, None], 0.0)

    def visible(self, positions: Tensor, tokens: int) -> Tensor:
        """[..., tokens] bool: which of the first `tokens` tokens a query at each position [...] reads in BF16. No causal mask.

        Tokens leave the tail in whole groups of G, so a tail holds R - G + 1 to R tokens.
        """
        key_positions = torch.arange(tokens, device=positions.device)
        return (key_positions < self.sink) | (key_positions >= self.first_recent(positions).unsqueeze(-1))


class ResidualBlocks(ResidualWindow):
    """A residual window in blocks instead of a ring: slots in `Batch.residual_slots`, block table in `Batch.residual_table`.

    vLLM owns the blocks. It frees blocks that no query reads in BF16 any more; `read` skips their table entries.

    Args:
        vectors: [num_blocks, Hkv, block_size, D] bf16, each block contiguous.
        tail, sink: as in `ResidualWindow`.
    """

    def __init__(self, vectors: Tensor, *, tail: int, sink: int = 0) -> None:
        assert vectors.dtype == torch.bfloat16
        self.tail, self.sink, self.group, self.ring = tail, sink, 1, 0
        self.vectors = vectors

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return self.vectors.shape[2]

    def write(self, x: Tensor, batch: Batch) -> None:
        assert batch.residual_slots is not None
        has_slot = batch.residual_slots >= 0
        slots = batch.residual_slots[has_slot]
        self.vectors[slots // self.block_size, :, slots % self.block_size] = x[has_slot].to(torch.bfloat16)

    def read(self, batch: Batch, tokens: int) -> Tensor:
        assert batch.residual_table is not None
        key_positions, lengths = torch.arange(tokens, device=self.vectors.device), batch.seq_lens.long()
        first = self.first_recent(lengths - batch.query_start_loc.diff()).unsqueeze(1)
        in_window = ((key_positions < self.sink) | (key_positions >= first)) & (key_positions < lengths.unsqueeze(1))
        column = (key_positions // self.block_size).clamp(max=batch.residual_table.shape[1] - 1)
        blocks = batch.residual_table.long()[:, column].masked_fill(~in_window, 0)
        vectors = self.vectors[blocks, :, key_positions % self.block_size].transpose(1, 2).float()
        return vectors.masked_fill(~in_window[:, None, :, None], 0.0)
