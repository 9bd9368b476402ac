"""Drafts: tokens that are guessed cheaply, and then checked by the model all at once.

A `Draft` belongs to a session; for each `generate` it begins a `Drafter`. What a drafter proposes changes how fast text comes,
never which text may come: `engine.speculation` keeps what the model itself would have said.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from haarkv.engine.sampling import Sampling
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache

MOST_TOKENS = 32
"""Drafted tokens a step at most: with the one before them they fit into any cache's chunk."""
LONGEST_MATCH, SHORTEST_MATCH = 8, 2
"""Tokens at the end of a text that `ngram` looks for: so many are enough to choose, and fewer say too little."""


@dataclass(frozen=True)
class Proposal:
    """What a drafter thinks comes next.

    Attributes:
        token_ids: n drafted tokens, none if it has no idea.
        probabilities: [n, vocab] fp64, the distributions that they were drawn from, each after those before it; None if they
            are certain, as at temperature 0.
    """

    token_ids: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class Beginning:
    """What a drafter begins with: the prompts are stored, and no token has been chosen.

    Attributes:
        prompts: token ids.
        max_context: tokens of prompt and text that are stored of each at most.
        vocab_size: the model's, so many logits a drafter's distributions have.
        sampling: how the model's tokens are drawn, and drafted tokens as well.
        cache, paging, sequences: where the model keeps them.
    """

    prompts: Sequence[Sequence[int]]
    max_context: int
    vocab_size: int
    sampling: Sampling
    cache: PagedKVCache
    paging: PagedSequences
    sequences: Sequence[int]


class Drafter(Protocol):
    """Drafts for the sequences of one `generate`."""

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        """Draft what follows each of some sequences.

        Args:
            texts: by the sequence's number, prompt and all that was chosen; it begins as it did the last time.
            most: so many tokens of each, 0 or more.
        """


class Draft(Protocol):
    """A way to draft.

    Attributes:
        name: as `--draft` takes it.
        shared_bytes: of the model's weights that the draft does not hold a second time.
    """

    @property
    def name(self) -> str: ...

    @property
    def shared_bytes(self) -> int: ...

    def begin(self, beginning: Beginning) -> Drafter: ...

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        """Bytes of the KV cache that a drafter of so many sequences keeps beside the model's."""


@dataclass
class DraftCost:
    """What drafting did in one `generate`.

    Attributes:
        proposed, accepted: drafted tokens, and those of them that the model took.
        checks: checks of a sequence's drafted tokens.
        steps: decode steps of a sequence, with drafted tokens or without.
        plain: seconds a token of steps in which nothing was drafted.
    """

    proposed: int = 0
    accepted: int = 0
    checks: int = 0
    steps: int = 0
    plain: list[float] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the model took; None if there were none."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def plain_s(self) -> float | None:
        """Median seconds a token without drafts; None if no step went without."""
        return statistics.median(self.plain) if self.plain else None


# -- The text itself ---------------------------------------------------------------------------------------------------------


class Ngram:
    """What followed the last time that the text ended as it does now: prompt lookup. It costs next to nothing."""

    name = "ngram"
    shared_bytes = 0

    def begin(self, beginning: Beginning) -> Drafter:
        return _Lookup(beginning)

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        return 0


class _Lookup:
    def __init__(self, beginning: Beginning) -> None:
        # Room for the texts to grow, so that a step adds its few tokens and copies none.
        room = beginning.max_context + 1
        self._tokens = [np.zeros(max(room, len(prompt)), dtype=np.int64) for prompt in beginning.prompts]
        self._lengths = [0] * len(beginning.prompts)

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, Proposal]:
        return {row: Proposal(self._found(row, text, most[row])) for row, text in texts.items()}

    def _found(self, row: int, text: Sequence[int], most: int) -> list[int]:
        known, length, tokens = self._lengths[row], len(text), self._tokens[row]
        tokens[known:length] = text[known:]
        self._lengths[row] = length
        return looked_up(tokens[:length], most)


def looked_up(tokens: NDArray[np.int64], most: int) -> list[int]:
    """What followed the longest end of a text that stood in it before, where it stood last; nothing if that is too short.

    Where what followed is the end itself, it goes on from its own beginning: a text that repeats itself keeps doing so.

    Args:
        tokens: [n] int64.
        most: tokens of the answer, at most.
    """
    last = len(tokens) - 1
    if last < 1 or most < 1:
        return []
    found, matched = np.flatnonzero(tokens[:last] == tokens[last]), 1
    while len(found) and matched < LONGEST_MATCH:
        longer = found[found >= matched]
        longer = longer[tokens[longer - matched] == tokens[last - matched]]
        if not len(longer):
            break
        found, matched = longer, matched + 1
    if not len(found) or matched < SHORTEST_MATCH:
        return []
    begin = int(found[-1]) + 1
    following = tokens[begin:]
    return [int(token) for token in np.resize(following, most)]


def require_draft_tokens(tokens: int) -> None:
    """Refuse a number of drafted tokens that no step can check.

    Raises:
        InputError: naming the range.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise InputError(f"draft tokens must lie in 1 … {MOST_TOKENS}, not {tokens}")
