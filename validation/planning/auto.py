"""The smallest cache whose loss on a model stays under a bound, layer by layer, K apart from V: the default of every model.

    text         of seven kinds, written for this (`common_text.samples`), in two halves
    coordinates  of the model's keys, learned from the first half
    costs        of K in `lr3` and of V in `tq3` at each layer by itself, on the second half: how far they move what its MLP
                 reads. h: the hidden state after attention, d: its change by the format, n: the norm before the MLP.

                     cost = E |n(h + d) - n(h)|**2 / |n(h)|**2

                 Other formats cost in proportion to what their levels leave of a Gaussian.
    choice       the fewest bytes whose costs add up to no more than a budget (`search.Frontier`)
    measurement  the whole cache beside bf16 on the second half, by all logits. KL over the sum of costs is about the same for
                 all caches of a model: it gives the next budget, until a cache is under the bound.

Every cache keeps the first 4 tokens in BF16 and the newest 124, or fewer where layers have a sliding window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks.cubic import ERRORS
from haarkv.codebooks.learned import expected_cost
from haarkv.engine.plans import SINKS, TAIL, plan_for, shape_signature
from haarkv.models.catalog import read_config
from haarkv.models.config import ModelConfig
from haarkv.models.rope import inverse_frequencies
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import COLUMNS, learned_bits
from haarkv.tq_ops.formats.packing import eighth_widths
from haarkv.tq_ops.formats.stretches import RopeShift
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration
from haarkv.tq_ops.kv.kernel_support import unsupported_format
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.npu.program import HEAD_DIM
from haarkv.tq_ops.npu.sides import READS
from haarkv.tq_ops.table import OP_NAMES, with_ops
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep, Workload, chunk_logits, fidelity_row, score_window
from haarkv.validation.planning.calibrate import Learning, Subject, learn_basis, unlearnable
from haarkv.validation.planning.common_text import samples
from haarkv.validation.planning.moments import AttentionVectors, Sums
from haarkv.validation.planning.search import (
    Costs,
    Frontier,
    Place,
    bits_per_value,
    run_one_layer,
    session_with_plan,
    with_format,
)

LOSS = 0.002
"""Mean KL in nats a token, of the second half of the text, that a cache may lose by default."""
FORMATS: Mapping[Side, tuple[str, ...]] = {
    "k": ("lr2", "lr3", "lr4", "lr5", "bf16"), "v": ("tq2", "tq3", "tq4", "tq5", "tq6", "bf16"),
}  # fmt: skip
UNLEARNED_KEYS = ("tq3", "tq4", "tq5", "tq6", "bf16")
"""Of K where it cannot be learned."""
Names = Mapping[Side, tuple[str, ...]]
TAILS = (TAIL, 92, 60)
"""Tails to choose from where layers have a sliding window."""
TOKENS, CONTEXT = 1009, 4096
"""Tokens of the text; sizes are of a sequence of `CONTEXT` tokens."""
_KL_OF_COSTS = 1.5
"""KL over the sum of costs until it is measured: a first guess."""
_TRIED_AT_MOST = 4
_ENOUGH = 0.7
"""After a loss of this much of the bound no other cache is tried."""


@dataclass(frozen=True)
class CacheChoice:
    """A cache that was chosen for a model, with the calibration `file` of what was learned, if keys can be.

    Attributes:
        costs: of each format at each place beside the longest tail.
        rows, row: every measured cache, and the chosen one.
        seconds: that choosing took.
    """

    spec: KVSpec
    config: ModelConfig
    file: CalibrationFile | None
    costs: Costs
    rows: tuple[FidelityRow, ...]
    row: FidelityRow
    seconds: float

    def __str__(self) -> str:
        plan = plan_for(self.spec, self.config)
        context = min(CONTEXT, self.config.max_position_embeddings)
        bits = bits_per_value(plan, self.config, context)
        return (
            f"KV cache chosen in {self.seconds:.0f} s, once for this model: {bits:.2f} bits a value, KL {self.row.kl_mean:.2g}"
        )


@dataclass(frozen=True)
class Reading:
    """What is chosen from: the formats and BF16 tokens that an executor reads of a model.

    Attributes:
        names: of formats for K and for V, from the smallest; the second is measured at each place.
        tails, sink: newest tokens in BF16, from the most, and first ones.
    """

    names: Names
    tails: tuple[int, ...]
    sink: int


NO_TAIL = "vllm-packed"
"""Names vLLM where it reads packed tokens alone, as an executor is named."""


def reading(config: ModelConfig, executor: str | None = None) -> Reading:
    """What an executor reads. `npu` reads few formats, and beside a tail packs both sides or neither."""
    names, most = FORMATS, config.max_position_embeddings
    if executor == "npu":
        values = (
            name for name in FORMATS["v"] if name != "bf16" and unsupported_format(READS, formats.get(name), HEAD_DIM) is None
        )
        names = {"k": tuple(name for name in FORMATS["k"] if learned_bits(name)), "v": tuple(values)}
    elif unlearnable(config):
        names = {**FORMATS, "k": UNLEARNED_KEYS}
    if executor == NO_TAIL:
        return Reading(names, (0,), 0)
    tails = TAILS if any(shape and shape.window for shape in config.kv_shapes) else (TAIL,)
    return Reading(names, tuple(min(tail, most) for tail in tails), min(SINKS, most))


def require_loss(loss: float) -> float:
    """Refuse a bound that is none."""
    if not 0 < loss < math.inf:
        raise InputError(f"--kv-loss is a mean KL in nats a token, above 0, not {loss:g}")
    return loss


def choose(
    subject: Subject, loss: float = LOSS, on_step: OnStep = lambda *_: None, executor: str | None = None
) -> CacheChoice:
    """Choose a cache for a model that an executor will run."""
    require_loss(loss)
    began, config = time.monotonic(), subject.config
    text = torch.tensor(samples(subject.tokenizer, min(TOKENS, config.max_position_embeddings)))
    choices = reading(config, executor)
    study = _Study(subject, text, choices, on_step)
    calibration = study.calibration
    costs = {tail: format_costs(by_place, calibration, choices.names) for tail, by_place in study.costs.items()}
    budget, tried_plans, rows = loss / _KL_OF_COSTS, list[KVPlan](), list[FidelityRow]()
    while len(rows) < _TRIED_AT_MOST:
        plan = smallest(costs, config, budget, calibration, choices.sink)
        if plan in tried_plans:
            break
        tried_plans.append(plan)
        rows.append(study.measure(plan, on_step))
        if _ENOUGH * loss <= rows[-1].kl_mean <= loss or rows[-1].kl_mean <= 0:
            break
        budget = 0.9 * loss * sum_of_costs(costs, plan) / rows[-1].kl_mean
    if all(row.kl_mean > loss for row in rows):  # a cache that loses nothing
        tried_plans.append(plan_for(KVSpec("bf16"), config))
        rows.append(study.measure(tried_plans[-1], on_step))
    plan, row = min(
        ((plan, row) for plan, row in zip(tried_plans, rows, strict=True) if row.kl_mean <= loss),
        key=lambda tried: bits_per_value(tried[0], config, min(CONTEXT, config.max_position_embeddings)),
    )
    file = subject.calibration_file(study.learning, {}) if calibration else None
    spec = replace(plan_spec(plan, calibration), made_for=shape_signature(config), weights=subject.fingerprint)
    return CacheChoice(spec, config, file, next(iter(costs.values())), tuple(rows), row, time.monotonic() - began)


# -- What formats cost ----------------------------------------------------------------------------------------------------
class _MlpReachedError(Exception):
    """Ends a layer before its MLP."""


class _LayerRun:
    """One layer over one text, with its cache in different formats. What precedes attention is computed once."""

    def __init__(self, subject: Subject, layer: int, hidden: Tensor) -> None:
        self._subject, self._layer, self._hidden = subject, layer, hidden
        self._before: list[Any] = []
        self.vectors = AttentionVectors()

    def run(self, plan: KVPlan, *, whole: bool = False) -> tuple[Tensor, Tensor]:
        """What the MLP reads [T, hidden] fp32, and what leaves the layer [T, hidden] if `whole`."""
        ops, mlp_norm = self._subject.ops, self._subject.model.weights.layers[self._layer]["post_norm"]
        mlp_input, calls, is_stored = list[Tensor](), 0, False

        def once(op: Callable[..., Any], *args: Any) -> Any:
            nonlocal calls
            if is_stored:
                result = op(*args)
                if op == ops.rms_norm and args[1] is mlp_norm:
                    mlp_input.append(result.float())
                    if not whole:
                        raise _MlpReachedError
                return result
            if calls == len(self._before):
                self._before.append(op(*args))
            calls += 1
            return self._before[calls - 1]

        def store_kv(k: Tensor, v: Tensor, at: Any) -> None:
            nonlocal is_stored
            is_stored = True
            if whole:
                self.vectors.add_kv(k, v)
            ops.store_kv(k, v, at)

        def paged_attention(q: Tensor, at: Any, softmax_scale: float) -> Tensor:
            if whole:
                self.vectors.add_q(q)
            return ops.paged_attention(q, at, softmax_scale)

        replacements: dict[str, Callable[..., Any]] = {name: partial(once, getattr(ops, name)) for name in OP_NAMES}
        replacements |= {"store_kv": store_kv, "paged_attention": paged_attention}
        table = with_ops(ops, replacements)

        def run(hidden: Tensor, span: range, batch: Any, cache: Any) -> Tensor:
            try:
                return self._subject.model.layers(hidden, span, batch, cache, table)
            except _MlpReachedError:
                return hidden

        hidden = run_one_layer(run, plan, self._subject.config, self._layer, self._hidden)
        return torch.cat(mlp_input), hidden


class _Study:
    """What is learned and measured on a text [T]: coordinates of keys by its first half, the rest by its second half.

    Attributes:
        learning, calibration: the coordinates; no calibration where keys are not learned.
        costs: tail -> what the second of `names` costs at each place.
    """

    def __init__(self, subject: Subject, text: Tensor, choices: Reading, on_step: OnStep) -> None:
        self._subject, self._half, config = subject, len(text) // 2, subject.config
        self._base, self._text = subject.session(KVSpec("bf16", choices.tails[0] or None, choices.sink)), text
        hidden, self.learning = subject.model.embed(text).to(subject.runner.device), Learning()
        is_learned, self.calibration = any(map(learned_bits, choices.names["k"])), None
        self.costs: dict[int, dict[Place, dict[str, float]]] = {tail: {} for tail in choices.tails}
        for layer in range(config.num_layers):
            if config.kv_shapes[layer] is None:
                self.learning.layers.append(None)
                hidden = run_one_layer(self._base.executor.layers, self._base.plan, config, layer, hidden)
                on_step(f"layer {layer + 1} of {config.num_layers}", len(text))
                continue
            layer_run = _LayerRun(subject, layer, hidden)
            exact, hidden = layer_run.run(self._base.plan, whole=True)
            if is_learned:
                self.learning.layers.append(self._learn(layer, layer_run.vectors))
                self.calibration = make_calibration(self.learning.layers)
            for tail, costs in self.costs.items():
                tail_plan = replace(self._base.plan, recent=tail or None)
                for side, by_size in choices.names.items():
                    name = by_size[min(1, len(by_size) - 1)]
                    moved, _ = layer_run.run(with_format(tail_plan, (layer, side), name, self.calibration))
                    squares = (moved - exact).square().sum(-1) / exact.square().sum(-1)
                    costs[layer, side] = {name: float(squares[self._half :].mean())}
            on_step(f"layer {layer + 1} of {config.num_layers}", len(text))
        self._exact = hidden[self._half :]

    def _learn(self, layer: int, vectors: AttentionVectors) -> Any:
        mixer = self._subject.config.layers[layer].attention
        sums = Sums(mixer.num_kv_heads, mixer.head_dim, mixer.scale)
        turns = RopeShift(tuple(inverse_frequencies(mixer.rope).tolist()))
        sums.add(vectors.first(self._half), turns, self._subject.config.max_position_embeddings)
        return learn_basis(sums, layer, turns)

    def measure(self, plan: KVPlan, on_step: OnStep) -> FidelityRow:
        """A whole cache by all logits of the second half; bytes are of the whole text."""
        side, config = session_with_plan(self._base, plan), self._subject.config
        hidden = self._subject.model.embed(self._text).to(self._subject.runner.device)
        for layer in range(config.num_layers):
            hidden = run_one_layer(side.executor.layers, plan, config, layer, hidden)
        on_step("the whole cache", len(self._text) * config.num_layers)
        targets = torch.cat([self._text[self._half :], self._text[:1]])
        window = range(len(targets) - 1)
        model = self._subject.model
        logits = (chunk_logits(model, self._base, states) for states in (self._exact, hidden[self._half :]))
        return fidelity_row("auto", side, len(self._text), score_window("auto", Workload(targets, [window]), window, *logits))


def format_costs(measured_costs: Costs, calibration: Calibration | None, names: Names) -> Costs:
    """What each format costs at each place, by the one that was measured there."""
    costs = {}
    for place, by_name in measured_costs.items():
        ((measured_name, cost),) = by_name.items()
        unit = cost / _left(measured_name, place, calibration)
        costs[place] = {name: unit * _left(name, place, calibration) for name in names[place[1]]}
    return costs


def _left(name: str, place: Place, calibration: Calibration | None) -> float:
    """What a format's levels leave of the variance of Gaussian coordinates; of keys, weighted by the queries."""
    if name == "bf16":
        return 0.0
    if (bits := learned_bits(name)) is None:
        return ERRORS[int(name.removeprefix("tq"))]
    assert calibration is not None, "a learned format has coordinates"
    return float(expected_cost(calibration.bases[place[0]].weights, eighth_widths(COLUMNS[bits])).mean())


