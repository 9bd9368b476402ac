"""Drafts by the model's own drafting layer (`models.mtp`), which goes on from the model's hidden states.

Those are noted as the model's forwards give them. The layer reads what is known of the text, so its K and V are those of
hidden states of the model; what it drafts from its own hidden states is taken back once the model has spoken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from haarkv.engine.draft_models import draw_next
from haarkv.engine.drafts import Beginning, Drafter, Proposal
from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, last_rows
from haarkv.models.caches import new_cache
from haarkv.models.mtp import MTP
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan

_NAME = "mtp"


@dataclass(frozen=True)
class MTPSource:
    """Drafts by the layer that a model has for it.

    Attributes:
        mtp: the layer.
        executor: runs it.
        plan: of its K and V.
        target: runs the model.
        shared_bytes: of embedding and head, which are the model's.
    """

    mtp: MTP
    executor: Executor
    plan: KVPlan
    target: Executor
    shared_bytes: int
    name: str = _NAME
    paced: bool = True

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
        id: in the layer's own cache.
        first: position of the first token that was noted; a prefix that was reused lies before it.
        stored: hidden states of the model that were read, from there on.
        drafted: states of its own behind them.
        waiting: [n, hidden], normed, of the positions from first + stored on: those of tokens that are gone may be last.
    """

    id: int
    first: int
    waiting: Tensor
    stored: int = 0
    drafted: int = 0

    @property
    def next(self) -> int:
        """The position of the first state that waits."""
        return self.first + self.stored


