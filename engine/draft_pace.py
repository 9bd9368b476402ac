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
_KEPT = 7
"""Times that count, the newest."""
_FORGET = 1 / 24
"""What an older draft counts less than the next one."""
_GUESS = 0.5
"""Plain steps that a draft costs, before one was measured."""
_INTERRUPTED = 2
"""Times that a step may take what is expected of it; what it took beyond that, something else took."""


@dataclass
class Experience:
    """What was measured of one draft in all runs of its session.

    Attributes:
        tried, taken: by place among a step's drafts, how many were checked and taken; older ones count less.
        costs: by number of drafts, what a step took, in plain steps of its run; the newest.
        reading: the least seconds a token that the draft had missed and had to read; 0 before any was.
        gap, since: steps from one trial to the next, and steps since the last, where drafts do not pay.
    """

    tried: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
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
        return not self.tried or self.best(len(self.tried)) > 0

    def tokens(self, count: int) -> float:
        """Tokens of a sequence expected of a step with `count` drafts."""
        total, reached, share = 1.0, 1.0, 0.5
        for place in range(count):
            # Where little was tried, a draft is taken to be as good as the one before it.
            tried, taken = (of[place] if place < len(of) else 0.0 for of in (self.tried, self.taken))
            share = (taken + share) / (tried + 1)
            reached *= share
            total += reached
        return total

    def cost(self, count: int) -> float:
        """What a step with `count` drafts takes, in plain steps: where it was tried, else by the nearest two."""
        known = [(0, 1.0)]
        for number, times in sorted(self.costs.items()):
            # What was seen once may have been an interruption.
            most = _INTERRUPTED * (1 + _GUESS * number) if len(times) == 1 else math.inf
            known.append((number, min(_undisturbed(times), most)))
        if len(known) == 1:
            known.append((1, 1 + _GUESS))
        for number, cost in known:
            if number == count:
                return cost
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(known) if a[0] < count < b[0]), tuple(known[-2:]))
        return max(y0 + (y1 - y0) * (count - x0) / (x1 - x0), 0.1)

    def read(self, tokens: int, seconds: float) -> None:
        """Note how long it took to read what was missed; a few tokens take longer each, and are not counted as such."""
        self.reading = min(seconds / tokens, self.reading or seconds)

    def add(self, cost: float, drafts: Sequence[tuple[int, int]], most: int) -> None:
        """Note a step: what it took in plain steps, and of each sequence how many tokens were drafted and taken."""
        self._best.clear()
        self.costs.setdefault(max(proposed for proposed, _ in drafts), deque(maxlen=_KEPT)).append(cost)
        for proposed, taken in drafts:
            # A sequence for which nothing was drafted is one whose first draft failed.
            for place in range(min(max(proposed, 1), taken + 1, most)):
                self._saw(place, taken=place < taken)

    def _saw(self, place: int, *, taken: bool) -> None:
        while len(self.tried) <= place:
            self.tried.append(0.0)
            self.taken.append(0.0)
        self.tried[place] = self.tried[place] * (1 - _FORGET) + 1
        self.taken[place] = self.taken[place] * (1 - _FORGET) + taken


def _undisturbed(times: Sequence[float]) -> float:
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
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._since_plain = self._since_more = 0
        self._sequences = 0
        self._asked = False

    def tokens(self, coming: int, missed: int = 0) -> int:
        """To be drafted in the next step at most.

        Args:
            coming: tokens of a sequence that are still asked for.
            missed: tokens that the draft reads before it drafts.
        """
        if len(self._plain) < PLAIN or self._since_plain >= AGAIN:
            return 0
        known, plain = self._experience, _undisturbed(self._plain)
        wanted = known.best(self._most)
        if wanted == 0:
            wanted = min(int(known.since >= known.gap), self._most)
        elif wanted < self._most and self._since_more >= AGAIN:
            wanted += 1
        if wanted == 0:
            return 0
        without = self.spent + self.ledger + min(coming, AHEAD) * plain  # the run's time without drafts
        left = self.ledger + SHARE * without
        left -= missed * known.reading
        # As many as lose no more seconds than are left, should none be taken.
        while wanted and (known.cost(wanted) - 1) * plain > left:
            wanted -= 1
        return wanted

    def took(
        self, seconds: float, wanted: int, drafts: Sequence[tuple[int, int]], reading: float = 0.0, missed: int = 0
    ) -> None:
        """Note a step.

        Args:
            drafts: of each sequence, tokens that were drafted and that were taken.
            reading: seconds that it took before to read the `missed` tokens.
        """
        known, most = self._experience, max(proposed for proposed, _ in drafts)
        self._asked |= wanted > 0
        self.steps += len(drafts)
        self.proposed += sum(proposed for proposed, _ in drafts)
        self.accepted += sum(taken for _, taken in drafts)
        if len(drafts) != self._sequences:
            self._sequences = len(drafts)
            self._plain.clear()
        known.since += 1
        self._since_plain += 1
        self._since_more += 1
        self.spent += seconds + reading
        if missed and known.reading and self._plain:  # as below, of interruptions
            reading = min(reading, max(_INTERRUPTED * missed * known.reading, _undisturbed(self._plain)))
        self.ledger -= reading
        if missed:
            known.read(missed, reading)
        if most == 0:  # nothing was asked for, or nothing came of it
            self._plain.append(seconds)
            self.plain.append(seconds / len(drafts))
            self._since_plain = 0
            return
        plain = _undisturbed(self._plain) if self._plain else seconds
        # What interrupts a step is not the draft's, and is not counted in plain steps either.
        seconds = min(seconds, _INTERRUPTED * known.cost(most) * plain)
        self.ledger += plain * sum(1 + taken for _, taken in drafts) / len(drafts) - seconds
        paid = known.best(self._most) > 0
        known.add(seconds / plain, drafts, self._most)
        if wanted > known.best(self._most) > 0:
            self._since_more = 0
        known.since = 0
        if known.best(self._most) > 0:
            known.gap = 0
        elif any(taken for _, taken in drafts):
            known.gap //= 2
            known.since = known.gap
        else:
            known.gap = GAPS[0] if paid or not known.gap else min(2 * known.gap, GAPS[1])

    def describe(self) -> str:
        if not self._experience.tried:
            return "" if self._asked else "not tried: so short a text does not pay for a trial"
        best = self._experience.best(self._most)
        chosen = f"{best} a step by measured gain" if best else "turned itself off: does not pay here"
        lost = f", trials took {-self.ledger / (self.spent + self.ledger):.1%} of the time" if self.ledger < 0 else ""
        return chosen + lost
