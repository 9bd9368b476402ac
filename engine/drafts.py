"""Drafts: tokens guessed cheaply and verified by the model in one forward.

`DraftSource.drafter` makes one `Drafter` for each `generate`. Drafts change the speed of decoding, never the distribution of
text: the model draws every token as it would without them, and a drafted token is accepted if it equals the drawn one. So a
seed gives the same text with any drafts and without.

`Pace` chooses the number of drafted tokens. Its ledger holds the time that drafts won or lost against plain steps of the same
run. A step drafts only if its loss, should every token be rejected, leaves the ledger above -2 % of the run's time without
drafts so far and in the next few steps. So text whose drafts never pay takes at most 2 % longer, the prompt not counted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest

import torch
from torch import Tensor

from haarkv.engine.sampling import BatchSampler
from haarkv.executors.base import Executor, verify
from haarkv.tq_ops.kv.batch import PagedSequences, upload
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.stored import Advance

# -- How many tokens to draft ------------------------------------------------------------------------------------------

SHARE = 0.02
"""Share of a run's time that drafts may lose."""
AHEAD = 64
"""Future steps that count as time, so that trials need not wait; a text that ends before them may lose their share more."""
PLAIN = 2
"""Plain steps before the first draft of a run, or of a batch that has become smaller."""
AGAIN = 64
"""Steps after which a plain one is measured again, and one more token is tried where drafts pay."""
GAPS = 8, 128
"""Steps between trials where drafts do not pay: after the first failed trial, and at most."""
_HISTORY = 7
"""Newest times that count."""
_FORGET = 1 / 24
"""Share of its weight that a draft loses with the next one."""
_GUESS = 0.5
"""Cost of a draft in plain steps, before one was measured."""
_MOST_SLOWDOWN = 2
"""Ratio to its expected time above which a step was interrupted by other processes."""


@dataclass
class Experience:
    """Measurements of one draft source over all runs of its session.

    Attributes:
        tries, hits: by position in a step's drafts, tokens verified and accepted, exponentially weighted.
        costs: by number of drafts, the newest step times in plain steps.
        reading: least seconds a token to catch up with text that the draft missed; 0 before any measurement.
        gap, since: steps between trials, and since the last one, where drafts do not pay.
    """

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    costs: dict[int, deque[float]] = field(default_factory=dict)
    reading: float = 0.0
    gap: int = 0
    since: int = 0
    _best: dict[int, int] = field(default_factory=dict)

    def best(self, most: int) -> int:
        """The number up to `most` with most tokens a second; 0 where drafts do not pay."""
        if most not in self._best:  # steps without drafts change nothing, and must not cost anything
            self._best[most] = max(range(most + 1), key=lambda count: (self.tokens(count) / self.cost(count), -count))
        return self._best[most]

    @property
    def hopeful(self) -> bool:
        """Whether drafts pay, or nothing is known yet."""
        return not self.tries or self.best(len(self.tries)) > 0

    def tokens(self, count: int) -> float:
        """Expected tokens of a sequence in a step with `count` drafts."""
        total, reach, share = 1.0, 1.0, 0.5
        for place in range(count):
            # Where little was tried, a draft is taken to be as good as the one before it.
            tries, hits = (values[place] if place < len(values) else 0.0 for values in (self.tries, self.hits))
            share = (hits + share) / (tries + 1)
            reach *= share
            total += reach
        return total

    def cost(self, count: int) -> float:
        """Time of a step with `count` drafts in plain steps, interpolated between the nearest measurements."""
        points = [(0, 1.0)]
        for number, times in sorted(self.costs.items()):
            # What was seen once may have been an interruption.
            most = _MOST_SLOWDOWN * (1 + _GUESS * number) if len(times) == 1 else math.inf
            points.append((number, min(_lower_quartile(times), most)))
        if len(points) == 1:
            points.append((1, 1 + _GUESS))
        for number, cost in points:
            if number == count:
                return cost
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(points) if a[0] < count < b[0]), tuple(points[-2:]))
        return max(y0 + (y1 - y0) * (count - x0) / (x1 - x0), 0.1)

    def read(self, tokens: int, seconds: float) -> None:
        """Note the time to catch up with `tokens`."""
        self.reading = min(seconds / tokens, self.reading or seconds)

    def add(self, cost: float, drafts: Sequence[tuple[int, int]], most: int) -> None:
        """Note a step: its time in plain steps, and (drafted, accepted) tokens of each sequence."""
        self._best.clear()
        self.costs.setdefault(max(num_proposed for num_proposed, _ in drafts), deque(maxlen=_HISTORY)).append(cost)
        for num_proposed, num_accepted in drafts:
            # A sequence for which nothing was drafted is one whose first draft failed.
            for place in range(min(max(num_proposed, 1), num_accepted + 1, most)):
                if place == len(self.tries):
                    self.tries.append(0.0)
                    self.hits.append(0.0)
                self.tries[place] = self.tries[place] * (1 - _FORGET) + 1
                self.hits[place] = self.hits[place] * (1 - _FORGET) + (place < num_accepted)


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


