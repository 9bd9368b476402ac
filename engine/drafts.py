"""Drafts: tokens that are guessed cheaply, and then checked by the model all at once.

A session has a `DraftSource`, which begins a `Drafter` for each `generate`. What a drafter proposes changes how fast text
comes, never which text may come: `Speculation` keeps what the model itself would have said.

Greedy, a drafted token stays if it is the one that the model likes best. Sampled, it stays with probability min(1, p / q),
where the model would draw it with p and the draft drew it with q, and the first that does not is replaced by a draw from
max(p - q, 0): what comes is distributed as if the model had drawn each token itself (Leviathan, Kalman and Matias,
arXiv:2211.17192). p and q are the distributions that are drawn from: with penalty, temperature and all filters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from haarkv.engine.draft_pace import Experience, Pace
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.base import Executor, verify
from haarkv.tq_ops.kv.batch import PagedSequences, upload
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.stored import Advance

LONGEST_MATCH, SHORTEST_MATCH = 8, 2
"""Tokens at the end of a text that `ngram` looks for: more are not needed to choose, and fewer say too little."""


@dataclass(frozen=True)
class Proposal:
    """What a drafter thinks comes next.

    Attributes:
        token_ids: n drafted tokens, none if it has no idea.
        probabilities: n times [vocab] fp64, the distributions that they were drawn from, each after those before it; None if
            they are certain, as at temperature 0.
    """

    token_ids: list[int] = field(default_factory=list)
    probabilities: list[Tensor] | None = None


@dataclass(frozen=True)
class Beginning:
    """What a drafter begins with: the prompts are stored, and no token has been chosen.

    Attributes:
        max_context: tokens of prompt and text that are stored of each at most.
        vocab_size: the model's; a drafter's distributions have as many numbers.
        paging, sequences: where the model keeps them.
    """

    prompts: Sequence[Sequence[int]]
    max_context: int
    vocab_size: int
    sampling: Sampling
    paging: PagedSequences
    sequences: Sequence[int]
    follower: Follower | None = None
    unused_ids: Sequence[int] = ()


class Follower(Protocol):
    """Looks on as the model reads prompts and tokens, for a draft that goes on from its hidden states."""

    def watching(self, executor: Executor) -> Executor:
        """The same executor, whose forwards are noted."""


class Drafter:
    """Drafts for the sequences of one `generate`, in those steps in which it is asked to.

    `texts` are by the sequence's number: prompt and all that was chosen, whose last token the model has not stored. A text
    begins as it did the last time.
    """

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read what was missed of some sequences, so that `propose` takes as long as in the middle of drafting."""

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        """Draft what follows each of some sequences."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A way to draft, for as long as its session lives.

    Attributes:
        shared_bytes: of the model's weights that it does not hold a second time.
    """

    name: str
    shared_bytes: int = 0
    experience: Experience = field(default_factory=Experience, compare=False, repr=False)

    def follow(self, sequences: int, max_context: int) -> Follower | None:
        """What looks on from the prompts on, if anything must."""
        return None

    def begin(self, beginning: Beginning) -> Drafter:
        raise NotImplementedError

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        """Bytes of the KV cache that a drafter of so many sequences keeps beside the model's."""
        return 0


def draft(
    sampler: BatchSampler,
    counts: Mapping[int, int],
    logits: Tensor,
    further: Callable[[Mapping[int, int], Sequence[int]], Tensor],
    *,
    draws: bool,
) -> dict[int, Proposal]:
    """Draft a given number of tokens for each sequence, one token at a time.

    Args:
        counts: by the sequence's number, at least 1.
        logits: [n, vocab] of their first drafted tokens, in their order.
        further: of the last token of each sequence that goes on, and of their places among those before, the next logits.
        draws: tokens are drawn, and the distributions are kept; else the most likely ones are taken.
    """
    rows, proposals = list(counts), {row: Proposal([], [] if draws else None) for row in counts}
    while True:
        if draws:
            for row, weights in zip(rows, sampler.probabilities(logits, rows), strict=True):
                proposals[row].token_ids.append(sampler.draw(weights, row))
                proposals[row].probabilities.append(weights)  # type: ignore[union-attr]
        else:
            for row, token in zip(rows, sampler.next(logits, rows).tolist(), strict=True):
                proposals[row].token_ids.append(token)
        going = [place for place, row in enumerate(rows) if len(proposals[row].token_ids) < counts[row]]
        if not going:
            return proposals
        rows = [rows[place] for place in going]
        logits = further({row: proposals[row].token_ids[-1] for row in rows}, going)


