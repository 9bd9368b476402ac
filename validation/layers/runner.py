"""`validate`: compare an executor with a reference over prefill and decode, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.weights import Weights
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.threads import sleeping_threads
from haarkv.tq_ops.weight import backing_tensor
from haarkv.validation.layers.candidate import CandidateRunner, Run
from haarkv.validation.layers.exercise import Exercise
from haarkv.validation.layers.forced import TeacherForced
from haarkv.validation.layers.forward import Forward, LayerRecord, Schedule
from haarkv.validation.layers.free import FreeRunning
from haarkv.validation.layers.honest_runs import HonestCache
from haarkv.validation.layers.judge import compare_vectors, level_matches
from haarkv.validation.layers.parts import Snapshot, load, poison
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import (
    LayerRow,
    LogitRow,
    Mode,
    Report,
    Verdict,
    first,
    worst,
)  # fmt: skip

OnRow = Callable[[LayerRow], None]


@torch.inference_mode()
@sleeping_threads()
def validate(
    reference: Executor,
    candidate: Executor,
    model: DecoderModel,
    prompts: Sequence[Sequence[int]],
    steps: int,
    plan: KVPlan,
    on_row: OnRow | None = None,
    modes: Sequence[Mode] = ("teacher-forced", "free-running"),
    repeats: int = 0,
    honest_cache: HonestCache | None = None,
) -> Report:
    """Compare two executors of one model over the prefill of some prompts and greedy decode steps.

    Both get the reference's tokens. Teacher-forced, each layer and op gets the reference's input and cache. Free-running, a
    layer gets the executor's own output of the layer before. A verdict "fault" or "unstable" fails the validation.

    Args:
        prompts: token ids, prefilled as one ragged batch.
        steps: decode steps. With one or more, a check of drafted tokens and a decode step after taking some back follow.
        modes: one or both. The head and the whole forward belong to free-running.
        repeats: additional teacher-forced runs of each layer; they must give the same bits. Layers with a fault always rerun.
        honest_cache: honest runs from another validation of the same reference, prompts and plan; new runs are added.
    Raises:
        InputError: an executor cannot run this, or the validation would prove nothing.
    """
    schedule = Schedule(prompts, steps, plan)
    return Validation(reference, candidate, model, schedule, modes, on_row, repeats, honest_cache).run()


def count_rows(prompts: Sequence[Sequence[int]], steps: int, plan: KVPlan) -> int:
    """Number of rows of a report in both modes: one for each forward, layer and mode."""
    return 2 * len(plan.layers) * len(Schedule(prompts, steps, plan))


class Validation:
    """A validation of two executors; arguments as of `validate`."""

    def __init__(
        self, reference: Executor, candidate: Executor, model: DecoderModel, schedule: Schedule, modes: Sequence[Mode],
        on_row: OnRow | None = None, repeats: int = 0, honest_cache: HonestCache | None = None,
    ) -> None:  # fmt: skip
        _check((reference, candidate), model, schedule)
        self.modes, self.on_row = frozenset(modes), on_row or (lambda _: None)
        self.exercise = Exercise(schedule, "free-running" in modes, candidate.decode_step)
        self.schedule, self.names, self.model = schedule, (reference.name, candidate.name), model
        cache = schedule.new_cache(model)
        self.reference = Reference(reference, model, cache, candidate.blocks)
        self.forced = TeacherForced(self.reference, CandidateRunner(candidate, cache), repeats, honest_cache)
        nulls = self.forced.nulls["layers"] if "teacher-forced" in modes else {}
        self.free = FreeRunning(self.reference, candidate, self.forced.repeats, nulls)
        self.rows: list[LayerRow] = []
        self.logits: list[LogitRow] = []
        self.verdicts: list[Verdict] = []
        # `findings` come first in the report: they are of forwards whose input was the reference's, or of the head and the
        # whole forward, so they name the faulty layer. `late`: free-running faults.
        self.findings: list[Verdict] = []
        self.late: list[Verdict] = []

    def run(self) -> Report:
        weights = _fingerprint(self.model.weights)
        self.schedule.run(self.schedule.paging(), self._forward)
        if _fingerprint(self.model.weights) != weights:
            weight_change = Verdict.violation("weights", "the model's weights were changed while it ran")
            self.findings.append(replace(weight_change, phase=self.rows[-1].phase, step=self.rows[-1].step))
        return self._report(len(self.modes) * len(self.schedule.plan.layers) * len(self.schedule))

    def layer(self, index: int, hidden: Tensor, before: Snapshot, forward: Forward) -> Report:
        """The report on one layer, teacher-forced."""
        load(self.reference.cache, index, before)
        record = self.reference.layer(index, hidden, forward)
        self._teacher_forced(record, poison(self.reference.cache, index, record.kv, forward.batch))
        return self._report(1)

    def _report(self, expected: int) -> Report:
        over_all, measurements = self.forced.totals()
        if self.rows:
            last = self.rows[-1]
            self.findings += [replace(verdict, phase=last.phase, step=last.step) for verdict in over_all]
        coverage = self.exercise.result(self.forced.over_others)
        divergence = first((*self.findings, *self.late))
        without_fault = divergence is None or not divergence.fails
        return Report(
            *self.names, self.schedule.plan.describe(), str(self.model.dtype).removeprefix("torch."),
            tuple(map(len, self.schedule.prompts)), self.schedule.steps,
            passed=without_fault and len(self.rows) == expected > 0 and all(row.passed for row in self.rows),
            first_divergence=divergence,
            rows=tuple(self.rows), logits=tuple(self.logits),
            tensors=worst(self.verdicts),
            tests=tuple(measurements), blocks=self.reference.blocks,
            exercised=tuple(what for what, done in coverage.items() if done),
            not_exercised=tuple(what for what, done in coverage.items() if not done),
        )  # fmt: skip

    def _forward(self, forward: Forward) -> Tensor:
        """Run and compare one forward of both executors; return the reference's logits [N, vocab]."""
        hidden = self.model.embed(forward.token_ids)
        self.reference.require_something("embedding", hidden, forward)
        self.free.begin(hidden)
        for index in range(self.model.config.num_layers):
            record = self.reference.layer(index, hidden, forward)
            self.exercise.saw(record)
            bad = poison(self.reference.cache, index, record.kv, forward.batch)
            if "teacher-forced" in self.modes:
                self._teacher_forced(record, bad)
            if "free-running" in self.modes:
                self._free_running(record, bad)
            hidden = record.hidden_out
        logits, calls = self.reference.head_logits(hidden, forward)
        if "free-running" in self.modes:
            verdicts, layer, row = self.free.forward(logits, calls, forward)
            self._settle(verdicts, layer, forward)
            self.logits.append(row)
        return logits

    def _teacher_forced(self, record: LayerRecord, bad: Snapshot) -> None:
        judgment = self.forced.layer(record, bad)
        without_fault = self._settle(judgment.verdicts, record.index, record.forward)
        self._row(record, "teacher-forced", judgment.run, judgment.expected, judgment.share, without_fault)

    def _free_running(self, record: LayerRecord, bad: Snapshot) -> None:
        run, wrong, share = self.free.layer(record.index, bad, record.forward)
        self._row(record, "free-running", run, record.hidden_out, share, wrong is None)
        if wrong is not None:
            late = self.late if wrong.reason == "fault" else self.findings
            late.append(record.forward.with_place(wrong, record.index))

    # -- Notes ---------------------------------------------------------------------------------------------------------
    def _settle(self, verdicts: Sequence[Verdict], index: int | None, forward: Forward) -> bool:
        """Record verdicts; return whether none of them fails."""
        placed_verdicts = [forward.with_place(verdict, index) for verdict in verdicts]
        self.verdicts += placed_verdicts
        first_finding = first(placed_verdicts)
        if first_finding:
            self.findings.append(first_finding)
        return first_finding is None or not first_finding.fails

    def _row(self, record: LayerRecord, mode: Mode, run: Run, expected: Tensor, share: float, without_fault: bool) -> None:
        match = level_matches(self.reference.cache, record.index, record.batch, record.new_fields, run.new_fields)
        hidden = compare_vectors(expected, run.outcome.result)
        place = record.forward.phase, record.forward.step, record.index
        row = LayerRow(*place, mode, match.get("k"), match.get("v"), share, *hidden, without_fault)
        self.rows.append(row)
        self.on_row(row)