class Pace:
    """Chooses the number of drafted tokens of each step of one run.

    Attributes:
        ledger: seconds that drafts won so far, negative where they lost.
        spent: seconds of all steps.
        proposed, accepted: drafted tokens, and those that the model accepted.
        steps: sequence-steps, with drafted tokens or without.
        plain: seconds a token of steps without drafts.
    """

    def __init__(self, most: int, experience: Experience) -> None:
        self._most, self._experience, self.ledger = most, experience, 0.0
        self.spent = 0.0
        self.proposed = self.accepted = self.steps = 0
        self.plain: list[float] = []
        self._plain: deque[float] = deque(maxlen=_HISTORY)
        self._since_plain = self._since_more = 0
        self._sequences = 0
        self._asked = False

    def tokens(self, coming: int, backlog: int = 0) -> int:
        """Most tokens to draft in the next step.

        Args:
            coming: tokens of a sequence still to generate.
            backlog: tokens that the draft must read first.
        """
        if len(self._plain) < PLAIN or self._since_plain >= AGAIN:
            return 0
        experience, plain = self._experience, _lower_quartile(self._plain)
        count = experience.best(self._most)
        if count == 0:
            count = min(int(experience.since >= experience.gap), self._most)
        elif count < self._most and self._since_more >= AGAIN:
            count += 1
        if count == 0:
            return 0
        without = self.spent + self.ledger + min(coming, AHEAD) * plain  # the run's time without drafts
        left = self.ledger + SHARE * without - backlog * experience.reading
        # As many as lose no more seconds than are left, should none be taken.
        while count and (experience.cost(count) - 1) * plain > left:
            count -= 1
        return count

    def took(
        self, seconds: float, max_drafts: int, drafts: Sequence[tuple[int, int]], reading: float = 0.0, backlog: int = 0
    ) -> None:
        """Note a step.

        Args:
            drafts: (drafted, accepted) tokens of each sequence.
            reading: seconds spent before it on reading the `backlog` tokens.
        """
        experience, most = self._experience, max(num_proposed for num_proposed, _ in drafts)
        self._asked |= max_drafts > 0
        self.steps += len(drafts)
        self.proposed += sum(num_proposed for num_proposed, _ in drafts)
        self.accepted += sum(num_accepted for _, num_accepted in drafts)
        if len(drafts) != self._sequences:
            self._sequences = len(drafts)
            self._plain.clear()
        experience.since += 1
        self._since_plain += 1
        self._since_more += 1
        self.spent += seconds + reading
        if backlog and experience.reading and self._plain:  # as below, of interruptions
            reading = min(reading, max(_MOST_SLOWDOWN * backlog * experience.reading, _lower_quartile(self._plain)))
        self.ledger -= reading
        if backlog:
            experience.read(backlog, reading)
        if most == 0:  # nothing was asked for, or nothing came of it
            self._plain.append(seconds)
            self.plain.append(seconds / len(drafts))
            self._since_plain = 0
            return
        plain = _lower_quartile(self._plain) if self._plain else seconds
        # What interrupts a step is not the draft's, and is not counted in plain steps either.
        seconds = min(seconds, _MOST_SLOWDOWN * experience.cost(most) * plain)
        self.ledger += plain * sum(1 + num_accepted for _, num_accepted in drafts) / len(drafts) - seconds
        was_paying = experience.best(self._most) > 0
        experience.add(seconds / plain, drafts, self._most)
        if max_drafts > experience.best(self._most) > 0:
            self._since_more = 0
        experience.since = 0
        if experience.best(self._most) > 0:
            experience.gap = 0
        elif any(num_accepted for _, num_accepted in drafts):
            experience.gap //= 2
            experience.since = experience.gap
        else:
            experience.gap = GAPS[0] if was_paying or not experience.gap else min(2 * experience.gap, GAPS[1])

    def describe(self) -> str:
        if not self._experience.tries:
            return "" if self._asked else "not tried: so short a text does not pay for a trial"
        best = self._experience.best(self._most)
        verdict = f"{best} a step by measured gain" if best else "turned itself off: does not pay here"
        cost_note = f", trials took {-self.ledger / (self.spent + self.ledger):.1%} of the time" if self.ledger < 0 else ""
        return verdict + cost_note


