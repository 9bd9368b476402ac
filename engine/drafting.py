"""What drafting did in one `generate`, and whether it paid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from haarkv.engine.drafts import Draft
from haarkv.engine.generation import Timing
from haarkv.executors.base import Executor


@dataclass(frozen=True)
class Drafting:
    """Acceptance and gain of a draft, as the cost line has them.

    Attributes:
        name: of the draft.
        most: tokens that it might draft a step.
        proposed, accepted: drafted tokens, and those that the model took.
        tokens_per_step: new tokens a decode step and sequence, the model's own among them.
        ms_per_token: of all decode steps, with drafting.
        plain_ms_per_token: median of the steps in which the draft had nothing to say.
        speed_up: the second by the first; None if no step was plain.
        same_text: greedy text is that without drafts, token for token. Else the executor's sums change with the batch, and
            where two tokens nearly tie, either may come.
        shared_bytes: of the model's weights, which the draft does not hold a second time.
        kv_bytes: of the draft's own cache.
    """

    name: str
    most: int
    proposed: int
    accepted: int
    tokens_per_step: float | None
    ms_per_token: float | None
    plain_ms_per_token: float | None
    speed_up: float | None
    executor: str
    same_text: bool
    shared_bytes: int
    kv_bytes: int

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the model took; None if none was drafted."""
        return self.accepted / self.proposed if self.proposed else None

    def as_json(self) -> dict[str, Any]:
        """By name, for `--json`."""
        return {**asdict(self), "acceptance": self.acceptance}

    def describe(self) -> str:
        """In one line."""
        parts = [self._taken(), self._gain()]
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
        return (
            f"{self.name}, up to {self.most}: {self.accepted:,} of {self.proposed:,} accepted ({self.acceptance:.0%}){steps}"
        )

    def _gain(self) -> str:
        if self.speed_up is None or self.acceptance is None:
            return ""
        without = f"{self.plain_ms_per_token:.2f} in steps without a draft ({self.speed_up:.2f}x)"
        times = f"{self.ms_per_token:.2f} ms a token, {without}"
        return times if self.speed_up >= 1 else f"{times}: does not pay here, leave out --draft"


def drafting_of(draft: Draft, most: int, timing: Timing, executor: Executor, sequences: int, max_context: int) -> Drafting:
    """What a draft did.

    Args:
        most: tokens that it might draft a step.
        sequences, max_context: that it drafted for.
    """
    cost, tokens = timing.drafts, timing.decode_tokens
    plain = cost.plain_s if cost else None
    return Drafting(
        name=draft.name,
        most=most,
        proposed=cost.proposed if cost else 0,
        accepted=cost.accepted if cost else 0,
        tokens_per_step=tokens / cost.steps if cost and cost.steps else None,
        ms_per_token=1e3 * timing.decode_s / tokens if tokens else None,
        plain_ms_per_token=None if plain is None else 1e3 * plain,
        speed_up=timing.speed_up,
        executor=executor.name,
        same_text=executor.batches_alike,
        shared_bytes=draft.shared_bytes,
        kv_bytes=draft.cache_bytes(sequences, max_context),
    )
