"""Drafts by a smaller model of the same tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from haarkv.engine.drafts import Beginning, Drafter, DraftSource, Proposal, draft
from haarkv.engine.generation import prefill_in_chunks
from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, verify
from haarkv.models.base import new_cache
from haarkv.tq_ops.kv.batch import upload
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan


@dataclass(frozen=True, kw_only=True)
class ModelSource(DraftSource):
    """Drafts by an executor with a KV cache of its own."""

    executor: Executor
    plan: KVPlan

    def begin(self, beginning: Beginning) -> Drafter:
        return _ModelDrafter(self, beginning)

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        config = self.executor.config
        return cache_bytes(self.plan, self.context(max_context), config.kv_shapes, sequences, config.state_bytes)

    def context(self, max_context: int) -> int:
        """Tokens of a sequence that a drafter stores at most: beyond them it has nothing to say."""
        return min(max_context, self.executor.config.max_position_embeddings, self.plan.context or max_context)


@dataclass
class _Sequence:
    """What the draft has stored of one sequence.

    Attributes:
        cached_tokens: tokens of the text when it was asked last; all of them are stored.
        draft_ids: tokens that it drafted then and stored behind them.
    """

    id: int
    cached_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)


class _ModelDrafter(Drafter):
    """A model that follows the texts.

    Unless it did not pay in earlier runs, it reads the prompts at once, as part of the time until the first token.
    """

    def __init__(self, source: ModelSource, beginning: Beginning) -> None:
        self._source, self._beginning = source, beginning
        self._executor, config = source.executor, source.executor.config
        self._vocab, self._limit = beginning.vocab_size, source.context(beginning.max_context)
        self._own_vocab = config.vocab_size
        count = len(beginning.prompts)
        self._cache, self._paging = new_cache(
            config, source.plan, sequences=count, tokens=self._limit, device=source.executor.device
        )
        self._sampler = BatchSampler(beginning.sampling, beginning.prompts, drafts=True, unused_ids=beginning.unused_ids)
        self._draws = beginning.sampling.temperature > 0
        self._sequences: dict[int, _Sequence] = {}
        self._opened = False
        if source.experience.hopeful:
            began = time.perf_counter()
            self._open(dict(enumerate(beginning.prompts)))
            source.experience.read(sum(map(len, beginning.prompts)), time.perf_counter() - began)

    def _open(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read what the model has stored of some texts: all of a prompt, all but the newest token later."""
        self._opened = True
        paging, ids = self._beginning.paging, self._beginning.sequences
        able = {row: text[: paging.length(ids[row])] for row, text in texts.items() if self._can_read(text)}
        self._sequences = {row: _Sequence(self._paging.add(), len(text)) for row, text in able.items()}
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

    def _can_read(self, text: Sequence[int]) -> bool:
        """Whether a text fits, and none of its tokens is one that this model does not have."""
        return len(text) < self._limit and (self._own_vocab >= self._vocab or max(text) < self._own_vocab)

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        # The last drafted token is not stored, so that a text may be as long as the limit.
        longest = (self._cache.most_undone or self._limit) - 1  # all but the first of what is drafted is stored one by one
        counts = {row: min(most[row], longest, self._limit - len(text) + 1) for row, text in texts.items()}
        rows = [row for row in texts if counts[row] > 0 and self._follows(row, texts[row])]
        if not rows:
            return {}
        logits = self._read({row: self._unread(row, texts[row]) for row in rows})
        counts = {row: counts[row] for row in rows}
        proposals = draft(self._sampler, counts, logits, lambda tokens, _: self._decode_step(tokens), draws=self._draws)
        for row, proposal in proposals.items():
            self._sequences[row].cached_tokens, self._sequences[row].draft_ids = len(texts[row]), proposal.token_ids[:-1]
        return proposals

    def _has_room(self, text: Sequence[int]) -> bool:
        return len(text) <= self._limit

    def _follows(self, row: int, text: Sequence[int]) -> bool:
        """Whether this model has followed a text so far and can go on; one that it cannot read is given up."""
        if row not in self._sequences or not self._has_room(text):
            return False
        if self._own_vocab < self._vocab and max(text[self._sequences[row].cached_tokens :], default=0) >= self._own_vocab:
            self._paging.free(self._sequences.pop(row).id)
        return row in self._sequences

    def _unread(self, row: int, text: Sequence[int]) -> Sequence[int]:
        """What is not stored of a text yet, once drafted tokens that it does not have are taken back."""
        sequence = self._sequences[row]
        came = text[sequence.cached_tokens : sequence.cached_tokens + len(sequence.draft_ids)]
        right = next((i for i, token in enumerate(came) if token != sequence.draft_ids[i]), len(came))
        self._paging.take_back([sequence.id], [len(sequence.draft_ids) - right])
        self._sampler.begin_again(row, text)
        return text[sequence.cached_tokens + right :]

    def _read(self, texts: Mapping[int, Sequence[int]]) -> Tensor:
        """Store the next tokens of some sequences; logits [n, vocab] after the last of each."""
        if all(len(text) == 1 for text in texts.values()):
            return self._decode_step({row: text[0] for row, text in texts.items()})
        ids = [self._sequences[row].id for row in texts]
        logits = prefill_in_chunks(self._executor, list(texts.values()), ids, self._paging, self._cache)
        return self._as_wide(logits)

    def _decode_step(self, tokens: Mapping[int, int]) -> Tensor:
        """Store one token of each of some sequences; logits [n, vocab] after it."""
        device = self._cache.device
        batch = self._paging.batch([self._sequences[row].id for row in tokens], [1] * len(tokens)).to(device)
        ids = upload(torch.tensor(list(tokens.values())), device)
        return self._as_wide(verify(self._executor, ids, batch, self._cache))

    def _as_wide(self, logits: Tensor) -> Tensor:
        """As many logits as the model has; some models of one tokenizer round up the size of their vocabulary, some do not."""
        return pad(logits, (0, self._vocab - logits.shape[1]), value=-torch.inf)
