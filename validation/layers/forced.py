"""Teacher-forced: a layer on the reference's input and cache, op by op where it has ops, and as a whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.validation import bounds
from haarkv.validation.layers.candidate import WITHIN_ROUNDING, CandidateRunner, Outcome, Repeats, Run, StrayWrites
from haarkv.validation.layers.forward import Call, LayerRecord, replay
from haarkv.validation.layers.honest_runs import HonestCache, HonestRuns
from haarkv.validation.layers.judge import (
    call_violation,
    guilty_head,
    hidden_figures,
    judge_stray_writes,
    stored_figures,
    verdicts,
)
from haarkv.validation.layers.null import Figure, Null, Sums, collect_sums
from haarkv.validation.layers.parts import Snapshot, cache_parts, take
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Measurement, Verdict, first
from haarkv.validation.layers.states import STATE

_FEW = 8
"""Up to this number of new tokens a sequence, a layer runs again over another state."""


@dataclass(frozen=True)
class LayerJudgment:
    """The verdicts on one layer: of its ops, then of the whole.

    Attributes:
        share: worst figure as a multiple of what honest runs allow.
        expected: hidden states [T, hidden] of the reference over the K and V that the candidate stored.
    """

    verdicts: list[Verdict]
    share: float
    expected: Tensor
    run: Run


class TeacherForced:
    """Runs and judges layers one by one.

    Args:
        repeats: further runs of each layer, which must give the same bits.
    Attributes:
        ops: the candidate's op table; None if its layers are programs.
        over_others: layers that also ran right over another state than their own.
    """

    def __init__(
        self,
        reference: Reference,
        candidate: CandidateRunner,
        repeats: int = 0,
        honest_cache: HonestCache | None = None,
    ) -> None:
        self.reference, self.candidate, self.ops = reference, candidate, candidate.executor.ops
        self.honest = HonestRuns(reference, honest_cache)
        self.rounds = reference.model.dtype != torch.float32
        self.repeats = Repeats(repeats)
        self.over_others = 0
        self.nulls: dict[str, dict[int, Null]] = {drive: defaultdict(Null) for drive in ("ops", "layers")}

    def layer(self, record: LayerRecord, bad: Snapshot) -> LayerJudgment:
        """Run and judge one layer; `bad` is poison for the places of its tokens."""
        op_verdicts = self.op_verdicts(record, bad)
        run = self.run(record, bad)
        unstable = self.repeats.layer_deviation(run, lambda: self.run(record, bad))
        judgment = self.judge(record, run, self.null(record))
        ops_fail = any(verdict.fails for verdict in op_verdicts)
        if self.ops is not None and not ops_fail:
            in_whole = "; each op by itself is right, so the fault is in how the layer runs them"
            for place, verdict in enumerate(judgment.verdicts):
                if verdict.reason == "fault":
                    judgment.verdicts[place] = replace(verdict, detail=verdict.detail + in_whole)
        if unstable is None and any(verdict.fails for verdict in judgment.verdicts):
            unstable = self.repeats.confirm(run, lambda: self.run(record, bad))
        if unstable is not None:
            wrong = next((v.stage for v in judgment.verdicts if v.fails), None)
            detail = unstable.detail if wrong else f"{unstable.detail}, {WITHIN_ROUNDING}"
            return replace(judgment, verdicts=[*op_verdicts, replace(unstable, stage=wrong or unstable.stage, detail=detail)])
        if record.kv is None and not ops_fail:
            judgment = replace(judgment, verdicts=[*judgment.verdicts, *self._over_another(record, judgment)])
        return replace(judgment, verdicts=[*op_verdicts, *judgment.verdicts])

    def run(self, record: LayerRecord, bad: Snapshot) -> Run:
        """Run a layer on the reference's input and cache."""
        self.candidate.load(record.index, record.before)
        return self.candidate.run(record.hidden_in, record.index, bad, record.batch)

    def judge(self, record: LayerRecord, run: Run, null: Null, room: float = 1.0) -> LayerJudgment:
        """Judge a run of a layer; the null's limits are `room` times as wide."""
        cache, batch, result = self.reference.cache, record.batch, run.outcome.result
        violations = self._stored_violations(record, run)
        if run.outcome.problem:
            violations.insert(0, Verdict.violation("call", run.outcome.problem))
        reach = {part: room * lengths for part, lengths in null.reach.items()}
        store_sums = collect_sums(
            stored_figures(cache, record.index, batch, record.new_fields, run.new_fields, record.kv, reach)
        )
        expected = record.hidden_out
        differing = _differing(store_sums)
        if differing and record.kv is not None:
            # Ties are not the candidate's fault; what follows is held against the reference over what the candidate stored.
            expected = self.reference.rerun_layer(self.reference.as_read(record, run.new_fields), record)
        differing += [] if torch.equal(expected, result) else ["attention_mlp"]
        slips = self.honest.slips(record) if room == 1.0 else {}
        sums = {**store_sums, **collect_sums(hidden_figures(record.hidden_in, expected, result, slips))}
        excesses = {figure: excess / room for figure, excess in null.excesses(sums, self.rounds).items()}
        layer_verdicts = verdicts(excesses, differing)
        layer_verdicts = [
            replace(v, head=guilty_head(expected, result, slips))
            if v.fails and v.stage == "attention_mlp" else v
            for v in layer_verdicts
        ]  # fmt: skip
        if room == 1.0 and not violations and not any(verdict.fails for verdict in layer_verdicts):
            null.add(sums)
        return LayerJudgment([*violations, *layer_verdicts], max(excesses.values(), default=0.0), expected, run)

    def totals(self) -> tuple[list[Verdict], list[Measurement]]:
        """Faults that show over all forwards together, and every figure of that."""
        faults: list[Verdict] = []
        measurements = []
        for drive, nulls in self.nulls.items():
            for layer, null in sorted(nulls.items()):
                excesses = null.total_excesses(self.rounds)
                total_verdicts = verdicts(excesses, [f.stage for f in excesses], together=True)
                faults += [replace(verdict, layer=layer) for verdict in total_verdicts if verdict.fails]
                measurements += [
                    Measurement(drive, layer, figure.stage, figure.head, figure.kind, excess)
                    for figure, excess in excesses.items()
                ]
        return faults, measurements

    # -- Whole layers ----------------------------------------------------------------------------------------------------
    def null(self, record: LayerRecord) -> Null:
        """Sixteen honest runs of a layer."""
        null = self.nulls["layers"][record.index]
        null.runs, null.reach = self.honest.layer_sums(record)
        return null

    def _over_another(self, record: LayerRecord, judgment: LayerJudgment) -> list[Verdict]:
        """The layer again over another state of as many tokens: an executor that keeps a state elsewhere goes on from the old
        one.
        """
        few = int(record.batch.query_start_loc.diff().max()) <= _FEW
        if not few or any(verdict.fails for verdict in judgment.verdicts):
            return []
        other = self.reference.over_another_state(record)
        if other is None:
            return []
        null = self.nulls["layers"][record.index]
        # Where all is forgotten at once, the state that is read does not matter.
        state_sums = collect_sums(hidden_figures(record.hidden_in, record.hidden_out, other.hidden_out, {}))
        matters = max(null.excesses(state_sums, self.rounds).values()) > 1
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
    def op_verdicts(self, record: LayerRecord, bad: Snapshot) -> list[Verdict]:
        """Every recorded op, run by the candidate's table on the reference's inputs."""
        if self.ops is None:
            return []
        null = self.nulls["ops"][record.index]
        null.runs = self.honest.op_sums(record)
        violations: list[Verdict] = []
        figures: list[tuple[Figure, Tensor]] = []
        differing: list[str] = []
        for call in record.calls:
            run = self._op_run(call, record, bad)
            if wrong := self._contract_violations(call, record, run):
                violations += wrong
                continue
            op_figures = list(self.honest.figures(call, record, run.outcome.result, run.new_fields))
            figures += op_figures
            same = run.outcome.result is None or torch.equal(call.result, run.outcome.result)
            differing += [] if same else [call.stage]
            differing += _differing(collect_sums(pair for pair in op_figures if pair[0].stage != call.stage))
        sums = collect_sums(figures)
        op_verdicts = verdicts(null.excesses(sums, self.rounds), differing)
        op_verdicts = [self._confirm_fault(verdict, record, bad) if verdict.fails else verdict for verdict in op_verdicts]
        if not violations and not any(verdict.fails for verdict in op_verdicts):
            null.add(sums)
        return [*violations, *op_verdicts]

    def _confirm_fault(self, verdict: Verdict, record: LayerRecord, bad: Snapshot) -> Verdict:
        # What shows in no result of an op shows in what one stored.
        same_stage = (call for call in record.calls if call.stage == verdict.stage)
        call = next(same_stage, None) or next(call for call in record.calls if call.op in _STORING)
        unstable = self.repeats.confirm(self._op_run(call, record, bad), lambda: self._op_run(call, record, bad))
        return replace(unstable, stage=verdict.stage) if unstable is not None else verdict

    def _op_run(self, call: Call, record: LayerRecord, bad: Snapshot) -> Run:
        assert self.ops is not None
        candidate, batch, index = self.candidate, record.batch, record.index
        writes = call.op in _STORING
        if writes:
            candidate.load(index, record.before)
            candidate.put(index, batch, bad)
        elif call.op == "paged_attention":
            candidate.load(index, self.honest.readable(call, record))
        result, intact = replay(call, self.ops, candidate.cache, self.reference.recorder)
        stray_writes: StrayWrites = {}
        part_fields: Snapshot = {}
        if writes:
            stray_writes, part_fields = (
                candidate.stray_writes(range(index, index + 1), batch),
                take(candidate.cache, index, batch),
            )
        elif call.op == "paged_attention" and candidate.stray_writes(range(0), batch):
            intact = False
        return Run(Outcome(result, "" if intact else "changed"), stray_writes, part_fields)

    def _contract_violations(self, call: Call, record: LayerRecord, run: Run) -> list[Verdict]:
        """What is wrong with an op's run whatever the numbers are."""
        if wrong := call_violation(call, run.outcome.result, not run.outcome.problem):
            return [wrong]
        return self._stored_violations(record, run) if call.op in _STORING else []

    def _stored_violations(self, record: LayerRecord, run: Run) -> list[Verdict]:
        """Writes where nothing was to be written, and states that are missing or of other tokens."""
        parts = cache_parts(self.reference.cache, record.index)
        problems = [part.problem(record.batch, run.new_fields[part.name]) for part in parts]
        return [
            *judge_stray_writes(run.stray_writes, record.index),
            *(Verdict.violation("delta_state", problem) for problem in problems if problem),
        ]


_STORING = ("store_kv", "gated_delta")


def _differing(stored: Sums) -> list[str]:
    """Stages of which anything that is read differs, by figures of stored fields."""
    return [figure.stage for figure, sums in stored.items() if figure.kind in ("energy", "changed", "length") and sums[0] != 0]
