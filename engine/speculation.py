"""Decode steps that check several drafted tokens in one forward, and take back what the model does not say.

Greedy, a drafted token stays if it is the one that the model likes best. Sampled, it stays with probability min(1, p / q),
where the model would draw it with p and the draft drew it with q, and the first that does not is replaced by a draw from
max(p - q, 0): what comes is distributed as if the model had drawn each token itself (Leviathan, Kalman and Matias,
arXiv:2211.17192). p and q are the distributions that are drawn from: with penalty, temperature and all filters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from haarkv.engine.draft_pace import Experience, Pace
from haarkv.engine.drafts import DraftCounts, Drafter, Proposal
from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, verify
from haarkv.tq_ops.kv.batch import PagedSequences, uploaded
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.stored import Advance

if TYPE_CHECKING:
    from haarkv.engine.generation import Growing

_NOTHING = Proposal()


@dataclass
class _Step:
    """The last step, as `Pace.took` takes it."""

    wanted: int = 0
    seconds: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    reading: float = 0.0
    behind: int = 0


class Speculation:
    """The decode steps of some sequences with drafted tokens.

    Args:
        cache, paging: where the sequences are.
        drafter: of these sequences.
        tokens: drafted at most, of each sequence and step; how many is chosen by what steps take.
        experience: of the draft.
    Attributes:
        cost: so far.
    """

    def __init__(
        self, executor: Executor, cache: PagedKVCache, paging: PagedSequences, sampler: BatchSampler, drafter: Drafter,
        tokens: int, experience: Experience,
    ) -> None:  # fmt: skip
        self._executor, self._cache, self._paging = executor, cache, paging
        self._sampler, self._drafter = sampler, drafter
        limits = [most - 1 for most in (cache.most_new_tokens, cache.most_undone) if most is not None]
        self._pace = Pace(max(min([tokens, *limits]), 0), experience)
        self._advance: Advance | None = None
        self._step = _Step()
        self.cost = DraftCounts(self._pace)

    def next(self, rows: Sequence[int], sequences: Sequence[int], texts: Sequence[Growing]) -> list[list[int]]:
        """One step: the tokens that come next, at least one of each sequence. `keep` must follow.

        Args:
            rows: numbers that the sampler knows some sequences by.
            sequences: their ids in the cache.
            texts: what they are so far; the last token is not stored yet.
        """
        began = time.perf_counter()
        known = {row: text.token_ids for row, text in zip(rows, texts, strict=True)}
        coming, paused = 1 + max(text.room for text in texts), not self._step.wanted

        def behind() -> int:
            """Tokens to read before drafts; in the middle of drafting, the few that came are part of it."""
            return self._drafter.behind(known) if paused else 0

        step = self._step = _Step(self._pace.tokens(coming, behind))
        proposals: dict[int, Proposal] = {}
        if step.wanted:
            step.behind = behind()
            if step.behind:
                self._drafter.catch_up(known)
                step.reading = time.perf_counter() - began
            most = {row: min(step.wanted, text.room) for row, text in zip(rows, texts, strict=True)}
            proposals = self._drafter.propose(known, most)
        proposed = [proposals.get(row, _NOTHING) for row in rows]
        came = self._checked(rows, sequences, texts, proposed)
        step.drafts = [(len(drafts.token_ids), len(new) - 1) for drafts, new in zip(proposed, came, strict=True)]
        step.seconds = time.perf_counter() - began - step.reading
        return came

    def _checked(
        self, rows: Sequence[int], sequences: Sequence[int], texts: Sequence[Growing], proposed: Sequence[Proposal]
    ) -> list[list[int]]:
        """The model's step over what was drafted."""
        began = time.perf_counter()
        new = [[text.token_ids[-1], *drafts.token_ids] for text, drafts in zip(texts, proposed, strict=True)]
        token_ids = uploaded(torch.tensor([token for one in new for token in one]), self._cache.device)
        self.cost.steps += len(rows)
        if len(token_ids) == len(rows):  # a token that was chosen is never taken back
            batch = self._paging.batch(sequences, [1] * len(rows)).to(self._cache.device)
            logits = verify(self._executor, token_ids, batch, self._cache)
            came = [[token] for token in self._sampler.next(logits, rows).tolist()]
            self.cost.plain.append((time.perf_counter() - began) / len(rows))
            return came
        self._advance = Advance(self._cache, self._paging, sequences, list(map(len, new)))
        logits = verify(self._executor, token_ids, self._advance.batch, self._cache)
        came = self._judged(torch.split(logits, list(map(len, new))), rows, proposed)
        self.cost.proposed += len(token_ids) - len(rows)
        self.cost.accepted += sum(len(one) - 1 for one in came)
        return came

    def keep(self, counts: Sequence[int]) -> None:
        """Say of the last step how many of the tokens that it stored stay, of each sequence.

        Args:
            counts: the one before those that came, and all of these that were taken but the last.
        """
        step, began = self._step, time.perf_counter()
        if self._advance is not None:
            self._advance.keep(counts)
            self._advance = None
        if step.drafts:
            step.seconds += time.perf_counter() - began
            self._pace.took(step.seconds, step.wanted, step.drafts, step.reading, step.behind)

    def _judged(self, logits: Sequence[Tensor], rows: Sequence[int], proposals: Sequence[Proposal]) -> list[list[int]]:
        if not self._sampler.settled:
            return [judged(self._sampler, *given) for given in zip(logits, rows, proposals, strict=True)]
        # Nothing depends on what is taken: one wait for the device is enough.
        best = iter(self._sampler.best(torch.cat(list(logits))).tolist())
        judgements = []
        for proposal in proposals:
            liked = [next(best) for _ in range(len(proposal.token_ids) + 1)]
            taken = next((i for i, token in enumerate(proposal.token_ids) if token != liked[i]), len(proposal.token_ids))
            judgements.append(liked[: taken + 1])
        return judgements


def judged(sampler: BatchSampler, logits: Tensor, row: int, proposal: Proposal) -> list[int]:
    """The drafted tokens that the model takes, and one of its own after them.

    Args:
        sampler: draws the model's tokens.
        logits: [n + 1, vocab] fp32, before each drafted token and after the last.
        row: the sequence's number.
        proposal: n tokens.
    """
    came: list[int] = []
    for index, token in enumerate(proposal.token_ids):
        before = logits[index : index + 1]
        if proposal.probabilities is None:
            # A draw that hits a certain token takes it with p; one that misses is distributed as p without it.
            drawn = int(sampler.next(before, [row]))
        else:
            drawn = _accepted_or_other(sampler, before, row, token, proposal.probabilities[index])
        came.append(drawn)
        if drawn != token:
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
