"""Free-running: each layer is fed what the executor made of the layer before; then the whole forward runs.

How far it drifts has no bound: one tie can move a random model by half its hidden state. But each layer must follow from its
own input, by the reference on the executor's hidden state and cache; and the whole forward must agree with its layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import InputError
from haarkv.validation import bounds
from haarkv.validation.layers.candidate import CandidateRunner, Outcome, Repeats, Run, differing
from haarkv.validation.layers.forced import TeacherForced
from haarkv.validation.layers.forward import Call, Forward, replay
from haarkv.validation.layers.judge import call_violation, compare_vectors, judge_stray_writes, verdicts
from haarkv.validation.layers.null import RUNS, Null, collect_sums, number_figures, repeat_rows, resample_runs, split_runs
from haarkv.validation.layers.parts import Snapshot, cache_parts, load, snapshot, take
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import LogitRow, Verdict, first

_HEAD = 10**6
"""Seed of the head's noise, apart from those of layers."""
_AGAIN = 3
"""Further runs of a forward that does not follow from its layers."""


class FreeRunning:
    """Runs a candidate's layers in a row, and its whole forwards, and judges each by its own input.

    Args:
        nulls: honest runs on the reference's input by layer; without, they run on the candidate's.
    """

    def __init__(self, reference: Reference, candidate: Executor, repeats: Repeats, nulls: Mapping[int, Null]) -> None:
        self._reference, self._ops, self._repeats = reference, candidate.ops, repeats
        self._follower = reference.twin()
        # One cache for layers run one by one, and one into which only whole forwards store.
        self._candidate, self._whole = (CandidateRunner(candidate, reference.cache) for _ in range(2))
        self._forced, self._nulls = TeacherForced(self._follower, self._candidate), nulls
        # Of each layer: its input, the poison in its tokens' places, and what it left.
        self.runs: list[tuple[Tensor, Snapshot, Run]] = []

    def begin(self, hidden: Tensor) -> None:
        self.hidden, self.runs = hidden, []

    def layer(self, index: int, bad: Snapshot, forward: Forward) -> tuple[Run, Verdict | None, float]:
        """Run the next layer; `bad` is poison for the places of its tokens.

        Returns:
            the run; a fault, or that the layer differs from itself; the worst figure as a multiple of what is allowed.
        """
        hidden, before = self.hidden, snapshot(self._candidate.cache, index)
        self._whole.put(index, forward.batch, bad)
        run = self._candidate.run(hidden, index, bad, forward.batch)
        self.runs.append((hidden, bad, run))
        self.hidden = run.outcome.result
        load(self._follower.cache, index, before)
        try:
            expected = self._follower.layer(index, hidden, forward, plant=False)
        except InputError as error:
            detail = f"what the executor makes of its own layers cannot be gone on from: {error}"
            return run, Verdict.violation("free_running", detail), math.inf
        null = self._nulls[index] if index in self._nulls else self._forced.null(expected)
        judgment = self._forced.judge(expected, run, null, bounds.FREE)
        failing = first(judgment.verdicts)
        if failing is None or not failing.fails:
            return run, None, judgment.share

        def again() -> object:
            self._candidate.load(index, before)
            return self._candidate.run(hidden, index, bad, forward.batch)

        unstable = self._repeats.confirm(run, again)
        self._candidate.load(index, before)
        self._candidate.put(index, forward.batch, run.new_fields)
        if unstable is not None:
            return run, Verdict.violation(failing.stage, unstable.detail, "unstable"), judgment.share
        detail = f"fed what the executor made of the layer before, the layer is wrong at {failing.stage}: {failing.detail}"
        return run, Verdict("free_running", "fault", failing.share, detail), judgment.share

    def forward(
        self, logits: Tensor, calls: Sequence[Call], forward: Forward
    ) -> tuple[Sequence[Verdict], int | None, LogitRow]:
        """Run the candidate's whole forward, once its layers have run; `Reference.head_logits` gave the other arguments.

        Returns:
            verdicts; the layer that differs from itself, if one does; logits beside the reference's.
        """
        whole, recorder, model = self._whole, self._reference.recorder, self._reference.model
        replays = [(c, replay(c, self._ops, whole.cache, recorder)) for c in calls if self._ops]
        verdicts = [self._op(call, result, intact, number) for number, (call, (result, intact)) in enumerate(replays)]
        outcome = whole.forward(forward)
        stage = "head" if self._ops is None else "forward"
        verdicts += self._compare_stores(stage, forward)
        last = self.hidden[forward.logit_rows]
        if outcome.problem:
            verdicts.append(Verdict.violation(stage, outcome.problem))
        else:
            honest = model.head(repeat_rows(last, RUNS), self._reference.honest(_HEAD, tokens=len(last)))
            verdicts.append(self._numbers(stage, outcome.result, model.head(last, self._reference.ops), honest))
        index = None
        if any(verdict.fails for verdict in verdicts) and (instability := self._unstable(outcome, forward)):
            index, verdicts = instability[0], [instability[1]]
        comparison = compare_vectors(logits, outcome.result)
        same = int((logits.argmax(-1) == outcome.result.argmax(-1)).sum())
        row = LogitRow(forward.phase, forward.step, *comparison, same, len(logits))
        return verdicts, index, row

    def _op(self, call: Call, result: Any, intact: bool, number: int) -> Verdict:
        if wrong := call_violation(call, result, intact):
            return wrong
        honest = getattr(self._reference.honest(_HEAD + 1 + number), call.op)(*call.args)
        return self._numbers(call.stage, result, call.result, honest)

    def _numbers(self, stage: str, result: Tensor, expected: Tensor, honest: Tensor) -> Verdict:
        null = Null(resample_runs(split_runs(number_figures(stage, repeat_rows(expected, RUNS), honest), RUNS)))
        sums = collect_sums(number_figures(stage, expected, result))
        rounds = self._reference.model.dtype != torch.float32
        return verdicts(null.excesses(sums, rounds), [] if torch.equal(expected, result) else [stage])[0]

    def _unstable(self, outcome: Outcome, forward: Forward) -> tuple[int | None, Verdict] | None:
        """Whether a layer differs from itself, and which; or the whole forward does."""
        for index, (hidden, bad, run) in enumerate(self.runs):
            again = [self._candidate.run(hidden, index, bad, forward.batch) for _ in range(_AGAIN)]
            if (unstable := differing([run, *again])) is not None:
                return index, unstable
        runs = [(outcome, self._stored(forward))]
        for _ in range(_AGAIN):
            for index, (_, bad, _) in enumerate(self.runs):
                self._whole.put(index, forward.batch, bad)
            outcome = self._whole.forward(forward)
            self._whole.stray_writes(range(len(self.runs)), forward.batch)
            runs.append((outcome, self._stored(forward)))
        unstable = differing(runs, "forward")
        return None if unstable is None else (None, unstable)

    def _stored(self, forward: Forward) -> list[Snapshot]:
        """What the whole forward stored, by layer."""
        return [take(self._whole.cache, index, forward.batch) for index in range(len(self.runs))]

    def _compare_stores(self, stage: str, forward: Forward) -> list[Verdict]:
        """What the whole forward stored, against what the same executor's layers stored one by one."""
        layers, batch = range(self._reference.model.config.num_layers), forward.batch
        if stray_writes := self._whole.stray_writes(layers, batch):
            return judge_stray_writes(stray_writes, None, "the whole forward")
        for index in layers:
            ours, theirs = (take(runner.cache, index, batch) for runner in (self._candidate, self._whole))
            for part in cache_parts(self._reference.cache, index):
                problem = part.problem(batch, theirs[part.name])
                pairs = part.decoded(batch, ours[part.name], theirs[part.name])
                wrong = (what for what, _, x, y in pairs if not compare_vectors(x, y).rel_l2 <= bounds.SAME_KV)
                if what := "delta_state" if problem else next(wrong, ""):
                    detail = f"the whole forward stores another {what} in layer {index} than the layer run alone"
                    return [Verdict.violation(stage, f"{detail}: {problem}" if problem else detail)]
        return []
