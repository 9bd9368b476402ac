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
from haarkv.models.weights import LayerWeights, Weights
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.calibration_file import calibration_of
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.layers.compare import compare_vectors
from haarkv.validation.layers.forward import Forward, MadeLayer, Reference, Schedule
from haarkv.validation.layers.judge import bounds_of, compare_both, judge_hidden, judge_stored
from haarkv.validation.layers.parts import Stored, load
from haarkv.validation.layers.report import Report, Verdict
from haarkv.validation.layers.runner import validate_layer

Make = Callable[[DecoderModel, KVPlan], Executor]
"""Makes an executor of a model and a plan."""
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
        bases: K's and V's learned coordinates in this layer, for formats that need them.
        hidden: [T, hidden], in the model's dtype.
        before: the layer's cache before it runs: blocks and rows of `batch`, after one of each that nobody owns.
        batch: places of the T tokens.
        phase, step: of the forward that it was cut out of.
    """

    config: ModelConfig
    weights: LayerWeights
    kv: str
    tail: int | None
    sink: int
    bases: tuple[Basis, Basis] | None
    hidden: Tensor
    before: Stored
    batch: Batch
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
        calibration = calibration_of((self.bases[0],) * layers, (self.bases[1],) * layers) if self.bases else None
        return KVSpec(self.kv, self.tail, self.sink, calibration=calibration).plan(layers)

    @cached_property
    def model(self) -> DecoderModel:
        """A model whose every layer is this one."""
        embedding = self.hidden.new_zeros(self.config.vocab_size, self.config.hidden_size)
        norm = self.hidden.new_ones(self.config.hidden_size)
        weights = Weights(embedding, (self.weights,) * self.config.num_layers, norm, embedding)
        return DecoderModel.of(self.config, weights)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.hidden)

    def describe(self) -> str:
        """Its size in words."""
        config, width = self.config, self.config.common.mlp.width
        sequences, heads = len(self.batch.seq_lens), config.heads.num_kv_heads
        return (
            f"layer {self.index}, {_count(self.tokens, 'token')} of {_count(sequences, 'sequence')} "
            f"(context {int(self.batch.seq_lens.max())}), {_count(heads, 'KV head')} for {config.heads.num_heads}, "
            f"hidden {config.hidden_size}, intermediate {width}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


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
    trusted = Reference(reference, model, schedule.new_cache(model))
    paging = schedule.paging(trusted.cache)
    found: list[LayerCase] = []

    def layers_of(forward: Forward) -> tuple[Tensor, MadeLayer | None]:
        """The hidden states after a forward; or, in the forward that is looked for, the layer."""
        hidden = model.embed(forward.token_ids)
        for index in range(model.config.num_layers):
            made = trusted.layer(index, hidden, forward)
            if (forward.phase, forward.step, index) == (finding.phase, finding.step, finding.layer):
                return hidden, made
            hidden = made.hidden_out
        return hidden, None

    def logits_of(forward: Forward) -> Tensor | None:
        hidden, made = layers_of(forward)
        if made is not None and finding.layer is not None:
            found.append(_case(model, plan, finding.layer, forward, made, calibration))
            return None
        return model.head(hidden[forward.predicted], trusted.ops)

    schedule.run(paging, logits_of)
    if found:
        return found[0]
    raise InputError(f"there is no {finding.phase} {finding.step} of layer {finding.layer}")


def _case(
    model: DecoderModel, plan: KVPlan, index: int, forward: Forward, made: MadeLayer, calibration: Calibration | None
) -> LayerCase:
    kv, bases = formats.describe(*plan.layers[index]), None
    if calibration and is_learned(kv):
        bases = calibration.k[index], calibration.v[index]
    layers = (model.config.layers[index],) * (index + 1)
    config = replace(model.config, layers=layers, vocab_size=VOCABULARY, tied=True)
    weights, places = model.weights.layers[index], (forward.batch, forward.phase, forward.step)
    return compact(LayerCase(config, weights, kv, plan.recent, plan.sink, bases, made.hidden_in, made.before, *places))


def is_learned(kv: str) -> bool:
    """Whether formats, as `formats.parse` takes them, need the coordinates of a calibration."""
    return any(part.split("=")[-1] not in formats.names() for part in kv.split(","))


def compact(case: LayerCase) -> LayerCase:
    """The same with no other blocks and rows than those in use, in their old order, and a first one that nobody owns."""
    batch, size = case.batch, block_size(case)
    used = sorted({int(block) for block in batch.block_table.flatten() if block >= 0})
    number = {block: place for place, block in enumerate(used, 1)} | {-1: -1}
    table = batch.block_table.clone().apply_(lambda block: number[int(block)])
    block = (batch.slot_mapping // size).clone().apply_(lambda block: number[int(block)])
    rows = sorted(map(int, batch.rows))
    row = torch.tensor([1 + rows.index(int(row)) for row in batch.rows])
    before = {
        part: {name: _picked(tensor, used if part in ("k", "v") else rows, 1 + len(used)) for name, tensor in fields.items()}
        for part, fields in case.before.items()
    }
    slots = block * size + batch.slot_mapping % size
    placed = replace(batch, block_table=table, slot_mapping=slots, rows=row)
    return replace(case, before=before, batch=placed)


def _picked(tensor: Tensor, units: Sequence[int], count: int) -> Tensor:
    """So many units: zeros, then those that are wanted, then zeros."""
    found = tensor.new_zeros(count, *tensor.shape[1:])
    found[1 : 1 + len(units)] = tensor[list(units)]
    return found


def block_size(case: LayerCase) -> int:
    """Tokens of a block; formats of groups are never validated, so that a field has a row a token."""
    return int(next(iter(case.before["k"].values())).shape[2])


# -- Running it --------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def expected(case: LayerCase, make: Make) -> MadeLayer:
    """What the reference makes of it.

    Raises:
        InputError: the executor cannot run it, or what it makes is zero or not finite.
    """
    cache = new_cache(case)
    reference = Reference(make(case.model, case.plan), case.model, cache)
    load(cache, case.index, case.before)
    return reference.layer(case.index, case.hidden, forward_of(case))


@torch.inference_mode()
def judged(case: LayerCase, reference: Make, candidate: Make) -> Report:
    """Hold an executor against the reference on this layer alone.

    Raises:
        InputError: as `validate`.
    """
    pair = reference(case.model, case.plan), candidate(case.model, case.plan)
    return validate_layer(*pair, case.model, case.plan, case.index, case.hidden, case.before, forward_of(case))


def require_expected(case: LayerCase, theirs: MadeLayer, made: MadeLayer) -> None:
    """Refuse a reference that does not make here what it made where the case was written.

    Args:
        theirs: as it was written.
        made: what the reference makes here.
    Raises:
        InputError: with what differs, and by how much.
    """
    limits = bounds_of(case.hidden.dtype)
    cache = new_cache(case)
    compared = compare_both(cache, theirs, made.stored, limits.kv_noise)
    verdicts = judge_stored(compared, {}, case.index, limits)
    if not compared.different:
        verdicts.append(judge_hidden("hidden state", compare_vectors(theirs.hidden_out, made.hidden_out), limits))
    for verdict in verdicts:
        if verdict.reason == "fault":
            raise InputError(
                f"the reference makes another {verdict.stage} here than where the file was written: {verdict.detail}; "
                "install the versions that the file names"
            )


def new_cache(case: LayerCase) -> PagedKVCache:
    """An empty cache with the blocks and rows of a compact case."""
    schedule = Schedule([[0] * int(length) for length in case.batch.seq_lens], 0, case.plan)
    return schedule.new_cache(case.model)


def forward_of(case: LayerCase) -> Forward:
    """Its forward; of the tokens only their places are known."""
    return Forward(case.phase, case.step, torch.zeros(case.tokens, dtype=torch.int64), case.batch)
