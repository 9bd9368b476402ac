"""A layer on trial, teacher-forced: fed the reference's input and cache, op by op where it has ops, and as a whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.honest_runs import HonestRuns, Known
from haarkv.validation.layers.judge import (
    guilty_head,
    hidden_figures,
    in_whole,
    judge_strays,
    stored_figures,
    verdicts,
)
from haarkv.validation.layers.null import (
    Figure,
    Null,
    Sums,
    collected,
)
from haarkv.validation.layers.parts import Stored, take
from haarkv.validation.layers.record import Call, replay
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Measured, Verdict, first
from haarkv.validation.layers.states import STATE, compare_states, state_of
from haarkv.validation.layers.trial import WITHIN_ROUNDING, Outcome, Repeats, Run, Strays, Trial

_FEW = 8
"""New tokens of a sequence up to which a layer runs again over another state."""


@dataclass(frozen=True)
class Judged:
    """What was found of one layer.

    Attributes:
        verdicts: of its ops, then of the whole.
        share: how many times what honest runs allow its worst figure is.
        expected: hidden states [T, hidden] that the candidate's are held against: what the reference makes of the K and V
            that the candidate stored.
        run: the candidate's.
    """

    verdicts: list[Verdict]
    share: float
    expected: Tensor
    run: Run


class Forced:
    """Runs and judges layers one by one.

    Args:
        trial: the candidate.
        ops: its op table; None if its layers are programs.
        repeats: runs of each layer beside the first, to be held against it.
        known: what honest runs of the same forwards gave before; is added to.
    Attributes:
        over_others: layers that ran over another state than their own as well, and gave what follows from it.
    """

    def __init__(
        self, reference: Reference, trial: Trial, ops: OpTable | None, repeats: int = 0, known: Known | None = None
    ) -> None:
        self.reference, self.trial, self.ops = reference, trial, ops
        self.honest = HonestRuns(reference, known)
        self.rounds = reference.model.dtype != torch.float32
        self.repeats = Repeats(repeats)
        self.over_others = 0
        self.nulls: dict[str, dict[int, Null]] = {drive: defaultdict(Null) for drive in ("ops", "layers")}

    def layer(self, made: MadeLayer, bad: Stored) -> Judged:
        """Run and judge one layer.

        Args:
            bad: what the places of its tokens hold before.
        """
        found = self._ops(made, bad)
        run = self.run(made, bad)
        unstable = self.repeats.of_layer(run, lambda: self.run(made, bad))
        judged = self.judge(made, run, self.null(made))
        ops_fail = any(verdict.fails for verdict in found)
        if self.ops is not None and not ops_fail:
            judged = replace(judged, verdicts=[in_whole(verdict) for verdict in judged.verdicts])
        if unstable is None and any(verdict.fails for verdict in judged.verdicts):
            unstable = self.repeats.confirmed(run, lambda: self.run(made, bad))
        if unstable is not None:
            wrong = next((v.stage for v in judged.verdicts if v.fails), None)
            detail = unstable.detail if wrong else f"{unstable.detail}, {WITHIN_ROUNDING}"
            return replace(judged, verdicts=[*found, replace(unstable, stage=wrong or unstable.stage, detail=detail)])
        if made.kv is None and not ops_fail:
            judged = replace(judged, verdicts=[*judged.verdicts, *self._over_another(made, judged)])
        return replace(judged, verdicts=[*found, *judged.verdicts])

    def run(self, made: MadeLayer, bad: Stored) -> Run:
        """One run of a layer, from the reference's input and cache."""
        self.trial.load(made.index, made.before)
        return self.trial.run(made.hidden_in, made.index, bad, made.batch)

    def judge(self, made: MadeLayer, run: Run, null: Null, room: float = 1.0) -> Judged:
        """What a run of a layer got right.

        Args:
            room: how many times what the null allows is no fault.
        """
        cache, batch, result = self.reference.cache, made.batch, run.outcome.result
        broken = judge_strays(run.strays, made.index) + _broken_state(cache, made, run.stored)
        if run.outcome.problem:
            broken.insert(0, Verdict.broken("call", run.outcome.problem))
        reach = {part: room * lengths for part, lengths in null.reach.items()}
        stored = collected(stored_figures(cache, made.index, batch, made.stored, run.stored, made.kv, reach))
        expected = made.hidden_out
        differing = _differing(made.stored, run.stored, stored)
        if differing and made.kv is not None and self.reference.records:
            # Ties are not the candidate's fault; what follows is held against the reference over what the candidate stored.
            expected = self.reference.given(made, run.stored)
        differing += [] if torch.equal(expected, result) else ["attention_mlp"]
        slips = self.honest.slips(made) if room == 1.0 else {}
        sums = {**stored, **collected(hidden_figures(made.hidden_in, expected, result, slips))}
        excesses = {figure: excess / room for figure, excess in null.excesses(sums, self.rounds).items()}
        found = verdicts(excesses, differing)
        found = [
            replace(v, head=guilty_head(expected, result, slips))
            if v.fails and v.stage == "attention_mlp" else v
            for v in found
        ]  # fmt: skip
        if room == 1.0 and not broken and not any(verdict.fails for verdict in found):
            null.add(sums)
        return Judged([*broken, *found], max(excesses.values(), default=0.0), expected, run)

    def totals(self) -> tuple[list[Verdict], list[Measured]]:
        """What shows over all forwards together, and every figure of that."""
        found: list[Verdict] = []
        measured = []
        for drive, nulls in self.nulls.items():
            for layer, null in sorted(nulls.items()):
                excesses = null.total_excesses(self.rounds)
                judged = verdicts(excesses, [f.stage for f in excesses], together=True)
                found += [replace(verdict, layer=layer) for verdict in judged if verdict.fails]
                measured += [
                    Measured(drive, layer, figure.stage, figure.head, figure.kind, excess)
                    for figure, excess in excesses.items()
                ]
        return found, measured

    # -- Whole layers ----------------------------------------------------------------------------------------------------
    def null(self, made: MadeLayer) -> Null:
        """What sixteen honest runs of a layer give."""
        null = self.nulls["layers"][made.index]
        null.runs, null.reach = self.honest.of_layer(made)
        return null

    def _over_another(self, made: MadeLayer, judged: Judged) -> list[Verdict]:
        """The layer again over other states of as many tokens: one that keeps a state elsewhere finds the old one.

        Forwards of a few tokens are run so; the verdict says whether the state that a layer reads changes what it gives.
        """
        few = int(made.batch.query_start_loc.diff().max()) <= _FEW
        if not few or not self.reference.records or any(verdict.fails for verdict in judged.verdicts):
            return []
        other = self.reference.over_another_state(made)
        if other is None:
            return []
        null = self.nulls["layers"][made.index]
        # Where all is forgotten at once, the state that is read does not matter.
        apart = collected(hidden_figures(made.hidden_in, made.hidden_out, other.hidden_out, {}))
        matters = max(null.excesses(apart, self.rounds).values()) > 1
        again = self.judge(other, self.run(other, {STATE: {}}), null, bounds.FREE)
        wrong = first(again.verdicts)
        if wrong is None or not wrong.fails:
            self.over_others += matters
            return []
        detail = (
            f"over another state of as many tokens, as when a prefix is reused, it goes on from the old one: {wrong.detail}"
        )
        return [replace(wrong, stage="state_read", detail=detail)]

    # -- Ops -------------------------------------------------------------------------------------------------------------
    def _ops(self, made: MadeLayer, bad: Stored) -> list[Verdict]:
        """Every recorded op, run by the candidate's table on the reference's own inputs."""
        if self.ops is None:
            return []
        null = self.nulls["ops"][made.index]
        steeper, null.runs = self.honest.of_ops(made)
        broken: list[Verdict] = []
        figures: list[tuple[Figure, Tensor]] = []
        differing: list[str] = []
        for place, call in enumerate(made.calls):
            run = self._op_run(call, made, bad)
            if wrong := self._broken(call, made, run):
                broken += wrong
                continue
            of_op = list(self.honest.figures(call, made, run.outcome.result, run.stored, steeper.get(place, {})))
            figures += of_op
            same = run.outcome.result is None or torch.equal(call.result, run.outcome.result)
            differing += [] if same else [call.stage]
            if run.stored:
                seen = collected(pair for pair in of_op if pair[0].stage != call.stage)
                differing += _differing(made.stored, run.stored, seen)
        sums = collected(figures)
        found = verdicts(null.excesses(sums, self.rounds), differing)
        found = [self._confirmed(verdict, made, bad) if verdict.fails else verdict for verdict in found]
        if not broken and not any(verdict.fails for verdict in found):
            null.add(sums)
        return [*broken, *found]

    def _confirmed(self, verdict: Verdict, made: MadeLayer, bad: Stored) -> Verdict:
        """A fault of an op, or that the op differs from itself."""
        calls = [call for call in made.calls if verdict.stage in (call.stage, *_STAGES.get(call.op, ()))]
        if not calls:
            return verdict
        unstable = self.repeats.confirmed(self._op_run(calls[0], made, bad), lambda: self._op_run(calls[0], made, bad))
        return replace(unstable, stage=verdict.stage) if unstable is not None else verdict

    def _op_run(self, call: Call, made: MadeLayer, bad: Stored) -> Run:
        assert self.ops is not None
        trial, batch, index = self.trial, made.batch, made.index
        writes = call.op in ("store_kv", "gated_delta")
        if writes:
            trial.load(index, made.before)
            trial.put(index, batch, bad)
        elif call.op == "paged_attention":
            trial.load(index, self.honest.readable(call, made))
        result, intact = replay(call, self.ops, trial.executor.device, trial.cache, self.reference.recorder)
        strays: Strays = {}
        stored: Stored = {}
        if writes:
            strays, stored = trial.strays(range(index, index + 1), batch), take(trial.cache, index, batch)
        elif call.op == "paged_attention" and trial.strays(range(0), batch):
            intact = False
        return Run(Outcome(result, "" if intact else "changed"), strays, stored)

    def _broken(self, call: Call, made: MadeLayer, run: Run) -> list[Verdict]:
        """What is wrong with an op's run whatever the numbers are."""
        if run.outcome.problem:
            return [Verdict.broken(call.stage, "changed the inputs that it was given")]
        ours: Any = call.result
        result: Any = run.outcome.result
        if isinstance(result, str) or (ours is None) != (result is None):
            return [Verdict.broken(call.stage, f"returned {result!r}")]
        if isinstance(ours, Tensor) and (
            not isinstance(result, Tensor) or result.shape != ours.shape or result.dtype != ours.dtype
        ):
            got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else repr(result)
            return [Verdict.broken(call.stage, f"returned {got}, not {list(ours.shape)} {ours.dtype}")]
        strays = judge_strays(run.strays, made.index)
        return strays + (_broken_state(self.reference.cache, made, run.stored) if call.op == "gated_delta" else [])


_STAGES = {
    "store_kv": ("store_kv.k", "store_kv.v", "window.k", "window.v", "sink.k", "sink.v"),
    "gated_delta": ("conv_state", "delta_state"),
}
"""Stages that show what an op stored."""


def _differing(ours: Stored, theirs: Stored, figures: Sums) -> list[str]:
    """Stages of what was stored that show another bit. A state may hold versions that no forward reads: its figures tell."""
    if STATE in ours:
        return [figure.stage for figure, sums in figures.items() if figure.kind == "energy" and sums[0] != 0]
    same = all(torch.equal(ours[part][name], theirs[part][name]) for part in ours for name in ours[part])
    return [] if same else [figure.stage for figure in figures]


def _broken_state(cache: PagedKVCache, made: MadeLayer, stored: Stored) -> list[Verdict]:
    """States that are missing, or of other tokens."""
    if (state := state_of(cache, made.index)) is None:
        return []
    found = compare_states(state, made.batch, made.stored[STATE], stored[STATE])
    return [Verdict.broken(one.stage, one.problem) for one in found if one.problem]
