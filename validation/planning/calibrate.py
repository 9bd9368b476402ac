"""Learn the coordinates of a model's keys from a text, layer by layer: all windows run through a layer, which gives sums of q
q^T and k k^T of each KV head for `codebooks.learned.learn`. Windows that are held back say how much worse an unseen text is
off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis, expected_cost, learn
from haarkv.engine.plans import plan_for, shape_signature
from haarkv.engine.session import Session
from haarkv.executors.base import Executor
from haarkv.executors.catalog import AUTO, create, info, select
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.rope import inverse_frequencies
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.formats.learned import COLUMNS, LEAST_DIM
from haarkv.tq_ops.formats.packing import eighth_widths
from haarkv.tq_ops.formats.stretches import RopeShift
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable
from haarkv.validation.fidelity.evaluation import FidelityRow, Setup, Workload, evaluate
from haarkv.validation.layers.forward import observe_vectors
from haarkv.validation.planning.moments import AttentionVectors, Sums
from haarkv.validation.planning.search import run_one_layer

OnStep = Callable[[str, int], None]
"""Gets what has been done, and the number of its tokens."""
ENOUGH = 1.25
"""If held-back text costs more than this factor, more text helps."""
_FIT_BITS = 3
"""Bits at which the fit is judged."""


@dataclass
class Learning:
    """Coordinates of each layer's keys, None where it has none; and for layers with keys, how many times as much they cost on
    held-back text.
    """

    layers: list[Basis | None] = field(default_factory=list)
    fits: list[float] = field(default_factory=list)


def learn_model(
    model: DecoderModel, ops: OpTable, windows: Sequence[Tensor], holdout: Sequence[Tensor], on_step: OnStep = lambda *_: None
) -> Learning:
    """Learn the coordinates of every layer's keys, where it has some, by the model's own forward with K and V in bf16.

    Args:
        ops: the table that runs the layers; it must take a bf16 cache.
        windows: token ids [n] int64 of each window to learn from, at least one; each has an empty cache.
        holdout: windows to judge by; without any, no fit is known (NaN).
    Raises:
        NonFiniteError: a key or a query is not finite, with the layer.
    """
    learning, config = Learning(), model.config
    lengths = [len(window) for window in (*windows, *holdout)]
    every = model.embed(torch.cat([*windows, *holdout]).to(model.weights.embedding.device))
    for layer in range(config.num_layers):
        if config.kv_shapes[layer] is None:
            every = torch.cat([_run(model, ops, layer, hidden) for hidden in torch.split(every, lengths)])
            learning.layers.append(None)
            on_step(f"layer {layer + 1} of {config.num_layers}", len(every))
            continue
        mixer = config.layers[layer].attention
        turns = RopeShift(tuple(inverse_frequencies(mixer.rope).tolist()))
        (train_sums, other), after = (Sums(mixer.num_kv_heads, mixer.head_dim, mixer.scale) for _ in range(2)), []
        for number, hidden in enumerate(torch.split(every, lengths)):
            vectors = AttentionVectors()
            after.append(_run(model, observe_vectors(ops, vectors.add_kv, vectors.add_q), layer, hidden))
            (train_sums if number < len(windows) else other).add(vectors, turns, config.max_position_embeddings)
            on_step(f"layer {layer + 1} of {config.num_layers}", len(hidden))
        every = torch.cat(after)
        learning.layers.append(basis := learn_basis(train_sums, layer, turns))
        learning.fits.append(holdout_fit(train_sums, other, basis))
    return learning


def _run(model: DecoderModel, ops: OpTable, layer: int, hidden: Tensor) -> Tensor:
    """What leaves a layer [T, hidden], from an empty cache of that layer alone."""
    plan = KVSpec("bf16").plan(model.config.num_layers)
    return run_one_layer(partial(model.layers, ops=ops), plan, model.config, layer, hidden)


def learn_basis(sums: Sums, layer: int, turns: RopeShift | None) -> Basis:
    """The coordinates of a layer's keys, from its sums."""
    try:
        basis = learn(sums.metric, sums.spread(sums.k.mean), sums.k.mean)
        return replace(basis, inv_freq=torch.tensor(turns.inv_freq, dtype=torch.float64)) if turns else basis
    except ValueError:
        raise NonFiniteError(f"layer {layer}: keys or queries of this text are not finite; nothing can be learned") from None


