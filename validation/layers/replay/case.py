"""One layer of one forward, cut out of a validation: it runs alone, on any executor, and fails as it failed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import Weights
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.calibration_file import make_calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.text import count_noun
from haarkv.validation.layers.candidate import CandidateRunner, Outcome, Run
from haarkv.validation.layers.forced import TeacherForced
from haarkv.validation.layers.forward import Forward, LayerRecord, Schedule
from haarkv.validation.layers.parts import Snapshot, load
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Report, Verdict, first
from haarkv.validation.layers.runner import validate_layer

Make = Callable[[DecoderModel, KVPlan], Executor]
"""Makes an executor of a model and a plan."""
Span = tuple[int, int, int, int]
"""Of a sequence: its row; the first of its new tokens and the first that is left out; how many cached ones are before them."""
VOCABULARY = 128
"""Tokens of a model that is asked for no token."""


@dataclass(frozen=True)
class LayerCase:
    """What a layer is given: it says all that a run needs.

    Attributes:
        config: shapes; the layer is the last one, and those before it have its weights and are never run.
        weights: of the layer.
        kv: its formats, as `formats.parse` takes them.
        tail, sink: tokens in BF16 beside them, as in `KVSpec`.
        basis: learned coordinates of this layer's keys, for formats that need them.
        hidden: [T, hidden], in the model's dtype.
        before: the layer's cache before it runs: blocks and rows of `batch`, after one of each that nobody owns.
        counts, lengths: of each sequence, its new tokens, and all that are in the cache once these are.
        phase, step: of the forward that it was cut out of.
    """

    config: ModelConfig
    weights: LayerWeights
    kv: str
    tail: int | None
    sink: int
    basis: Basis | None
    hidden: Tensor
    before: Snapshot
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    phase: str
    step: int

    @property
    def index(self) -> int:
        """The layer, which chooses the rotation."""
        return self.config.num_layers - 1

    @cached_property
    def plan(self) -> KVPlan:
        """Of a cache of so many layers, each in this layer's formats."""
        layers = self.config.num_layers
        calibration = make_calibration((self.basis,) * layers) if self.basis else None
        return KVSpec(self.kv, self.tail, self.sink, calibration=calibration).plan(layers)

    @cached_property
    def model(self) -> DecoderModel:
        """A model whose every layer is this one."""
        embedding = self.hidden.new_zeros(self.config.vocab_size, self.config.hidden_size)
        norm = self.hidden.new_ones(self.config.hidden_size)
        weights = Weights(embedding, (self.weights,) * self.config.num_layers, norm, embedding)
        return DecoderModel.from_weights(self.config, weights)

    @cached_property
    def schedule(self) -> Schedule:
        """Hands out the blocks of its sequences."""
        return Schedule([[0] * length for length in self.lengths], 0, self.plan)

    @cached_property
    def batch(self) -> Batch:
        """Places of the T tokens."""
        paging = self.schedule.paging()
        if older := [(row, context) for row, _, _, context in self.spans if context]:
            paging.batch(*zip(*older, strict=True))
        return self.schedule.batch(paging, list(range(len(self.counts))), list(self.counts))

    @property
    def spans(self) -> list[Span]:
        """Of its sequences, all of them whole."""
        pairs = zip(self.counts, self.lengths, strict=True)
        return [(row, 0, count, length - count) for row, (count, length) in enumerate(pairs)]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.hidden)

    def describe(self) -> str:
        """Its size in words."""
        config, width = self.config, self.config.common.mlp.width
        sequences, heads = len(self.lengths), config.heads.num_kv_heads
        return (
            f"layer {self.index}, {count_noun(self.tokens, 'token')} of {count_noun(sequences, 'sequence')} "
            f"(context {max(self.lengths)}), {count_noun(heads, 'KV head')} for {config.heads.num_heads}, "
            f"hidden {config.hidden_size}, intermediate {width}"
        )


@torch.inference_mode()
def capture(
    reference: Executor, model: DecoderModel, prompts: Sequence[Sequence[int]], steps: int, plan: KVPlan, finding: Verdict,
    calibration: Calibration | None = None,
) -> LayerCase:  # fmt: skip
    """Run the reference up to the layer and forward of a finding, and cut them out.

    Args:
        prompts, steps, plan: as of the validation.
        finding: names a layer.
        calibration: what the plan's learned formats are of.
    Raises:
        InputError: the finding is of no single layer, or of no forward of these prompts.
    """
    if finding.layer is None:
        raise InputError(f"what was found at {finding.stage} is in no single layer, and a replay file holds one")
    shape = model.config.kv_shapes[finding.layer]
    if shape is None or shape.window is not None:
        raise InputError(f"layer {finding.layer} has a sliding window or no K and V; a replay file holds layers that keep all")
    schedule = Schedule(prompts, steps, plan)
    reference_run = Reference(reference, model, schedule.new_cache(model))
    cases: list[LayerCase] = []

    def run_forward(forward: Forward) -> Tensor | None:
        hidden = model.embed(forward.token_ids)
        for index in range(model.config.num_layers):
            record = reference_run.layer(index, hidden, forward)
            if (forward.phase, forward.step, index) == (finding.phase, finding.step, finding.layer):
                cases.append(_case(model, plan, index, forward, record, calibration))
                return None
            hidden = record.hidden_out
        return model.head(hidden[forward.logit_rows], reference_run.ops)

    schedule.run(schedule.paging(), run_forward)
    if cases:
        return cases[0]
    raise InputError(f"there is no {finding.phase} {finding.step} of layer {finding.layer}")