def require_own_formats(plan: KVPlan) -> None:
    """Refuse formats of other projects: executors run them by the reference's ops, or not at all."""
    for kv_format in plan.formats:
        if kv_format.to_compare:
            raise InputError(
                f"{kv_format.name} is here to compare with: the reference's own ops run it, so there is nothing to validate; "
                "tq eval measures it"
            )


def _check(executors: Sequence[Executor], model: DecoderModel, schedule: Schedule) -> None:
    """Refuse a validation that cannot run, or that would prove nothing."""
    prompts, steps, plan = schedule.prompts, schedule.steps, schedule.plan
    for executor in executors:
        if executor.config != model.config:
            raise InputError(f"executor {executor.name} was made for another model")
        if reason := executor.supports(model.config, plan):
            raise InputError(f"executor {executor.name} cannot run this: {reason}")
    require_own_formats(plan)
    if steps < 0:
        raise InputError(f"steps must be 0 or more, not {steps}")
    if not prompts or not all(prompts):
        raise InputError("every prompt must have at least one token, and there must be one")
    longest, limit = max(map(len, prompts)) + Schedule.more(steps), model.config.max_position_embeddings
    if longest > limit:
        drafts = ", with the tokens drafted after them" if steps else ""
        raise InputError(
            f"prompt and steps{drafts} take {longest} tokens, this model's context has {limit}; shorten the prompt or lower "
            "the steps"
        )
    if longest < 2:
        raise InputError("with a context of one token K cannot matter; give a longer prompt or at least one step")


def _fingerprint(weights: Weights) -> list[int]:
    """A sum over the bits of each weight, to notice an executor that writes to weights: the reference shares them."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    tensors = (backing_tensor(weight) for _, weight in weights.named_tensors())
    return [int(tensor.view(words[tensor.itemsize]).sum(dtype=torch.int64)) for tensor in tensors]
