"""The decode step of any batch up to a size, with nothing in it that waits for the device: buffers that stay, and a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for

Step = Callable[[Tensor, Batch], Tensor]
"""From token ids [B] and their places to hidden states [B, hidden]."""

_LARGEST_POWER = 64


def bucket_of(sequences: int) -> int:
    """The batch size that a step of so many sequences is padded to: the next power of two, from 64 on the next multiple."""
    if sequences > _LARGEST_POWER:
        return -(-sequences // _LARGEST_POWER) * _LARGEST_POWER
    return 1 << (sequences - 1).bit_length()


class DecodeStep:
    """One decode step of at most `size` sequences on a cache.

    Sequences that are not there are dead: their slot is -1, so nothing is stored, and their length 0, so nothing is read.

    Args:
        size: sequences, as `bucket_of` gives them.
        cache: whose tensors the step reads and writes; with a graph, for as long as the graph lives.
        max_context: tokens of a sequence at most, which the block table has room for.
        step: the forward.
        pool: memory that graphs share; None runs the step as it is, without a graph.
    """

    def __init__(self, size: int, cache: PagedKVCache, max_context: int, step: Step, pool: Any) -> None:
        device, width = cache.device, min(cache.num_blocks, blocks_for(max_context, cache.block_size))
        self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._batch = Batch(
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
            block_table=torch.zeros(size, width, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(size + 1, dtype=torch.int32, device=device),
            rows=torch.zeros(size, dtype=torch.int64, device=device),
        )
        self._has_rows = cache.keeps_rows
        self._step = step  # what it reads must live as long as a graph that reads it
        self._run = self._captured(step, pool) if pool is not None else lambda: step(self._token_ids, self._fresh())

    def _captured(self, step: Step, pool: Any) -> Callable[[], Tensor]:
        # What compiles or allocates once does so before; all sequences are dead, so nothing is stored.
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                step(self._token_ids, self._fresh())
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step(self._token_ids, self._fresh())

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _fresh(self) -> Batch:
        """The batch, with nothing remembered that was computed from its tensors: a graph computes it each time."""
        return Batch(**self._batch.tensors)

    def __call__(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """Hidden states [B, hidden] of a batch of one new token a sequence; valid until the next call."""
        count, blocks = len(token_ids), min(batch.block_table.shape[1], self._batch.block_table.shape[1])
        self._token_ids[:count] = token_ids
        if count < len(self._token_ids):
            self._token_ids[count:] = 0  # dead sequences are alike: all of them choose the same experts
            self._batch.slot_mapping[count:] = -1
            self._batch.seq_lens[count:] = 0
        self._batch.positions[:count] = batch.positions
        self._batch.slot_mapping[:count] = batch.slot_mapping
        self._batch.seq_lens[:count] = batch.seq_lens
        # Padding of a shorter table is -1, which nobody reads; what lies beyond it is another sequence's, nor that.
        self._batch.block_table[:count, :blocks] = batch.block_table[:, :blocks]
        if self._has_rows:
            self._batch.rows[:count] = batch.rows
        return self._run()[:count]
