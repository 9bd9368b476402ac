"""Drafts by a smaller model, and by the model's own MTP layer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from haarkv.engine.drafts import Drafter, DraftRun, DraftSource
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, last_rows, verify
from haarkv.models.base import new_cache
from haarkv.models.mtp import MTP
from haarkv.tq_ops.kv.batch import Batch, PagedSequences, upload
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable

READ = 32
"""Hidden states, the newest, that the MTP layer reads when it begins to draft or goes on after a pause."""


Further = Callable[[Mapping[int, int], Sequence[int]], Tensor]


def draft(sampler: BatchSampler, counts: Mapping[int, int], logits: Tensor, further: Further) -> dict[int, list[int]]:
    """Draft `counts[row]` ≥ 1 tokens for each sequence, the likeliest one at a time.

    Args:
        logits: [n, vocab] before the first drafted tokens, in the order of `counts`.
        further: maps the last tokens of the sequences that go on, and their indices among the previous ones, to the next
            logits.
    """
    rows, proposals = list(counts), dict[int, list[int]]((row, []) for row in counts)
    while True:
        for row, token in zip(rows, sampler.best(logits, rows).tolist(), strict=True):
            proposals[row].append(token)
        going = [place for place, row in enumerate(rows) if len(proposals[row]) < counts[row]]
        if not going:
            return proposals
        rows = [rows[place] for place in going]
        logits = further({row: proposals[row][-1] for row in rows}, going)


# -- A smaller model


def _most_drafts(cache: PagedKVCache, limit: int) -> int:
    """The most tokens of a proposal: all but the last are stored, and the cache must be able to take them back."""
    return limit if cache.most_undone is None else min(limit, cache.most_undone + 1)


@dataclass(frozen=True, kw_only=True)
class ModelSource(DraftSource):
    """Drafts by a smaller model with its own KV cache."""

    executor: Executor
    plan: KVPlan

    def drafter(self, run: DraftRun) -> Drafter:
        return _ModelDrafter(self, run)

    def new_cache(self, run: DraftRun) -> tuple[PagedKVCache, PagedSequences]:
        """The drafter's own cache, empty."""
        tokens, executor = self.context(run.max_context), self.executor
        return new_cache(executor.config, self.plan, sequences=len(run.prompts), tokens=tokens, device=executor.device)

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        config = self.executor.config
        return cache_bytes(self.plan, self.context(max_context), config.kv_shapes, sequences, config.state_bytes)

    def context(self, max_context: int) -> int:
        """Most tokens of a sequence that the drafter stores."""
        return min(max_context, self.executor.config.max_position_embeddings, self.plan.context or max_context)


@dataclass
class _DraftSequence:
    """Text tokens stored when last asked, and the draft's own tokens stored behind them."""

    id: int
    cached_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)


