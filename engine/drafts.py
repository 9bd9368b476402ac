"""Drafts: tokens that are guessed cheaply, and then checked by the model all at once.

A session has a `DraftSource`, which begins a `Drafter` for each `generate`. What a drafter proposes changes how fast text
comes, never which text may come: `engine.speculation` keeps what the model itself would have said. A `DraftReport` says
whether it paid.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from haarkv.engine.draft_pace import Experience, Pace
from haarkv.engine.sampling import Sampling
from haarkv.executors.base import Executor
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan

if TYPE_CHECKING:
    from haarkv.engine.generation import Timing

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
        prompts: token ids.
        max_context: tokens of prompt and text that are stored of each at most.
        vocab_size: the model's; a drafter's distributions have as many numbers.
        sampling: how the model's tokens are drawn, and drafted tokens as well.
        cache, paging, sequences: where the model keeps them.
        follower: of the draft's `follow`.
        unused_ids: rows of the vocabulary that stand for no token.
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
        """Draft what follows each of some sequences.

        Args:
            most: tokens of each at most, 0 or more.
        """


class DraftSource(Protocol):
    """A way to draft, for as long as its session lives.

    Attributes:
        name: as `--draft` takes it.
        shared_bytes: of the model's weights that it does not hold a second time.
        experience: whether it paid so far.
    """

    @property
    def name(self) -> str: ...

    @property
    def experience(self) -> Experience: ...

    def follow(self, sequences: int, max_context: int) -> Follower | None:
        """What looks on from the prompts on, if anything must."""

    @property
    def shared_bytes(self) -> int: ...

    def begin(self, beginning: Beginning) -> Drafter: ...

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        """Bytes of the KV cache that a drafter of so many sequences keeps beside the model's."""


# -- The text itself ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NgramSource:
    """What followed the last time that the text ended as it does now: prompt lookup. It costs next to nothing."""

    name: str = "ngram"
    shared_bytes: int = 0
    experience: Experience = field(default_factory=Experience, compare=False, repr=False)

    def follow(self, sequences: int, max_context: int) -> None:
        return None

    def begin(self, beginning: Beginning) -> Drafter:
        return _NgramDrafter(beginning)

    def cache_bytes(self, sequences: int, max_context: int) -> int:
        return 0


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

    Args:
        tokens: [n].
        most: tokens of the answer, at most.
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


# -- Whether it paid ---------------------------------------------------------------------------------------------------------


@dataclass
class DraftCounts:
    """What drafting did so far in one `generate`.

    Attributes:
        pace: what chose how many tokens a step; None before the first step.
        proposed, accepted: drafted tokens, and those of them that the model took.
        steps: decode steps of a sequence, with drafted tokens or without.
        plain: seconds a token of steps in which nothing was drafted.
    """

    pace: Pace | None = None
    proposed: int = 0
    accepted: int = 0
    steps: int = 0
    plain: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DraftReport:
    """Acceptance and gain of a draft, as the cost line has them.

    Attributes:
        name: of the draft.
        most: tokens that it might draft a step.
        proposed, accepted: drafted tokens, and those that the model took.
        tokens_per_step: new tokens a decode step and sequence, the model's own among them.
        ms_per_token: of all decode steps, with drafting.
        plain_ms_per_token: median of the steps in which the draft had nothing to say; None if no step was plain.
        same_text: greedy text is that without drafts, token for token. Else the executor's sums change with the batch, and
            where two tokens nearly tie, either may come.
        shared_bytes: of the model's weights, which the draft does not hold a second time.
        kv_bytes: of the draft's own cache.
        pace: how many tokens a step measured gain chose, in words.
    """

    name: str
    most: int
    proposed: int
    accepted: int
    tokens_per_step: float | None
    ms_per_token: float | None
    plain_ms_per_token: float | None
    executor: str
    same_text: bool
    shared_bytes: int
    kv_bytes: int
    pace: str = ""

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the model took; None if none was drafted."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def speed_up(self) -> float | None:
        """How many times as fast decode steps give tokens as those without drafts; None if none was without."""
        plain, ours = self.plain_ms_per_token, self.ms_per_token
        return plain / ours if plain and ours else None

    def as_json(self) -> dict[str, Any]:
        """By name, for `--json`."""
        return {**asdict(self), "acceptance": self.acceptance, "speed_up": self.speed_up}

    def describe(self) -> str:
        """In one line."""
        parts = [self._taken(), self.pace, self._gain()]
        if not self.same_text:
            parts.append(f"sums on {self.executor} change with the batch: where two tokens nearly tie, either may come")
        if self.shared_bytes:
            parts.append(f"{self.shared_bytes / 2**20:,.1f} MiB of weights shared with the model")
        if self.kv_bytes:
            parts.append(f"{self.kv_bytes:,} bytes of KV cache of its own")
        return "; ".join(part for part in parts if part)

    def _taken(self) -> str:
        if self.acceptance is None:
            return f"{self.name}: nothing drafted"
        steps = "" if self.tokens_per_step is None else f", {self.tokens_per_step:.2f} tokens a step"
        share = f"{self.accepted:,} of {self.proposed:,} accepted ({self.acceptance:.0%})"
        return f"{self.name}, up to {self.most}: {share}{steps}"

    def _gain(self) -> str:
        if self.speed_up is None or self.acceptance is None:
            return ""
        without = f"{self.plain_ms_per_token:.2f} in steps without a draft ({self.speed_up:.2f}x)"
        return f"{self.ms_per_token:.2f} ms a token, {without}"


def report_of(
    source: DraftSource, most: int, timing: Timing, executor: Executor, plan: KVPlan, sequences: int, max_context: int
) -> DraftReport:
    """What a draft did for sequences of so many tokens, where it might draft `most` tokens a step."""
    counts, tokens = timing.drafts or DraftCounts(), timing.decode_tokens
    return DraftReport(
        name=source.name, most=most, proposed=counts.proposed, accepted=counts.accepted,
        tokens_per_step=tokens / counts.steps if counts.steps else None,
        ms_per_token=1e3 * timing.decode_s / tokens if tokens else None,
        plain_ms_per_token=1e3 * statistics.median(counts.plain) if counts.plain else None,
        executor=executor.name, same_text=executor.batches_alike and not any(kind.to_compare for kind in plan.formats),
        shared_bytes=source.shared_bytes, kv_bytes=source.cache_bytes(sequences, max_context),
        pace=counts.pace.describe() if counts.pace else "",
    )  # fmt: skip
