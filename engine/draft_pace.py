"""How many tokens to draft a step: what was measured says how many pay, and a ledger how much may be lost to find out.

The ledger holds the time that drafts won and lost beside plain steps of the same run. A step may draft only if its loss,
should none of its tokens be taken, leaves the ledger above -2 % of the time of all steps so far, and of the next few that were
asked for, as they would be without drafts. So text whose drafts never pay takes at most 2 % longer, as far as steps that were
measured tell; the prompt's time is not counted.

Within that, the number is the one that should give most tokens a second, by how often drafts were taken and what steps took.
Where none pays, one token is tried again after longer and longer gaps; a trial that is taken is followed by another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SHARE = 0.02
"""Of a run's time that drafts may lose."""
AHEAD = 64
"""Steps to come that count as time, so that trials need not wait: a text that ends before them may lose their share more."""
PLAIN = 2
"""Plain steps before the first draft of a run, or of a batch that has become smaller."""
AGAIN = 64
"""Steps after which a plain one is measured again, and after which one more draft is tried where drafts pay."""
GAPS = 8, 128
"""Steps between trials where drafts do not pay: after the first that fails, and at most."""
_HISTORY = 7
"""Times that count, the newest."""
_FORGET = 1 / 24
"""What an older draft counts less than the next one."""
_GUESS = 0.5
"""Plain steps that a draft costs, before one was measured."""
_MOST_SLOWDOWN = 2
"""Times that a step may take what is expected of it; what it took beyond that, something else took."""


@dataclass
class Experience:
    """What was measured of one draft in all runs of its session.

    Attributes:
        tries, hits: by place among a step's drafts, how many were checked and taken; older ones count less.
        costs: by number of drafts, what a step took, in plain steps of its run; the newest.
        reading: the least seconds a token that the draft had missed and had to read; 0 before any was.
        gap, since: steps from one trial to the next, and steps since the last, where drafts do not pay.
    """

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    costs: dict[int, deque[float]] = field(default_factory=dict)
    reading: float = 0.0
    gap: int = 0
    since: int = 0
    _best: dict[int, int] = field(default_factory=dict)

    def best(self, most: int) -> int:
        """The number up to `most` that gives most tokens a second; 0 where none gives more than that."""
        if most not in self._best:  # steps without drafts change nothing, and must not cost anything
            self._best[most] = max(range(most + 1), key=lambda count: (self.tokens(count) / self.cost(count), -count))
        return self._best[most]

    @property
    def hopeful(self) -> bool:
        """Whether it pays, or nothing is known yet."""
        return not self.tries or self.best(len(self.tries)) > 0

    def tokens(self, count: int) -> float:
        """Tokens of a sequence expected of a step with `count` drafts."""
        total, reach, share = 1.0, 1.0, 0.5
        for place in range(count):
            # Where little was tried, a draft is taken to be as good as the one before it.
            tries, hits = (values[place] if place < len(values) else 0.0 for values in (self.tries, self.hits))
            share = (hits + share) / (tries + 1)
            reach *= share
            total += reach
        return total

    def cost(self, count: int) -> float:
        """What a step with `count` drafts takes, in plain steps: where it was tried, else by the nearest two."""
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
        """Note how long it took to read what was missed; a few tokens take longer each, and are not counted as such."""
        self.reading = min(seconds / tokens, self.reading or seconds)

    def add(self, cost: float, drafts: Sequence[tuple[int, int]], most: int) -> None:
        """Note a step: what it took in plain steps, and of each sequence how many tokens were drafted and taken."""
        self._best.clear()
        self.costs.setdefault(max(num_proposed for num_proposed, _ in drafts), deque(maxlen=_HISTORY)).append(cost)
        for num_proposed, num_accepted in drafts:
            # A sequence for which nothing was drafted is one whose first draft failed.
            for place in range(min(max(num_proposed, 1), num_accepted + 1, most)):
                self._saw(place, hit=place < num_accepted)

    def _saw(self, place: int, *, hit: bool) -> None:
        while len(self.tries) <= place:
            self.tries.append(0.0)
            self.hits.append(0.0)
        self.tries[place] = self.tries[place] * (1 - _FORGET) + 1
        self.hits[place] = self.hits[place] * (1 - _FORGET) + hit


def _lower_quartile(times: Sequence[float]) -> float:
    """Their lower quartile: where other processes interrupt steps, most of them may be slow."""
    return sorted(times)[len(times) // 4]


class Pace:
    """Chooses the number of drafted tokens of each step of one run.

    Args:
        most: tokens a step at most, at least 1.
    Attributes:
        ledger: seconds that drafts won so far, negative where they lost.
        spent: seconds of all steps.
        proposed, accepted: drafted tokens, and those of them that the model took.
        steps: of a sequence, with drafted tokens or without.
        plain: seconds a token of steps in which nothing was drafted.
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
        """To be drafted in the next step at most.

        Args:
            coming: tokens of a sequence that are still asked for.
            backlog: tokens that the draft reads before it drafts.
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
        left = self.ledger + SHARE * without
        left -= backlog * experience.reading
        # As many as lose no more seconds than are left, should none be taken.
        while count and (experience.cost(count) - 1) * plain > left:
            count -= 1
        return count

    def took(
        self, seconds: float, max_drafts: int, drafts: Sequence[tuple[int, int]], reading: float = 0.0, backlog: int = 0
    ) -> None:
        """Note a step.

        Args:
            drafts: of each sequence, tokens that were drafted and that were taken.
            reading: seconds that it took before to read the `backlog` tokens.
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