class _ModelDrafter(Drafter):
    """Unless drafts did not pay in earlier runs, it reads the prompts at once, within the time to the first token."""

    def __init__(self, source: ModelSource, run: DraftRun) -> None:
        self._source, self._executor, self._limit = source, source.executor, source.context(run.max_context)
        self._target, self._vocab, self._own_vocab = run, run.vocab_size, source.executor.config.vocab_size
        self._cache, self._paging = source.new_cache(run)
        self._sequences: dict[int, _DraftSequence] = {}
        self._opened = False

    def begin(self) -> None:
        if self._source.experience.hopeful:
            began, prompts = time.perf_counter(), self._target.prompts
            self._open(dict(enumerate(prompts)))
            self._source.experience.read(sum(map(len, prompts)), time.perf_counter() - began)

    def _open(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read the tokens that the target has stored."""
        self._opened = True
        paging, ids = self._target.paging, self._target.sequences
        able = {
            row: text[: paging.length(ids[row])] for row, text in texts.items()
            if len(text) < self._limit and (self._own_vocab >= self._vocab or max(text) < self._own_vocab)
        }  # fmt: skip
        self._sequences = {row: _DraftSequence(self._paging.add(), len(text)) for row, text in able.items()}
        if able:
            self._read(able)

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        if not self._opened:
            self._open(texts)
            return
        unread = {row: self._unread(row, text)[:-1] for row, text in texts.items() if self._follows(row, text)}
        for row in unread:
            self._sequences[row].cached_tokens, self._sequences[row].draft_ids = len(texts[row]) - 1, []
        if unread := {row: text for row, text in unread.items() if len(text)}:
            self._read(unread)

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, list[int]]:
        longest = _most_drafts(self._cache, self._limit)
        counts = {row: min(most[row], longest, self._limit - len(text) + 1) for row, text in texts.items()}
        rows = [row for row in texts if counts[row] > 0 and self._follows(row, texts[row])]
        if not rows:
            return {}
        logits = self._read({row: self._unread(row, texts[row]) for row in rows})
        counts = {row: counts[row] for row in rows}
        proposals = draft(self._target.sampler, counts, logits, lambda tokens, _: self._decode_step(tokens))
        for row, proposal in proposals.items():
            self._sequences[row].cached_tokens, self._sequences[row].draft_ids = len(texts[row]), proposal[:-1]
        return proposals

    def _follows(self, row: int, text: Sequence[int]) -> bool:
        """Whether this model has read the text so far and can go on; a text with unknown tokens is given up."""
        if row not in self._sequences or len(text) > self._limit:
            return False
        if self._own_vocab < self._vocab and max(text[self._sequences[row].cached_tokens :], default=0) >= self._own_vocab:
            self._paging.free(self._sequences.pop(row).id)
        return row in self._sequences

    def _unread(self, row: int, text: Sequence[int]) -> Sequence[int]:
        """Tokens of a text not stored yet; rejected drafts are taken back first."""
        sequence = self._sequences[row]
        came = text[sequence.cached_tokens : sequence.cached_tokens + len(sequence.draft_ids)]
        right = next((i for i, token in enumerate(came) if token != sequence.draft_ids[i]), len(came))
        self._paging.take_back([sequence.id], [len(sequence.draft_ids) - right])
        return text[sequence.cached_tokens + right :]

    def _read(self, texts: Mapping[int, Sequence[int]]) -> Tensor:
        """Store the next tokens of some sequences; logits [n, vocab] after the last of each."""
        if all(len(text) == 1 for text in texts.values()):
            return self._decode_step({row: text[0] for row, text in texts.items()})
        ids = [self._sequences[row].id for row in texts]
        logits = prefill_in_chunks(self._executor, list(texts.values()), ids, self._paging, self._cache)
        return self._as_wide(logits)

    def _decode_step(self, tokens: Mapping[int, int]) -> Tensor:
        device = self._cache.device
        batch = self._paging.batch([self._sequences[row].id for row in tokens], [1] * len(tokens)).to(device)
        ids = upload(torch.tensor(list(tokens.values())), device)
        return self._as_wide(verify(self._executor, ids, batch, self._cache))

    def _as_wide(self, logits: Tensor) -> Tensor:
        """Pad logits to the target's vocabulary: models of one tokenizer may round its size up differently."""
        return pad(logits, (0, self._vocab - logits.shape[1]), value=-torch.inf)


# -- The model's own layer


@dataclass(frozen=True, kw_only=True)
class MTPSource(ModelSource):
    """Drafts by the model's own MTP layer (`models.mtp`)."""

    mtp: MTP
    target: Executor
    name: str = "mtp"

    def drafter(self, run: DraftRun) -> Drafter:
        return MTPDrafter(self, run)


@dataclass
class _LayerSequence:
    """State of the MTP layer for one sequence.

    Attributes:
        first: position of the first observed token; the layer sees nothing before it.
        waiting: [n, hidden] target hidden states before its last norm, from position first + cached_tokens on; states of
            rejected tokens may be last.
        cached_tokens: target states that the layer has read.
        draft_tokens: its own states behind them.
    """

    id: int
    first: int
    waiting: Tensor
    cached_tokens: int = 0
    draft_tokens: int = 0

    @property
    def next(self) -> int:
        """Position of the first waiting state."""
        return self.first + self.cached_tokens


class MTPDrafter(Drafter):
    """Drafts from the target's hidden states, which it observes as the target's forwards give them.

    Without drafts it costs nothing but observing. It reads only the newest `READ` states: hidden states carry the text before
    them, and a whole prompt would cost as much as in any other layer. K and V of drafted states are taken back when the target
    has verified them.
    """

    def __init__(self, source: MTPSource, run: DraftRun) -> None:
        self._source, self._limit, self._sampler = source, source.context(run.max_context), run.sampler
        self._rows = [run.paging.places(sequence).row for sequence in run.sequences]
        self._cache, self._paging = source.new_cache(run)
        self._notes: deque[tuple[Batch, Tensor]] = deque(maxlen=READ)
        self._by_row: dict[int, _LayerSequence] = {}

    def observe(self, executor: Executor) -> Executor:
        watched = copy(executor)

        def forward(token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
            hidden = executor.forward(token_ids, batch, cache)
            self._note(batch, hidden)
            return hidden

        watched.forward = forward  # type: ignore[method-assign]
        return watched

    def _note(self, batch: Batch, hidden: Tensor) -> None:
        """Keep a copy of a forward's hidden states, for an executor may reuse its memory; of a prompt the newest, at once."""
        many = len(hidden) > READ * len(batch.rows)
        self._notes.append((batch, hidden if many else hidden.clone()))
        if many:
            self._sort()

    def _sort(self) -> None:
        """Hand observed states to their sequences."""
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

    def _begin(self, row: int, first: int, waiting: Tensor) -> _LayerSequence:
        if row in self._by_row:
            self._paging.free(self._by_row[row].id)
        self._by_row[row] = _LayerSequence(self._paging.add(), first, waiting)
        return self._by_row[row]

    @torch.inference_mode()
    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        self._sort()
        indices = [index for index, text in texts.items() if self._unread(index, text) > 1]
        self._run({self._rows[index]: self._read(index, texts[index], 1) for index in indices})

    @torch.inference_mode()
    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, list[int]]:
        self._sort()
        counts: dict[int, int] = {}
        longest = _most_drafts(self._cache, self._limit)
        for index, text in texts.items():
            if most[index] > 0 and (count := self._unread(index, text)):
                ours = self._by_row[self._rows[index]]
                counts[index] = min(most[index], longest, self._limit - ours.cached_tokens - count + 1)
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

        return draft(self._sampler, counts, self._source.executor.head(last), further)

    def _unread(self, index: int, text: Sequence[int]) -> int:
        """States that wait before the newest token of a text; 0 where the layer cannot follow it."""
        ours = self._by_row.get(self._rows[index])
        count = len(text) - 1 - ours.next if ours is not None else 0
        return count if ours is not None and 0 < count <= min(len(ours.waiting), self._limit - ours.cached_tokens) else 0

    def _read(self, index: int, text: Sequence[int], but: int = 0) -> tuple[Tensor, Tensor]:
        """Waiting tokens and states, all but the last `but`; earlier drafts are taken back."""
        ours, count = self._by_row[self._rows[index]], self._unread(index, text) - but
        self._paging.take_back([ours.id], [ours.draft_tokens])
        ours.draft_tokens = 0
        return torch.tensor(text[ours.next + 1 : ours.next + 1 + count]), ours.waiting[:count]

    def _run(self, read: Mapping[int, tuple[Tensor, Tensor]], *, from_draft: bool = False) -> tuple[Tensor, Tensor]:
        """Run the layer over (tokens, states) of some rows: its last state of each row, and that state normed.

        `from_draft`: the states are the layer's own, which are normed already.
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
    return _ops(executor).rms_norm(hidden, executor.weights.final_norm, executor.config.final_norm.eps)