class MTPDrafter:
    """A `Drafter`, and the follower that notes what it needs.

    Attributes:
        stopped: nothing is noted any more, nor drafted.
    """

    def __init__(self, source: MTPSource, sequences: int, max_context: int) -> None:
        self._source, self.stopped = source, False
        self._limit = min(max_context, source.plan.context or max_context)
        self._cache, self._paging = new_cache(
            source.mtp.model.config, source.plan, sequences=sequences, tokens=self._limit, device=source.executor.device
        )
        self._by_row: dict[int, _Sequence] = {}
        self._sampler: BatchSampler | None = None
        self._rows: dict[int, int] = {}
        self._draws = False

    # -- Looking on ----------------------------------------------------------------------------------------------------
    def watching(self, executor: Executor) -> Executor:
        """The same executor, whose forwards are noted."""
        return _Watched(executor, self._note)

    @torch.inference_mode()
    def _note(self, token_ids: Tensor, batch: Batch, hidden: Tensor) -> None:
        """Note the hidden states of a forward; those of a prompt are read at once, but for each sequence's last."""
        if self.stopped:
            return
        target = self._source.target
        normed = self._normed(hidden, target.weights.final_norm, target)
        starts, rows = batch.query_start_loc.tolist(), batch.rows.tolist()
        read: dict[int, tuple[Tensor, Tensor]] = {}
        for row, begin, end, at in zip(
            rows, starts, starts[1:], batch.positions[batch.query_start_loc[:-1].long()].tolist(), strict=False
        ):
            ours = self._by_row.get(row)
            if ours is None or not ours.next <= at <= ours.next + len(ours.waiting):
                if ours is not None:
                    self._paging.free(ours.id)
                ours = self._by_row[row] = _Sequence(self._paging.add(), at, normed[:0])
            before = ours.waiting[: at - ours.next]
            ours.waiting = torch.cat([before, normed[begin:end]])
            if self._sampler is None and len(ours.waiting) > 1:
                # In a prompt the token behind each is known: of those noted before, one lacked it.
                following = token_ids[begin:end] if len(before) else token_ids[begin + 1 : end]
                read[row] = following, ours.waiting[: len(following)]
        if read:
            self._run({row: pair for row, pair in read.items() if self._has_room(row, len(pair[0]))})

    def _has_room(self, row: int, more: int) -> bool:
        ours = self._by_row[row]
        return ours.stored + ours.drafted + more <= self._limit

    # -- Drafting ------------------------------------------------------------------------------------------------------
    def begin(self, beginning: Beginning) -> None:
        """The prompts are stored: what comes now is drafted and drawn."""
        places = [beginning.paging.places(sequence) for sequence in beginning.sequences]
        self._rows = {index: place.row for index, place in enumerate(places)}
        self._sampler = BatchSampler(beginning.sampling, beginning.prompts, drafts=True)
        self._draws = beginning.sampling.temperature > 0

    def stop(self) -> None:
        """Nothing more will be asked for."""
        self.stopped = True
        self._by_row.clear()

    @torch.inference_mode()
    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        assert self._sampler is not None
        read: dict[int, tuple[Tensor, Tensor]] = {}
        wanted: dict[int, int] = {}
        for index, text in texts.items():
            row = self._rows[index]
            ours = self._by_row.get(row)
            if ours is None or most[index] < 1:
                continue
            count = len(text) - 1 - ours.next
            room = self._limit - ours.stored - count
            if count < 1 or len(ours.waiting) < count or room < 0:
                continue
            self._paging.take_back([ours.id], [ours.drafted])
            ours.drafted = 0
            self._sampler.begin_again(index, text)
            tokens = torch.tensor(text[ours.next + 1 : len(text)])
            read[row], wanted[index] = (tokens, ours.waiting[:count]), min(most[index], room + 1)
        if not read:
            return {}
        rows = [index for index in texts if index in wanted]
        proposals = {index: Proposal([], [] if self._draws else None) for index in rows}
        logits, hidden = self._run(read)
        while True:
            draw_next(self._sampler, logits, {index: proposals[index] for index in rows}, draws=self._draws)
            going = [place for place, index in enumerate(rows) if len(proposals[index].token_ids) < wanted[index]]
            if not going:
                return proposals
            rows = [rows[place] for place in going]
            last = {
                self._rows[index]: (torch.tensor(proposals[index].token_ids[-1:]), hidden[place : place + 1])
                for index, place in zip(rows, going, strict=True)
            }
            logits, hidden = self._run(last, drafted=True)

    def _run(self, read: Mapping[int, tuple[Tensor, Tensor]], *, drafted: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer over the tokens and hidden states of some rows; logits [B, vocab] and normed states behind the last.

        Args:
            drafted: the states are its own.
        """
        if not read:
            return torch.empty(0), torch.empty(0)
        executor, device = self._source.executor, self._cache.device
        ops = executor.ops
        assert ops is not None, "choose() takes executors with an op table"
        ids, counts = [self._by_row[row].id for row in read], [len(tokens) for tokens, _ in read.values()]
        batch = self._paging.batch(ids, counts).to(device)
        tokens, hidden = (torch.cat(list(parts)).to(device) for parts in zip(*read.values(), strict=True))
        x = self._source.mtp.entered(tokens, hidden, ops)
        last = last_rows(executor.layers(x, range(1), batch, self._cache), batch)
        for row, count in zip(read, counts, strict=True):
            ours = self._by_row[row]
            if drafted:
                ours.drafted += count
            else:
                ours.stored += count
                ours.waiting = ours.waiting[count:]
        logits = executor.head(last) if self._sampler is not None else torch.empty(0)
        return logits, self._normed(last, executor.weights.final_norm, executor)

    def _normed(self, hidden: Tensor, weight: Tensor, executor: Executor) -> Tensor:
        assert executor.ops is not None
        return executor.ops.rms_norm(hidden, weight, executor.config.final_norm.eps)


Note = Callable[[Tensor, Batch, Tensor], None]


@dataclass
class _Watched:
    """An executor that tells what its forwards give."""

    executor: Any
    note: Note = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        hidden: Tensor = self.executor.forward(token_ids, batch, cache)
        self.note(token_ids, batch, hidden)
        return hidden

    def over(self, wrap: Any) -> Any:
        """As the executor's own."""
        wrapped = copy(self)
        wrapped.executor = self.executor.over(wrap)
        return wrapped
