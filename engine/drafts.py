"""Drafts: tokens that are guessed cheaply, and then checked by the model all at once.

A session has a `DraftSource`, which begins a `Drafter` for each `generate`. What a drafter proposes changes how fast text
comes, never which text may come: `engine.speculation` keeps what the model itself would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from haarkv.engine.draft_pace import Experience
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.base import Executor
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache

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
        cache, paging, sequences: where the model keeps them.
    """

    prompts: Sequence[Sequence[int]]
    max_context: int
    vocab_size: int
    sampling: Sampling
    cache: PagedKVCache
    paging: PagedSequences
    sequences: Sequence[int]
    follower: Follower | None = None
    unused_ids: Sequence[int] = ()


class Follower(Protocol):
    """Looks on as the model reads prompts and tokens, for a draft that goes on from its hidden states."""

    def watching(self, executor: Executor) -> Executor:
        """The same executor, whose forwards are noted."""


class Drafter(Protocol):
    """Drafts for the sequences of one `generate`, in those steps in which it is asked to.

    `texts` are by the sequence's number: prompt and all that was chosen, whose last token the model has not stored. A text
    begins as it did the last time.
    """

    def behind(self, texts: Mapping[int, Sequence[int]]) -> int:
        """Tokens of some sequences that `catch_up` would read."""

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Read what was missed of some sequences, so that `propose` takes as long as in the middle of drafting."""

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        """Draft what follows each of some sequences."""


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
        """A drafter for one `generate`."""
        raise NotImplementedError

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        """Bytes of the KV cache that a drafter of so many sequences keeps beside the model's."""
        return 0


def draft(
    sampler: BatchSampler,
    wanted: Mapping[int, int],
    logits: Tensor,
    further: Callable[[Mapping[int, int], Sequence[int]], Tensor],
    *,
    draws: bool,
) -> dict[int, Proposal]:
    """Draft so many tokens of each of some sequences, all of them one token at a time.

    Args:
        wanted: by the sequence's number, at least 1.
        logits: [n, vocab] of their first drafted tokens, in their order.
        further: of the last token of each sequence that goes on, and of their places among those before, the next logits.
        draws: tokens are drawn, and the distributions are kept; else the most likely ones are taken.
    """
    rows, proposals = list(wanted), {row: Proposal([], [] if draws else None) for row in wanted}
    while True:
        if draws:
            for row, weights in zip(rows, sampler.probabilities(logits, rows), strict=True):
                proposals[row].token_ids.append(sampler.draw(weights, row))
                proposals[row].probabilities.append(weights)  # type: ignore[union-attr]
        else:
            for row, token in zip(rows, sampler.next(logits, rows).tolist(), strict=True):
                proposals[row].token_ids.append(token)
        going = [place for place, row in enumerate(rows) if len(proposals[row].token_ids) < wanted[row]]
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


class _NgramDrafter:
    def __init__(self, beginning: Beginning) -> None:
        # Room for the texts to grow, so that a step adds its few tokens and copies none.
        room = beginning.max_context + 1
        self._tokens = [np.zeros(max(room, len(prompt)), dtype=np.int64) for prompt in beginning.prompts]
        self._lengths = [0] * len(beginning.prompts)

    def behind(self, texts: Mapping[int, Sequence[int]]) -> int:
        return 0

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Nothing: adding tokens costs nothing worth counting."""

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
    ends, matched = np.flatnonzero(tokens[:last] == tokens[last]), 1
    while len(ends) and matched < LONGEST_MATCH:
        longer = ends[ends >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if not len(ends) or matched < SHORTEST_MATCH:
        return []
    return [int(token) for token in np.resize(tokens[int(ends[-1]) + 1 :], most)]