def holdout_fit(train_sums: Sums, other: Sums, basis: Basis) -> float:
    """How many times as much keys cost on held-back text as on the text learned from, by `expected_cost`."""
    costs = []
    for sums in (train_sums, other):
        forward, inverse = basis.forward.double(), basis.back.double()
        spread = forward.mT @ sums.spread(basis.mean.double()) @ forward
        coordinate_error = (inverse @ sums.metric @ inverse.mT).diagonal(dim1=-2, dim2=-1) * spread.diagonal(dim1=-2, dim2=-1)
        costs.append(float(expected_cost(basis.weights, eighth_widths(COLUMNS[_FIT_BITS]), coordinate_error).mean()))
    return costs[1] / costs[0] if min(costs) > 0 and other.tokens else math.nan


# -- A model that is calibrated -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A loaded model and its executor, op by op, on one device."""

    name: str
    model: DecoderModel
    runner: Executor
    ops: OpTable
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def learn(self, windows: Sequence[Tensor], holdout: Sequence[Tensor], on_step: OnStep = lambda *_: None) -> Learning:
        """The coordinates of the model's keys; InputError if they cannot be learned."""
        if reason := unlearnable(self.config):
            raise InputError(reason)
        return learn_model(self.model, self.ops, windows, holdout, on_step)

    def calibration_file(self, learning: Learning, metadata: Mapping[str, Any]) -> CalibrationFile:
        """The file of a finished learning."""
        return CalibrationFile(make_calibration(learning.layers), shape_signature(self.config), self.fingerprint, metadata)

    def judge(self, calibration: Calibration, unseen: Workload, on_step: OnStep = lambda *_: None) -> list[FidelityRow]:
        """`tq4`, and the same with learned keys, on a text that was not learned from."""
        specs = [KVSpec("tq4"), KVSpec("k=lr4,v=tq4", calibration=calibration)]
        base, caches = self.session(KVSpec("bf16")), {spec.kv: self.session(spec) for spec in specs}
        return evaluate(Setup(self.model, base, caches, self.fingerprint), unseen, on_step=on_step)

    def session(self, spec: KVSpec) -> Session:
        """The model with a cache, on this executor if it runs that, else on the reference."""
        plan, runner = plan_for(spec, self.config), self.runner
        if runner.supports(self.config, plan):
            runner = create("reference", self.model.to(torch.device("cpu")), plan)
        return Session(self.name, self.config, runner, self.tokenizer, plan)


def unlearnable(config: ModelConfig) -> str | None:
    """Why a model's keys cannot be learned, or None."""
    sizes = {(mixer.num_kv_heads, mixer.head_dim) for mixer in config.attentions}
    if len(sizes) > 1:
        return "learned keys take KV heads of one number and size, and the layers of this model have several"
    if bad := [dim for _, dim in sizes if dim % LEAST_DIM]:
        return f"learned keys take a head_dim that {LEAST_DIM} divides, and this model's is {bad[0]}"
    return None


def load_subject(
    model: str,
    *,
    executor: str = AUTO,
    device: str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    progress: Progress | None = None,
) -> Subject:
    """Load a model to be calibrated, as `engine.loading.load`; InputError if the executor's layers run whole."""
    config = read_config(model, layers)
    plan = plan_for(KVSpec("tq4"), config)
    name = select(executor, config, [plan], device=device, dtype=dtype).name
    loaded_model = load_model(model, dtype or info(name).dtype, layers, progress, keep_blocks=info(name).block_types())
    runner = create(name, loaded_model, plan, device)
    if runner.ops is None:
        raise InputError(
            f"executor {name} runs a layer whole, so its K and V cannot be recorded; use --executor cpu or reference"
        )
    tokenizer, weights = load_tokenizer(model, loaded_model.config), fingerprint(loaded_model.weights.named_tensors())
    return Subject(str(model), loaded_model.to(runner.device), runner, runner.ops, tokenizer, weights)
