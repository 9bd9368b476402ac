"""How many tokens to draft a step, by what was measured: tokens that come of a step over the seconds that it takes.

The first steps try the most, none and one. What each number would give follows from two measures: how often a draft is taken
once those before it were, and a step's time by its number of drafts. Between numbers that were tried, time is taken to grow
evenly. Now and then another number is tried again. Where none pays, drafting is tried a few more times and then stops.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

_KEPT = 9
"""Steps of each number whose times count, the newest."""
_AGAIN = 48
"""Steps after which another number is tried."""
_CHANCES = 3
"""Trials that may fail, one after the other, before drafting stops."""


class Pace:
    """Chooses the number of drafted tokens of each step.

    Args:
        most: tokens a step at most, at least 1.
    Attributes:
        stopped: drafting did not pay and is over.
        steps: that were taken.
    """

    def __init__(self, most: int) -> None:
        self._most, self.stopped, self.steps = most, False, 0
        self._seconds: dict[int, deque[float]] = {}
        self._tried, self._taken = [0] * most, [0] * most
        self._trials = deque([most, 0, 1, most, 0, 1] if most > 1 else [1, 0, 1, 0])
        self._failed = 0
        self._since = 0

    def tokens(self) -> int:
        """To be drafted in the next step at most."""
        if self.stopped:
            return 0
        if not self._trials and self._since >= _AGAIN:
            self._since = 0
            best = self.best
            if best == 0:
                self._failed += 1
                if self._failed > _CHANCES:
                    self.stopped = True
                    return 0
                self._trials.append(1)
            else:
                self._failed = 0
                self._trials.extend((0, min(best + 1, self._most)))
        return self._trials[0] if self._trials else self.best

    @property
    def best(self) -> int:
        """The number that gave most tokens a second by what is known; 0 if none gives more than that."""
        return max(range(self._most + 1), key=lambda count: (self._tokens(count) / self._time(count), -count))

    def took(self, seconds: float, wanted: int, drafts: Sequence[tuple[int, int]]) -> None:
        """Note a step.

        Args:
            seconds: that it took, with its drafting.
            wanted: what `tokens` said.
            drafts: of each sequence, tokens that were drafted and that were taken.
        """
        self.steps += 1
        self._since += 1
        if self._trials and self._trials[0] == wanted:
            self._trials.popleft()
        # A step for which nothing could be drafted is one without.
        most = max((proposed for proposed, _ in drafts), default=0)
        self._seconds.setdefault(min(most, self._most), deque(maxlen=_KEPT)).append(seconds)
        for proposed, taken in drafts:
            for place in range(min(proposed, taken + 1, self._most)):
                self._tried[place] += 1
                self._taken[place] += place < taken

    def _tokens(self, count: int) -> float:
        """Tokens expected of a step with this number of drafts."""
        total, reached, share = 1.0, 1.0, 0.5
        for place in range(count):
            # Where little was tried, a draft is taken to be as good as the one before it.
            share = (self._taken[place] + share) / (self._tried[place] + 1)
            reached *= share
            total += reached
        return total

    def _time(self, count: int) -> float:
        """Seconds of a step with this number of drafts: the median where it was tried, else by the nearest two."""
        known = sorted((number, statistics.median(times)) for number, times in self._seconds.items())
        if not known:
            return 1.0
        if len(known) == 1:
            return known[0][1]
        for number, seconds in known:
            if number == count:
                return seconds
        (x0, y0), (x1, y1) = next(((a, b) for a, b in pairwise(known) if a[0] < count < b[0]), (known[0], known[-1]))
        return max(y0 + (y1 - y0) * (count - x0) / (x1 - x0), 1e-9)

    def describe(self) -> str:
        """What was chosen, in words."""
        if self.stopped:
            return f"turned itself off after {self.steps:,} steps: does not pay here"
        if not self._trials and self.best == 0:
            return "drafts nothing at present: does not pay here"
        return f"{self.best} a step by measured gain"
