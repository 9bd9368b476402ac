"""The result of `Session.generate`: texts and cost; and a stream of one text."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from reprlib import Repr
from typing import Any

from haarkv.engine.drafts import DraftSource, Pace
from haarkv.engine.generation import Completion, OnPrefill, Timing
from haarkv.engine.ranks import RankMemory
from haarkv.engine.sampling import Sampling
from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import count_noun
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.stored import StoredSequence

_REPR = Repr()
_REPR.maxstring = 60
"""Characters of a text in a line that shows a result."""


@dataclass(frozen=True)
class KVUsage:
    """Cost of a run's KV cache, all ranks together.

    Attributes:
        format: the plan in words; a plain one as `--kv` takes it.
        bytes_per_token: of one more packed token: K and V of all layers and heads, scales included.
        bf16_bytes: bytes of the same slots in bf16.
    """

    format: str
    bytes_per_token: float
    bytes: int
    bf16_bytes: int


@dataclass(frozen=True)
class DraftReport:
    """Acceptance and gain of a draft.

    Attributes:
        most: drafted tokens a step at most.
        tokens_per_step: new tokens a decode step and sequence, the model's own included.
        plain_ms_per_token: median over steps without drafts; None if every step had drafts.
        same_text: whether text equals that without drafts. Else sums change with the batch, and near ties may flip.
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
    kv_bytes: int
    pace: str = ""

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def speed_up(self) -> float | None:
        """Plain ms a token over ms a token with drafts."""
        plain, ours = self.plain_ms_per_token, self.ms_per_token
        return plain / ours if plain and ours else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance": self.acceptance, "speed_up": self.speed_up}

    def describe(self) -> str:
        parts = [f"{self.name}: nothing drafted", self.pace]
        if self.acceptance is not None:
            steps = "" if self.tokens_per_step is None else f", {self.tokens_per_step:.2f} tokens a step"
            share = f"{self.accepted:,} of {self.proposed:,} accepted ({self.acceptance:.0%})"
            parts[0] = f"{self.name}, up to {self.most}: {share}{steps}"
            if self.speed_up is not None:
                without = f"{self.plain_ms_per_token:.2f} in steps without a draft ({self.speed_up:.2f}x)"
                parts.append(f"{self.ms_per_token:.2f} ms a token, {without}")
        if not self.same_text:
            parts.append(f"sums on {self.executor} change with the batch: where two tokens nearly tie, either may come")
        if self.kv_bytes:
            parts.append(f"{self.kv_bytes:,} bytes of KV cache of its own")
        return "; ".join(part for part in parts if part)


def draft_report(
    source: DraftSource, most: int, timing: Timing, executor: Executor, plan: KVPlan, sequences: int, max_context: int
) -> DraftReport:
    """A draft's report for one batch; `most` drafted tokens a step."""
    pace, tokens = timing.drafts or Pace(most, source.experience), timing.decode_tokens
    return DraftReport(
        name=source.name, most=most, proposed=pace.proposed, accepted=pace.accepted,
        tokens_per_step=tokens / pace.steps if pace.steps else None,
        ms_per_token=1e3 * timing.decode_s / tokens if tokens else None,
        plain_ms_per_token=1e3 * statistics.median(pace.plain) if pace.plain else None,
        executor=executor.name, same_text=executor.batch_invariant(plan),
        kv_bytes=source.cache_bytes(sequences, max_context),
        pace=pace.describe() if pace.steps else "",
    )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Result:
    """Texts and cost of one `Session.generate`.

    Attributes:
        ranks: memory of each rank, on rank 0; empty elsewhere.
        stored: sequences as stored, with `keep`.
    """

    texts: list[str]
    completions: list[Completion]
    timing: Timing
    kv: KVUsage
    sampling: Sampling
    ranks: tuple[RankMemory, ...] = ()
    stored: tuple[StoredSequence, ...] = ()
    drafting: DraftReport | None = None

    def __repr__(self) -> str:
        texts = ", ".join(map(_REPR.repr, self.texts[:2])) + ", …" * (len(self.texts) > 2)
        tokens = count_noun(sum(len(done.token_ids) for done in self.completions), "new token")
        return f"Result([{texts}], {tokens}, {self.kv.format}: {self.kv.bytes:,} bytes of KV cache)"


# -- Text as it comes ----------------------------------------------------------------------------------------------------
class Stream(Iterator[str]):
    """The pieces of one text, as they become certain.

    The model runs ahead in a thread. Leaving the loop, or `close`, stops it within a token, or a chunk of the prompt.

    Attributes:
        result: text and cost once the stream has ended or was closed; None before, and if closed during the prompt.
    """

    def __init__(self, generate: Callable[..., Result], on_prefill: OnPrefill | None = None) -> None:
        self._results: list[Result] = []  # of the generator's own: one that knew this object would outlive the loop
        self._pieces = _pieces(generate, on_prefill, self._results)

    @property
    def result(self) -> Result | None:
        return self._results[0] if self._results else None

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the model; `result` has what it has written."""
        self._pieces.close()


class _LeftError(Exception): ...


def _pieces(
    generate: Callable[..., Result], on_prefill: OnPrefill | None, results: list[Result]
) -> Generator[str, None, None]:  # fmt: skip
    came: SimpleQueue[Any] = SimpleQueue()
    left = threading.Event()

    def report_prefill(done: int, total: int) -> None:
        if left.is_set():
            raise _LeftError
        if on_prefill:
            on_prefill(done, total)

    def work() -> None:
        try:
            came.put(
                generate(on_prefill=report_prefill, on_token=lambda *_: left.is_set(), on_text=lambda _, text: came.put(text))
            )
        except BaseException as error:  # raised again where the pieces are taken
            came.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while isinstance(piece := came.get(), str):
            yield piece
        if isinstance(piece, BaseException):
            raise piece
        results.append(piece)
    finally:
        left.set()
        thread.join()
        while not came.empty():
            if isinstance(piece := came.get(), Result):
                results.append(piece)