def _case(
    model: DecoderModel, plan: KVPlan, index: int, forward: Forward, record: LayerRecord, calibration: Calibration | None
) -> LayerCase:
    kv, basis = formats.describe(*plan.layers[index]), None
    if calibration and is_learned(kv):
        basis = calibration.k[index]
    layers = (model.config.layers[index],) * (index + 1)
    config = replace(model.config, layers=layers, vocab_size=VOCABULARY, tied=True)
    counts, lengths = tuple(forward.batch.query_start_loc.diff().tolist()), tuple(forward.batch.seq_lens.tolist())
    places = counts, lengths, forward.phase, forward.step
    case = LayerCase(config, model.weights.layers[index], kv, plan.recent, plan.sink, basis, record.hidden_in, {}, *places)
    return replace(case, before=relocate_fields(record.before, forward.batch, range(len(counts)), case.batch))


def is_learned(kv: str) -> bool:
    """Whether formats, as `formats.parse` takes them, need the coordinates of a calibration."""
    return any(part.split("=")[-1] not in formats.names() for part in kv.split(","))


def relocate_fields(before: Snapshot, old: Batch, rows: Sequence[int], new: Batch) -> Snapshot:
    """A layer's cache in which the blocks and rows of some sequences are where those of another batch are; else zeros.

    Args:
        old, rows: the batch whose places they have, and which of its sequences they are.
        new: has their beginnings, one after the other.
    """
    used_slots = new.block_table >= 0
    blocks = new.block_table[used_slots].long(), old.block_table[list(rows), : used_slots.shape[1]][used_slots].long()
    row_pair = new.rows, old.rows[list(rows)]

    def scatter_rows(tensor: Tensor, to: Tensor, at: Tensor) -> Tensor:
        target = tensor.new_zeros(1 + int(used_slots.sum()), *tensor.shape[1:])
        target[to] = tensor[at]
        return target

    return {
        part: {name: scatter_rows(tensor, *(blocks if part in ("k", "v") else row_pair)) for name, tensor in fields.items()}
        for part, fields in before.items()
    }


# -- Running it --------------------------------------------------------------------------------------------------------
def _reference(case: LayerCase, make: Make) -> tuple[Reference, LayerRecord]:
    """The reference on a case, and what it makes of it."""
    reference = Reference(make(case.model, case.plan), case.model, case.schedule.new_cache(case.model))
    load(reference.cache, case.index, case.before)
    return reference, reference.layer(case.index, case.hidden, case_forward(case))


@torch.inference_mode()
def expected(case: LayerCase, make: Make) -> LayerRecord:
    """What the reference makes of it.

    Raises:
        InputError: the executor cannot run it, or what it makes is zero or not finite.
    """
    return _reference(case, make)[1]


@torch.inference_mode()
def judge_case(case: LayerCase, reference: Make, candidate: Make) -> Report:
    """Hold an executor against the reference on this layer alone.

    Raises:
        InputError: as `validate`.
    """
    pair = reference(case.model, case.plan), candidate(case.model, case.plan)
    return validate_layer(*pair, case.model, case.plan, case.index, case.hidden, case.before, case_forward(case))


@torch.inference_mode()
def require_expected(case: LayerCase, theirs: LayerRecord, make: Make) -> None:
    """Refuse a reference that does not make here what it made where the case was written.

    Args:
        theirs: as it was written.
        make: makes the reference.
    Raises:
        InputError: with what differs, and by how much.
    """
    reference, ours = _reference(case, make)
    teacher = TeacherForced(reference, CandidateRunner(make(case.model, case.plan), reference.cache), None)
    run = Run(Outcome(theirs.hidden_out), {}, theirs.new_fields)
    wrong = first(teacher.judge(ours, run, teacher.null(ours)).verdicts)
    if wrong is not None and wrong.fails:
        raise InputError(
            f"the reference makes another {wrong.stage} here than where the file was written: {wrong.detail}; "
            "install the versions that the file names"
        )


def case_forward(case: LayerCase) -> Forward:
    """Its forward; of the tokens only their places are known."""
    return Forward(case.phase, case.step, torch.zeros(case.tokens, dtype=torch.int64), case.batch)


# -- From a validation that failed -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OneRun:
    """One validation, and what it takes to run any of its layers again.

    Attributes:
        make: the reference and the executor on trial.
    """

    report: Report
    model: DecoderModel
    prompts: Sequence[Sequence[int]]
    steps: int
    plan: KVPlan
    calibration: Calibration | None
    make: tuple[Make, Make]


def failing_case(runs: Sequence[OneRun]) -> tuple[LayerCase, OneRun, Verdict]:
    """The first failure of some runs, cut out, which fails at the same stage for the same reason; its run, and what was found.

    Raises:
        InputError: none failed, or what failed shows in no single layer.
    """
    run = next((run for run in runs if not run.report.passed and run.report.first_divergence), None)
    finding = run.report.first_divergence if run else None
    if run is None or finding is None:
        raise InputError("no layer failed")
    reference, candidate = run.make
    case = capture(reference(run.model, run.plan), run.model, run.prompts, run.steps, run.plan, finding, run.calibration)
    again = judge_case(case, reference, candidate).first_divergence
    if again is None or (again.stage, again.reason) != (finding.stage, finding.reason):
        raise InputError(
            f"what was found at {finding.stage} of layer {finding.layer} does not show when that layer runs alone"
        )
    return case, run, finding