# -- Sources and drafters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftRun:
    """The batch of one `generate`.

    Attributes:
        vocab_size, sampler: of the target; logits of this width are the sampler's.
        paging, sequences: the target's pages.
    """

    prompts: Sequence[Sequence[int]]
    max_context: int
    vocab_size: int
    sampler: BatchSampler
    paging: PagedSequences
    sequences: Sequence[int]


class Drafter:
    """Drafts for the sequences of one `generate`.

    `texts` maps a sequence's number to prompt and text so far, whose last token the target has not stored. Texts only grow.
    """

    def observe(self, executor: Executor) -> Executor:
        """The target, with its hidden states noted where the drafter continues from them; from the prompt on."""
        return executor

    def begin(self) -> None:
        """Read the prompts, which the target has stored, if that may pay; no token has been chosen yet."""

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read missed tokens ahead of `propose`, outside of its measured time."""

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, list[int]]:
        """Draft up to `most` tokens of each sequence in `texts`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A way to draft, for the life of a session."""

    name: str
    experience: Experience = field(default_factory=Experience, compare=False, repr=False)

    def drafter(self, run: DraftRun) -> Drafter:
        raise NotImplementedError

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        """Bytes of the drafter's own KV cache."""
        return 0


# -- Checking what was drafted -------------------------------------------------------------------------------------------


class Speculation:
    """Decode steps of a batch with drafted tokens; `tokens` a sequence and step at most."""

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
        """One step: at least one new token of each sequence. `keep` must follow.

        Args:
            rows: the sequences' numbers in the sampler.
            texts: by row, prompt and text so far; the last token is not stored yet.
            room: by row, tokens beyond the next one that may still come.
        """
        began = time.perf_counter()
        if self._missed is None:
            self._missed = sum(map(len, texts.values()))
        self._wanted, self._read, self._reading = self.pace.tokens(1 + max(room.values()), self._missed), 0, 0.0
        proposals: dict[int, list[int]] = {}
        if self._wanted:
            if self._missed:
                self._drafter.catch_up(texts)
                self._read, self._reading = self._missed, time.perf_counter() - began
            proposals = self._drafter.propose(texts, {row: min(self._wanted, room[row]) for row in rows})
        row_proposals = [proposals.get(row, []) for row in rows]
        new = [[texts[row][-1], *drafts] for row, drafts in zip(rows, row_proposals, strict=True)]
        came = self._verify_drafts(rows, sequences, new, row_proposals)
        self._drafts = [(len(drafts), len(new) - 1) for drafts, new in zip(row_proposals, came, strict=True)]
        # In the middle of drafting, the few tokens that came are part of it.
        self._missed = 0 if self._wanted else self._missed + sum(map(len, came))
        self._seconds = time.perf_counter() - began - self._reading
        return came

    def _verify_drafts(
        self, rows: Sequence[int], sequences: Sequence[int], new: Sequence[Sequence[int]], proposals: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        counts = list(map(len, new))
        token_ids = upload(torch.tensor([token for one in new for token in one]), self._cache.device)
        if len(token_ids) == len(rows):  # without drafts, nothing is taken back
            batch = self._paging.batch(sequences, counts).to(self._cache.device)
            logits = verify(self._executor, token_ids, batch, self._cache)
            return [[token] for token in self._sampler.next(logits, rows).tolist()]
        self._advance = Advance(self._cache, self._paging, sequences, counts)
        logits = verify(self._executor, token_ids, self._advance.batch, self._cache)
        return self._accept_all(torch.split(logits, counts), rows, proposals)

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[i]` tokens that the last step stored of sequence i, and take the others back."""
        began = time.perf_counter()
        if self._advance is not None:
            self._advance.keep(counts)
            self._advance = None
        if self._drafts:
            self._seconds += time.perf_counter() - began
            self.pace.took(self._seconds, self._wanted, self._drafts, self._reading, self._read)

    def _accept_all(
        self, logits: Sequence[Tensor], rows: Sequence[int], proposals: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The drafted tokens of each sequence that the model chooses too, then one that it chooses itself."""
        if not self._sampler.is_pure_greedy:
            return [
                _accepted((int(self._sampler.next(logits_at, [row])) for logits_at in torch.split(before, 1)), drafts)
                for before, row, drafts in zip(logits, rows, proposals, strict=True)
            ]
        # Nothing depends on what is accepted: one wait for the device is enough.
        best = iter(self._sampler.best(torch.cat(list(logits)), rows).tolist())
        return [_accepted(list(islice(best, len(drafts) + 1)), drafts) for drafts in proposals]


def _accepted(chosen: Iterable[int], drafts: Sequence[int]) -> list[int]:
    """The chosen tokens up to the first that was not drafted."""
    accepted = []
    for token, drafted in zip_longest(chosen, drafts):
        accepted.append(token)
        if token != drafted:
            break
    return accepted
