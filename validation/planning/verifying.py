"""A chosen plan on a text that it was not chosen by, beside uniform formats of about its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep, Setup, Workload, evaluate
from haarkv.validation.fidelity.partial import Partial
from haarkv.validation.planning.candidates import bits_per_value, cache_of

SAME_BYTES = 1.05
"""A uniform format of at most so many times the plan's bytes counts as one of the same bytes."""
PLAN = "plan"
"""The plan's own name among the caches of its verification."""


@dataclass(frozen=True)
class Verified:
    """A plan on a text that it was not chosen by.

    Attributes:
        plan: the plan's row.
        rivals: rows of the uniform candidates next to it in size, fewer bytes first.
        nearer: for each rival, in how many windows the plan's mean KL is the lower one.
        tokens, windows: how many of each were scored.
    """

    plan: FidelityRow
    rivals: tuple[FidelityRow, ...]
    nearer: tuple[int, ...]
    tokens: int
    windows: int

    @property
    def beaten_by(self) -> FidelityRow | None:
        """The best uniform candidate of the same bytes or fewer, unless the plan has the lower mean KL."""
        same = [row for row in self.rivals if row.bytes_per_token <= SAME_BYTES * self.plan.bytes_per_token]
        best = min(same, key=lambda row: row.kl_mean, default=None)
        return best if best and best.kl_mean <= self.plan.kl_mean else None


def rivals_of(
    plan: KVPlan, config: ModelConfig, context: int, candidates: Sequence[str], learned: Calibration | None = None
) -> dict[str, KVPlan]:
    """Uniform candidates next to a plan in bytes: the largest that take no more, and the smallest that take no fewer.

    With the plan's tail and sinks as well, if it has any, the largest that take no more: what of the gain is theirs.
    """
    own = bits_per_value(plan, config, context)
    found: dict[str, KVPlan] = {}
    for tail, sink in dict.fromkeys(((None, 0), (plan.recent, plan.sink))):
        beside = KVSpec(tail=tail, sink=sink, calibration=learned)
        uniform = [replace(beside, kv=name).plan(config.num_layers) for name in candidates]
        bits = [bits_per_value(other, config, context) for other in uniform]
        near = {max((b for b in bits if b <= own), default=None)}
        if (tail, sink) == (None, 0):
            near.add(min((b for b in bits if b >= own), default=None))
        found |= {other.describe(): other for b, other in zip(bits, uniform, strict=True) if b in near}
    return dict(sorted(found.items(), key=lambda item: bits_per_value(item[1], config, context)))


def verify(
    setup: Setup, unseen: Workload, plan: KVPlan, rivals: Mapping[str, KVPlan], on_step: OnStep = lambda *_: None
) -> Verified:
    """A plan and its rivals on a text that it was not chosen by.

    Args:
        unseen: the text, in windows of the context.
        rivals: as `rivals_of` names them.
    Raises:
        NonFiniteError: a cache gave a logit that is not finite.
    """
    caches = {name: cache_of(setup.base, other) for name, other in {PLAN: plan, **rivals}.items()}
    partial = Partial()
    own, *others = evaluate(replace(setup, caches=caches), unseen, partial=partial, on_step=on_step)

    def window_means(name: str) -> list[float]:
        found = (partial.scores(name, number, window.length) for number, window in enumerate(unseen.windows))
        return [scores.kl.mean().item() for scores in found if scores]

    means = window_means(PLAN)
    nearer = [sum(a < b for a, b in zip(means, window_means(row.kv), strict=True)) for row in others]
    return Verified(own, tuple(others), tuple(nearer), unseen.scored, len(unseen.windows))