# -- The text itself ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NgramSource(DraftSource):
    """What followed the last time that the text ended as it does now: prompt lookup. It costs next to nothing."""

    name: str = "ngram"

    def begin(self, beginning: Beginning) -> Drafter:
        return _NgramDrafter(beginning)


class _NgramDrafter(Drafter):
    def __init__(self, beginning: Beginning) -> None:
        # Room for the texts to grow, so that a step adds its few tokens and copies none.
        room = beginning.max_context + 1
        self._tokens = [np.zeros(max(room, len(prompt)), dtype=np.int64) for prompt in beginning.prompts]
        self._lengths = [0] * len(beginning.prompts)

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        for row, text in texts.items():
            self._tokens[row][self._lengths[row] : len(text)] = text[self._lengths[row] :]
            self._lengths[row] = len(text)
        return {row: Proposal(looked_up(self._tokens[row][: len(text)], most[row])) for row, text in texts.items()}


def looked_up(tokens: NDArray[np.int64], most: int) -> list[int]:
    """What followed the longest end of a text that stood in it before, where it stood last; nothing if that is too short.

    Where what followed is the end itself, it goes on from its own beginning: a text that repeats itself keeps doing so.
    """
    last = len(tokens) - 1
    if last < 1 or most < 1:
        return []
    ends, match_length = np.flatnonzero(tokens[:last] == tokens[last]), 1
    while len(ends) and match_length < LONGEST_MATCH:
        longer = ends[ends >= match_length]
        longer = longer[tokens[longer - match_length] == tokens[last - match_length]]
        if not len(longer):
            break
        ends, match_length = longer, match_length + 1
    if not len(ends) or match_length < SHORTEST_MATCH:
        return []
    return [int(token) for token in np.resize(tokens[int(ends[-1]) + 1 :], most)]


# -- Checking what was drafted -------------------------------------------------------------------------------------------
_NOTHING = Proposal()