# -- The smallest cache ---------------------------------------------------------------------------------------------------
def sum_of_costs(costs: Mapping[int, Costs], plan: KVPlan) -> float:
    """Of a plan beside its tail; `bf16` costs nothing."""
    names = {(layer, side): plan.layers[layer][side == "v"].name for layer, side in costs[plan.recent or 0]}
    return math.fsum(costs[plan.recent or 0][place].get(name, 0.0) for place, name in names.items())


def smallest(
    costs: Mapping[int, Costs], config: ModelConfig, budget: float, calibration: Calibration | None, sink: int = SINKS
) -> KVPlan:
    """The plan of fewest bytes whose costs, by tail, add up to no more than `budget`; at worst bf16's, which costs nothing."""
    context, plans = min(CONTEXT, config.max_position_embeddings), []
    for tail, tail_costs in costs.items():
        frontier = Frontier(tail_costs, config, tail=tail, sink=sink, context=context, calibration=calibration)
        allocation = frontier.under(budget)
        plans.append(allocation.plan if allocation else plan_for(KVSpec("bf16"), config))
    return min(plans, key=lambda plan: bits_per_value(plan, config, context))


def plan_spec(plan: KVPlan, calibration: Calibration | None) -> KVSpec:
    """The spec of a plan, with the coordinates that its keys need."""
    layer_formats = dict(enumerate(formats.describe(*pair) for pair in plan.layers))
    needs_calibration = any(learned_bits(k.name) is not None for k, _ in plan.layers)
    return KVSpec(
        tail=plan.recent, sink=plan.sink, layers=layer_formats, calibration=calibration if needs_calibration else None
    )


def steps(model: str, num_layers: int | None = None) -> int:
    """Tokens that `on_step` gets, counted once in each layer, if two caches are measured."""
    config = read_config(model, num_layers)
    return 3 * config.num_layers * min(TOKENS, config.max_position_embeddings)
