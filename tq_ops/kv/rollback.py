"""Store tokens that may be taken back: afterwards a cache is as if they had never come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.recurrent import LayerState


class Advance:
    """The next tokens of some sequences, some of which may turn out to be wrong.

    Made before a forward stores them; `keep` says after it how many of each sequence stay. What is packed behind a sequence's
    last token is nobody's, so that alone its length says what is there. What else new tokens replace is kept until then: each
    layer's state says what it needs.

    Args:
        cache, paging: where they go.
        sequences, counts: as for `PagedSequences.batch`.
    Attributes:
        batch: of all of them, on the cache's device.
    Raises:
        CacheFullError: as `PagedSequences.batch`.
    """

    def __init__(self, cache: PagedKVCache, paging: PagedSequences, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._paging, self._sequences, self._counts = paging, list(sequences), list(counts)
        self.batch: Batch = paging.batch(sequences, counts).to(cache.device)
        snapshots = ((state, state.snapshot(self.batch)) for state in cache.states.values())
        self._saved: list[tuple[LayerState, object]] = [(state, saved) for state, saved in snapshots if saved is not None]

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first so many new tokens of each sequence, and take the others back."""
        dropped = [new - kept for new, kept in zip(self._counts, counts, strict=True)]
        if not any(dropped):
            return
        self._paging.take_back(self._sequences, dropped)
        if not self._saved:
            return
        kept = [torch.arange(new) < stay for new, stay in zip(self._counts, counts, strict=True)]
        undone = ~torch.cat(kept).to(self.batch.positions.device)
        for state, saved in self._saved:
            state.roll_back(saved, self.batch, undone)
