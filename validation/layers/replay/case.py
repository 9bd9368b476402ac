"""One layer of one forward, cut out of a validation: alone, on any executor, it fails as it failed there."""

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
from haarkv.tq_ops.errors import InputError, count_noun
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.calibration_file import make_calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.layers.candidate import CandidateRunner, Outcome, Run
from haarkv.validation.layers.forced import TeacherForced
from haarkv.validation.layers.forward import Forward, LayerRecord, Schedule
from haarkv.validation.layers.parts import Snapshot, load
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Report, Verdict, first
from haarkv.validation.layers.runner import Validation

Make = Callable[[DecoderModel, KVPlan], Executor]
"""Makes an executor of a model and a plan."""
VOCABULARY = 128
"""Vocabulary of a case's model, which predicts no token."""


@dataclass(frozen=True)
class LayerCase:
    """All that a run of one layer needs.

    Attributes:
        config: the layer is the last one; those before it have its weights and never run.
        kv, tail, sink, basis: its formats, as `formats.parse` takes them, and learned coordinates of its keys.
        hidden: [T, hidden], in the model's dtype.
        before: the layer's cache: blocks and rows of `batch`, after one of each that no sequence owns.
        counts, lengths: new tokens of each sequence; all that are in the cache once these are.
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
        """The layer's number, which chooses the rotation."""
        return self.config.num_layers - 1

    @cached_property
    def plan(self) -> KVPlan:
        """Of as many layers, each in this layer's formats."""
        layers = self.config.num_layers
        calibration = make_calibration((self.basis,) * layers) if self.basis else None
        return KVSpec(self.kv, self.tail, self.sink, calibration=calibration).plan(layers)

    @cached_property
    def model(self) -> DecoderModel:
        """Every layer is this one."""
        embedding = self.hidden.new_zeros(self.config.vocab_size, self.config.hidden_size)
        norm = self.hidden.new_ones(self.config.hidden_size)
        weights = Weights(embedding, (self.weights,) * self.config.num_layers, norm, embedding)
        return DecoderModel.from_weights(self.config, weights)

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule([[0] * length for length in self.lengths], 0, self.plan)

    @cached_property
    def batch(self) -> Batch:
        """Places of the T tokens."""
        paging = self.schedule.paging()
        pairs = zip(self.counts, self.lengths, strict=True)
        if older := [(row, length - count) for row, (count, length) in enumerate(pairs) if length > count]:
            paging.batch(*zip(*older, strict=True))
        return self.schedule.batch(paging, list(range(len(self.counts))), list(self.counts))

    @property
    def forward(self) -> Forward:
        """Of the tokens only their places are known."""
        return Forward(self.phase, self.step, torch.zeros(len(self.hidden), dtype=torch.int64), self.batch)

    def describe(self) -> str:
        """Its size in words."""
        config, width = self.config, self.config.common.mlp.width
        sequences, heads = len(self.lengths), config.heads.num_kv_heads
        return (
            f"layer {self.index}, {count_noun(len(self.hidden), 'token')} of {count_noun(sequences, 'sequence')} "
            f"(context {max(self.lengths)}), {count_noun(heads, 'KV head')} for {config.heads.num_heads}, "
            f"hidden {config.hidden_size}, intermediate {width}"
        )


@torch.inference_mode()
def capture(
    reference: Executor, model: DecoderModel, prompts: Sequence[Sequence[int]], steps: int, plan: KVPlan, finding: Verdict,
    calibration: Calibration | None = None,
) -> LayerCase:  # fmt: skip
    """Run the reference up to the layer and forward of a finding, and cut them out.

    Raises:
        InputError: the finding is in no single layer, or in no forward of these prompts.
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
    """A layer's cache with the blocks and rows of some sequences of `old` moved to where `new` has them; else zeros."""
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
@torch.inference_mode()
def run_reference(case: LayerCase, make: Make) -> tuple[Reference, LayerRecord]:
    """The reference on a case; InputError if it cannot run it, or its values are zero or not finite."""
    reference = Reference(make(case.model, case.plan), case.model, case.schedule.new_cache(case.model))
    load(reference.cache, case.index, case.before)
    return reference, reference.layer(case.index, case.hidden, case.forward)


@torch.inference_mode()
def judge_case(case: LayerCase, reference: Make, candidate: Make) -> Report:
    """Compare two executors on this layer alone."""
    pair = reference(case.model, case.plan), candidate(case.model, case.plan)
    validation = Validation(*pair, case.model, case.schedule, ("teacher-forced",))
    return validation.layer(case.index, case.hidden, case.before, case.forward)


@torch.inference_mode()
def require_expected(case: LayerCase, written: LayerRecord, make: Make) -> None:
    """Refuse a reference whose results here are not those where the case was written."""
    reference, ours = run_reference(case, make)
    teacher = TeacherForced(reference, CandidateRunner(make(case.model, case.plan), reference.cache))
    run = Run(Outcome(written.hidden_out), {}, written.new_fields)
    wrong = first(teacher.judge(ours, run, teacher.null(ours)).verdicts)
    if wrong is not None and wrong.fails:
        raise InputError(
            f"the reference makes another {wrong.stage} here than where the file was written: {wrong.detail}; "
            "install the versions that the file names"
        )


# -- From a validation that failed -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OneRun:
    """One validation, and what it takes to run any of its layers again; `make` builds the reference and the candidate."""

    report: Report
    model: DecoderModel
    prompts: Sequence[Sequence[int]]
    steps: int
    plan: KVPlan
    calibration: Calibration | None
    make: tuple[Make, Make]