class Speculation:
    """The decode steps of some sequences with drafted tokens.

    Args:
        tokens: drafted at most, of each sequence and step; how many is chosen by what steps take.
    Attributes:
        pace: chooses it, and counts what was drafted.
    """

    def __init__(
        self, executor: Executor, cache: PagedKVCache, paging: PagedSequences, sampler: BatchSampler, drafter: Drafter,
        tokens: int, experience: Experience,
    ) -> None:  # fmt: skip
        self._executor, self._cache, self._paging = executor, cache, paging
        self._sampler, self._drafter = sampler, drafter
        limits = [most - 1 for most in (cache.most_new_tokens, cache.most_undone) if most is not None]
        self.pace = Pace(max(min([tokens, *limits]), 0), experience)
        self._advance: Advance | None = None
        # Of the last step, as `Pace.took` takes it.
        self._seconds, self._wanted, self._reading, self._read = 0.0, 0, 0.0, 0
        self._drafts: list[tuple[int, int]] = []
        # Tokens that came since the draft was asked last; None: all of the texts, of a draft that read no prompt.
        self._missed: int | None = 0 if experience.hopeful else None

    def next(
        self, rows: Sequence[int], sequences: Sequence[int], texts: Mapping[int, Sequence[int]], room: Mapping[int, int]
    ) -> list[list[int]]:
        """One step: the tokens that come next, at least one of each sequence. `keep` must follow.

        Args:
            rows: numbers that the sampler knows some sequences by.
            texts: by row, what they are so far; the last token is not stored yet.
            room: by row, tokens beyond the next one that may still come.
        """
        began = time.perf_counter()
        if self._missed is None:
            self._missed = sum(map(len, texts.values()))
        self._wanted, self._read, self._reading = self.pace.tokens(1 + max(room.values()), self._missed), 0, 0.0
        proposals: dict[int, Proposal] = {}
        if self._wanted:
            if self._missed:
                self._drafter.catch_up(texts)
                self._read, self._reading = self._missed, time.perf_counter() - began
            proposals = self._drafter.propose(texts, {row: min(self._wanted, room[row]) for row in rows})
        row_proposals = [proposals.get(row, _NOTHING) for row in rows]
        new = [[texts[row][-1], *drafts.token_ids] for row, drafts in zip(rows, row_proposals, strict=True)]
        came = self._verify_drafts(rows, sequences, new, row_proposals)
        self._drafts = [(len(drafts.token_ids), len(new) - 1) for drafts, new in zip(row_proposals, came, strict=True)]
        # In the middle of drafting, the few tokens that came are part of it.
        self._missed = 0 if self._wanted else self._missed + sum(map(len, came))
        self._seconds = time.perf_counter() - began - self._reading
        return came

    def _verify_drafts(
        self, rows: Sequence[int], sequences: Sequence[int], new: Sequence[Sequence[int]], proposals: Sequence[Proposal]
    ) -> list[list[int]]:
        counts = list(map(len, new))
        token_ids = upload(torch.tensor([token for one in new for token in one]), self._cache.device)
        if len(token_ids) == len(rows):  # a token that was chosen is never taken back
            batch = self._paging.batch(sequences, counts).to(self._cache.device)
            logits = verify(self._executor, token_ids, batch, self._cache)
            return [[token] for token in self._sampler.next(logits, rows).tolist()]
        self._advance = Advance(self._cache, self._paging, sequences, counts)
        logits = verify(self._executor, token_ids, self._advance.batch, self._cache)
        return self._accept_all(torch.split(logits, counts), rows, proposals)

    def keep(self, counts: Sequence[int]) -> None:
        """Say of the last step how many of the tokens that it stored stay, of each sequence.

        Args:
            counts: the one before those that came, and all of these that were taken but the last.
        """
        began = time.perf_counter()
        if self._advance is not None:
            self._advance.keep(counts)
            self._advance = None
        if self._drafts:
            self._seconds += time.perf_counter() - began
            self.pace.took(self._seconds, self._wanted, self._drafts, self._reading, self._read)

    def _accept_all(self, logits: Sequence[Tensor], rows: Sequence[int], proposals: Sequence[Proposal]) -> list[list[int]]:
        if not self._sampler.is_pure_greedy:
            return [accept_tokens(self._sampler, *inputs) for inputs in zip(logits, rows, proposals, strict=True)]
        # Nothing depends on what is taken: one wait for the device is enough.
        best = iter(self._sampler.best(torch.cat(list(logits))).tolist())
        judgements = []
        for proposal in proposals:
            best_ids = [next(best) for _ in range(len(proposal.token_ids) + 1)]
            num_accepted = next(
                (i for i, token in enumerate(proposal.token_ids) if token != best_ids[i]), len(proposal.token_ids)
            )
            judgements.append(best_ids[: num_accepted + 1])
        return judgements


def accept_tokens(sampler: BatchSampler, logits: Tensor, row: int, proposal: Proposal) -> list[int]:
    """The drafted tokens that the model takes, and one of its own after them.

    Args:
        logits: [n + 1, vocab] fp32, before each drafted token and after the last.
    """
    came: list[int] = []
    for index, token in enumerate(proposal.token_ids):
        before = logits[index : index + 1]
        if proposal.probabilities is None:
            # A draw that hits a certain token takes it with p; one that misses is distributed as p without it.
            choice = int(sampler.next(before, [row]))
        else:
            choice = _accepted_or_other(sampler, before, row, token, proposal.probabilities[index])
        came.append(choice)
        if choice != token:
            return came
    return [*came, int(sampler.next(logits[-1:], [row]))]


def _accepted_or_other(sampler: BatchSampler, logits: Tensor, row: int, token: int, q: Tensor) -> int:
    p = sampler.probabilities(logits, [row])[0]
    if sampler.uniform(row) * float(q[token]) < float(p[token]):
        sampler.say(row, token)
        return token
    rest = (p - q.to(p.device)).clamp(min=0)
    # Where p and q are equal, only rounding can lead here.
    return sampler.draw(rest if bool(rest.any()) else p, row)
