"""Drafts by the model's own drafting layer (`models.mtp`), which goes on from the model's hidden states.

Those are noted as the model's forwards give them. As it begins to draft, the layer reads what is known of the text, so its K
and V are those of hidden states of the model; what it drafts from its own hidden states is taken back once the model has
spoken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from haarkv.engine.drafts import Beginning, Drafter, DraftSource, Proposal, draft
from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, last_rows
from haarkv.models.base import new_cache
from haarkv.models.mtp import MTP
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable

READ = 32
"""Hidden states that the layer reads at most, the newest, when it begins to draft or goes on after a pause."""


@dataclass(frozen=True, kw_only=True)
class MTPSource(DraftSource):
    """Drafts by the layer that a model has for it."""

    mtp: MTP
    executor: Executor
    plan: KVPlan
    target: Executor
    name: str = "mtp"

    def follow(self, sequences: int, max_context: int) -> MTPDrafter:
        """What notes the hidden states of a batch of sequences, and drafts from them."""
        return MTPDrafter(self, sequences, max_context)

    def begin(self, beginning: Beginning) -> Drafter:
        drafter = beginning.follower
        assert isinstance(drafter, MTPDrafter)
        drafter.begin(beginning)
        return drafter

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        return cache_bytes(self.plan, max_context, self.mtp.model.config.kv_shapes, sequences)


@dataclass
class _Sequence:
    """What the layer has of one sequence.

    Attributes:
        first: position of the first token that was noted; what lies before it the layer never sees.
        waiting: [n, hidden] of the positions from first + stored on, as the model has them before its last norm: those of
            tokens that are gone may be last.
        cached_tokens: hidden states of the model that were read, from `first` on.
        draft_tokens: states of its own behind them.
    """

    id: int
    first: int
    waiting: Tensor
    cached_tokens: int = 0
    draft_tokens: int = 0

    @property
    def next(self) -> int:
        """The position of the first state that waits."""
        return self.first + self.cached_tokens


class MTPDrafter(Drafter):
    """A `Drafter`, and the follower that notes what it needs.

    While nothing is drafted, notes are all that it costs. The layer reads the newest `READ` at most: hidden states carry what
    came before them, and a whole prompt would take as long as in any other layer of the model.
    """

    def __init__(self, source: MTPSource, sequences: int, max_context: int) -> None:
        self._source = source
        self._limit = min(max_context, source.plan.context or max_context)
        self._cache, self._paging = new_cache(
            source.mtp.model.config, source.plan, sequences=sequences, tokens=self._limit, device=source.executor.device
        )
        self._notes: deque[tuple[Batch, Tensor]] = deque(maxlen=READ)
        self._by_row: dict[int, _Sequence] = {}
        self._sampler: BatchSampler | None = None
        self._rows: dict[int, int] = {}
        self._draws = False

    # -- Looking on ----------------------------------------------------------------------------------------------------
    def watching(self, executor: Executor) -> Executor:
        return _WatchedExecutor(executor, self._note)

    def _note(self, batch: Batch, hidden: Tensor) -> None:
        """Note the hidden states of a forward: a copy, for an executor may use its memory again. Of a prompt, the last."""
        many = len(hidden) > READ * len(batch.rows)
        self._notes.append((batch, hidden if many else hidden.clone()))
        if many:
            self._sort()

    def _sort(self) -> None:
        """Bring what was noted to its sequences."""
        for batch, hidden in self._notes:
            rows, starts, positions = (field.tolist() for field in (batch.rows, batch.query_start_loc, batch.positions))
            for row, begin, end in zip(rows, starts, starts[1:], strict=False):
                ours, at = self._by_row.get(row), positions[begin]
                if end - begin >= READ:
                    self._begin(row, positions[end - READ], hidden[end - READ : end].clone())
                    continue
                if ours is None or not ours.next <= at <= ours.next + len(ours.waiting):
                    ours = self._begin(row, at, hidden[:0])
                ours.waiting = torch.cat([ours.waiting[: at - ours.next], hidden[begin:end]])
                if len(ours.waiting) > READ:
                    self._begin(row, ours.next + len(ours.waiting) - READ, ours.waiting[-READ:])
        self._notes.clear()

    def _begin(self, row: int, first: int, waiting: Tensor) -> _Sequence:
        """A sequence that begins at a position, in place of what was known of the row."""
        if row in self._by_row:
            self._paging.free(self._by_row[row].id)
        self._by_row[row] = _Sequence(self._paging.add(), first, waiting)
        return self._by_row[row]

    # -- Drafting ------------------------------------------------------------------------------------------------------
    def begin(self, beginning: Beginning) -> None:
        """The prompts are stored: what comes now is drafted and drawn."""
        places = [beginning.paging.places(sequence) for sequence in beginning.sequences]
        self._rows = {index: place.row for index, place in enumerate(places)}
        self._sampler = BatchSampler(beginning.sampling, beginning.prompts, drafts=True, unused_ids=beginning.unused_ids)
        self._draws = beginning.sampling.temperature > 0

    @torch.inference_mode()
    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        self._sort()
        indices = [index for index, text in texts.items() if self._unread(index, text) > 1]
        self._run({self._rows[index]: self._read(index, texts[index], 1) for index in indices})

    @torch.inference_mode()
    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        assert self._sampler is not None
        self._sort()
        counts: dict[int, int] = {}
        for index, text in texts.items():
            if most[index] > 0 and (count := self._unread(index, text)):
                self._sampler.begin_again(index, text)
                ours = self._by_row[self._rows[index]]
                counts[index] = min(most[index], self._limit - ours.cached_tokens - count + 1)
        if not counts:
            return {}
        last, hidden = self._run({self._rows[index]: self._read(index, texts[index]) for index in counts})

        def further(tokens: Mapping[int, int], going: Sequence[int]) -> Tensor:
            nonlocal hidden
            inputs = {
                self._rows[index]: (torch.tensor([token]), hidden[place : place + 1])
                for (index, token), place in zip(tokens.items(), going, strict=True)
            }
            last, hidden = self._run(inputs, from_draft=True)
            return self._source.executor.head(last)

        return draft(self._sampler, counts, self._source.executor.head(last), further, draws=self._draws)

    def _unread(self, index: int, text: Sequence[int]) -> int:
        """States that wait before the newest token of a text; 0 where the layer cannot follow it."""
        ours = self._by_row.get(self._rows[index])
        count = len(text) - 1 - ours.next if ours is not None else 0
        return count if ours is not None and 0 < count <= min(len(ours.waiting), self._limit - ours.cached_tokens) else 0

    def _read(self, index: int, text: Sequence[int], but: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and hidden states that wait, all but the last `but`; what was drafted before them is taken back."""
        ours, count = self._by_row[self._rows[index]], self._unread(index, text) - but
        self._paging.take_back([ours.id], [ours.draft_tokens])
        ours.draft_tokens = 0
        return torch.tensor(text[ours.next + 1 : ours.next + 1 + count]), ours.waiting[:count]

    def _run(self, read: Mapping[int, tuple[Tensor, Tensor]], *, from_draft: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer over the tokens and hidden states of some rows; what comes of the last of each, and that normed.

        Args:
            from_draft: the states are its own, which are normed.
        """
        if not read:
            return torch.empty(0), torch.empty(0)
        executor, target, device = self._source.executor, self._source.target, self._cache.device
        ids, counts = [self._by_row[row].id for row in read], [len(tokens) for tokens, _ in read.values()]
        batch = self._paging.batch(ids, counts).to(device)
        tokens, hidden = (torch.cat(list(parts)).to(device) for parts in zip(*read.values(), strict=True))
        x = self._source.mtp.layer_input(tokens, hidden if from_draft else _final_norm(hidden, target), _ops(executor))
        last = last_rows(executor.layers(x, range(1), batch, self._cache), batch)
        for row, count in zip(read, counts, strict=True):
            ours = self._by_row[row]
            if from_draft:
                ours.draft_tokens += count
            else:
                ours.cached_tokens += count
                ours.waiting = ours.waiting[count:]
        return last, _final_norm(last, executor)


def _ops(executor: Executor) -> OpTable:
    assert executor.ops is not None, "choose() takes executors with an op table"
    return executor.ops


def _final_norm(hidden: Tensor, executor: Executor) -> Tensor:
    """Behind the last norm of the executor's model."""
    return _ops(executor).rms_norm(hidden, executor.weights.final_norm, executor.config.final_norm.eps)


Note = Callable[[Batch, Tensor], None]


@dataclass
class _WatchedExecutor:
    """An executor that tells what its forwards give."""

    executor: Any
    note: Note = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        hidden: Tensor = self.executor.forward(token_ids, batch, cache)
        self.note(batch, hidden)
        return hidden

    def with_ops(self, wrap: Any) -> Any:
        watcher = copy(self)
        watcher.executor = self.executor.with_ops(wrap)
        return watcher
