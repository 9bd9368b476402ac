"""The largest error of each tensor that was compared: a stage's result in a layer, over all forwards."""

from __future__ import annotations

from haarkv.validation.layers.forward import Forward
from haarkv.validation.layers.judge import Verdict
from haarkv.validation.layers.record import STAGES
from haarkv.validation.layers.report import StageSummary, worst_of

_ORDER = {stage: place for place, stage in enumerate(STAGES)}
_MLP = _ORDER["silu_mul"]
"""Where a stage belongs that only some families have, such as a router."""


class Summaries:
    """Keeps the worst of each tensor."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, int | None], StageSummary] = {}

    def add(self, verdict: Verdict, forward: Forward, layer: int | None) -> None:
        """Take note of what was found at one stage."""
        where = forward.phase, forward.step, layer
        summary = StageSummary(verdict.stage, verdict.error, verdict.bound, *where, verdict.reason)
        key = verdict.stage, layer
        self._tensors[key] = worst_of(self._tensors[key], summary) if key in self._tensors else summary

    def tensors(self) -> tuple[StageSummary, ...]:
        """By layer, each in the order of a forward; last those of no layer."""
        return tuple(sorted(self._tensors.values(), key=lambda of: (of.layer is None, of.layer or 0, _place(of))))

    def stages(self) -> tuple[StageSummary, ...]:
        """The worst layer of each stage, in the order of a forward."""
        worst: dict[str, StageSummary] = {}
        for of in self._tensors.values():
            worst[of.stage] = worst_of(worst[of.stage], of) if of.stage in worst else of
        return tuple(sorted(worst.values(), key=_place))


def _place(summary: StageSummary) -> int:
    return _ORDER.get(summary.stage, _MLP)
