"""The smallest cache whose loss on a model stays under a bound: `--kv auto`, layer by layer, K apart from V.

    texts        Python's reference, and prose that was written for this (`common_text`)
    coordinates  of the model's keys, learned from the first part of the reference
    costs        one probe a place: KL with K of one layer in `lr3`, or V in `tq3`, and all else in bf16. Other formats lose
                 in proportion to what their levels leave of a Gaussian. Where a model has layers with a sliding window and
                 others, each kind is probed as a whole, on a longer text, and takes one format for K and one for V.
    choice       the fewest bytes whose costs add up to no more than the bound (`search.Frontier`)
    judgement    the whole cache on the next part of the reference and on the prose, beside bf16; the worse counts, of
                 tokens with 1,024 or more before them. Costs do not quite add up, so their bound is moved a few times over.

Probes, and caches on the way, are estimated (`estimates`); the cache that is taken was under the bound by all its logits.
Every cache keeps the first 4 tokens in BF16 and the newest 124, or fewer where layers have a sliding window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from haarkv.codebooks.cubic import ERRORS
from haarkv.codebooks.learned import expected_cost
from haarkv.engine.plans import SINKS, TAIL, plan_for
from haarkv.engine.session import Session
from haarkv.models.catalog import read_config
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import COLUMNS, learned_bits
from haarkv.tq_ops.formats.packing import eighth_widths
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.kernel_support import unsupported_format
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.npu.program import HEAD_DIM
from haarkv.tq_ops.npu.sides import READS
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep
from haarkv.validation.planning.calibrate import Subject
from haarkv.validation.planning.common_text import common_text, prose
from haarkv.validation.planning.estimates import Judge, Probes, Whole, in_larger_chunks
from haarkv.validation.planning.search import Costs, Frontier, Place, bits_per_value, places, with_format

LOSS = 0.002
"""Mean KL in nats a token that a cache may lose by default."""
PROBES: Mapping[Side, str] = {"k": "lr3", "v": "tq3"}
FORMATS: Mapping[Side, tuple[str, ...]] = {
    "k": ("lr2", "lr3", "lr4", "lr5", "bf16"), "v": ("tq2", "tq3", "tq4", "tq5", "tq6", "bf16"),
}  # fmt: skip
Names = Mapping[Side, tuple[str, ...]]
"""Names of formats to choose from, for K and for V."""
TAILS = (TAIL, 92, 60)
"""Tails to try where layers have a sliding window."""
LEARNED_FROM, JUDGED_BY, PROBED_BY, KINDS_PROBED_BY, CONTEXT = 4096, 2048, 384, 1024, 4096
"""Tokens; `JUDGED_BY` is the most of each text. Sizes are of a sequence of `CONTEXT` tokens."""
JUDGED_FROM = 1024
"""Tokens with fewer before them do not count in the judgement: they see much in BF16."""
CHOSEN_BY = (TAILS, SINKS, LEARNED_FROM, PROBED_BY, KINDS_PROBED_BY, JUDGED_BY, JUDGED_FROM)
"""With another of these a choice is another."""
WINDOW = 1024
TEXTS = ("Python's reference", "prose")
_EVERY = 2
"""Distance of the positions that estimates look at."""
_ADDS_UP = 0.6
"""Places' costs as a share of what the whole cache loses: where the search begins."""
_TRIED_AT_MOST = 6
_NEAR, _ENOUGH = 0.8, 0.92
"""After a loss of so much of the bound one more cache is tried, and none."""
_WORSE = 0.8
"""A text on which a cache loses less than so much of the worst is dropped."""


@dataclass(frozen=True)
class CacheChoice:
    """A cache that was chosen for a model, with the calibration `file` of what was learned.

    Attributes:
        costs: of each format at each place, in nats a token.
        rows, row: every judged cache, each on its worst text; the chosen one.
        seconds: of learning, probing and judging.
    """

    spec: KVSpec
    config: ModelConfig
    file: CalibrationFile
    costs: Costs
    rows: tuple[FidelityRow, ...]
    row: FidelityRow
    loss: float
    seconds: tuple[float, float, float]

    def __str__(self) -> str:
        plan = plan_for(self.spec, self.config)
        context = min(CONTEXT, self.config.max_position_embeddings)
        learn_seconds, probe_seconds, judging = self.seconds
        return (
            f"--kv auto takes {bits_per_value(plan, self.config, context):.2f} bits a value at {context:,} tokens "
            f"({plan.summary()}): mean KL {self.row.kl_mean:.2g} on the worst of {len(TEXTS)} texts, {self.row.kv}, under "
            f"{self.loss:g} ({learn_seconds:.0f} s to learn, {probe_seconds:.0f} to probe, {judging:.0f} to judge)"
        )


def names_for(executor: str | None) -> Names:
    """Those of `FORMATS` that an executor reads. `npu` reads few, and beside a tail packs both sides or neither."""
    if executor != "npu":
        return FORMATS
    return {
        "k": tuple(name for name in FORMATS["k"] if learned_bits(name)),
        "v": tuple(
            name for name in FORMATS["v"] if name != "bf16" and unsupported_format(READS, formats.get(name), HEAD_DIM) is None
        ),
    }


def choose(subject: Subject, loss: float = LOSS, on_step: OnStep = lambda *_: None, names: Names = FORMATS) -> CacheChoice:
    """Choose a cache for a model."""
    require_loss(loss)
    config, times = subject.config, [time.monotonic()]
    context = config.max_position_embeddings
    ids = torch.tensor(common_text(subject.tokenizer, LEARNED_FROM + JUDGED_BY + 1))  # the last one is only predicted
    windows = list(torch.split(ids[:LEARNED_FROM], min(WINDOW, context)))
    file = subject.calibration_file(subject.learn(windows, (), on_step=on_step), {})
    times.append(time.monotonic())
    base = in_larger_chunks(subject.session(KVSpec("bf16", min(TAIL, context), SINKS)))
    most = min(JUDGED_BY, context) + 1
    reference, other = ids[LEARNED_FROM:][:most], torch.tensor(prose(subject.tokenizer)[:most])
    probe_costs = _probe_costs(subject, base, reference[:-1], file.calibration, on_step)
    costs = format_costs(probe_costs, file.calibration, names)
    times.append(time.monotonic())
    first = min(JUDGED_FROM, context // 2)
    wholes = {
        name: Whole(subject.model, base, text, first, _EVERY) for name, text in zip(TEXTS, (reference, other), strict=True)
    }
    on_step("bf16", config.num_layers * sum(text.tokens for text in wholes.values()))
    judge = Judge(wholes, _WORSE, on_step, config.num_layers)
    candidates = list(_judge_candidates(config, base.plan, costs, file.calibration, judge, loss))
    times.append(time.monotonic())

    def size(candidate: tuple[KVPlan, FidelityRow]) -> float:
        return bits_per_value(candidate[0], config, min(CONTEXT, context))

    plan, row = min(((plan, row) for plan, row in candidates if row.kl_mean <= loss), key=size)
    spec = replace(plan_spec(plan, file.calibration), made_for=file.shape, weights=file.fingerprint)
    learn_seconds, probing, judging = (b - a for a, b in pairwise(times))
    return CacheChoice(
        spec, config, file, costs, tuple(row for _, row in candidates), row, loss, (learn_seconds, probing, judging)
    )


def require_loss(loss: float) -> float:
    """Refuse a bound that is none."""
    if not 0 < loss < math.inf:
        raise InputError(f"--kv-loss is a mean KL in nats a token, above 0, not {loss:g}")
    return loss


def kinds(config: ModelConfig) -> list[list[Place]] | None:
    """K and V of layers with a sliding window, and of the others; None for a model whose layers are of one kind."""
    shapes = config.kv_shapes
    is_windowed = {place: (shape := shapes[place[0]]) is not None and shape.window is not None for place in places(config)}
    if len(set(is_windowed.values())) < 2:
        return None
    return [
        [place for place, window in is_windowed.items() if (place[1], window) == kind]
        for kind in (("k", True), ("v", True), ("k", False), ("v", False))
    ]


def _probe_costs(subject: Subject, base: Session, text: torch.Tensor, calibration: Calibration, on_step: OnStep) -> Costs:
    """What the probe of each place costs; of layers of two kinds, that of each kind in equal parts at its places."""
    if (place_kinds := kinds(base.config)) is None:
        probes, costs = Probes(subject.model, base, text[:PROBED_BY]), {}
        for place in places(base.config):
            name = PROBES[place[1]]
            costs[place] = {name: probes.cost(place, name, calibration)}
            on_step(f"{name} for {place[1].upper()} of layer {place[0]}", PROBED_BY * (base.config.num_layers - place[0]))
        return costs
    whole = Whole(subject.model, base, text[: KINDS_PROBED_BY + 1], TAIL + SINKS, _EVERY)
    kind_costs: dict[Place, dict[str, float]] = {}
    for group in place_kinds:
        plan, name = base.plan, PROBES[group[0][1]]
        for place in group:
            plan = with_format(plan, place, name, calibration)
        cost = whole.kl(plan) / len(group)
        kind_costs |= {place: {name: cost} for place in group}
        on_step(f"{name} for {group[0][1].upper()} of {len(group)} layers", KINDS_PROBED_BY * base.config.num_layers)
    return {place: kind_costs[place] for place in sorted(kind_costs)}


def format_costs(probe_costs: Costs, calibration: Calibration, names: Names = FORMATS) -> Costs:
    """What each format costs at each place, by what its probe cost there."""
    return {
        place: {
            name: by_name[PROBES[place[1]]] * _left(name, place, calibration) / _left(PROBES[place[1]], place, calibration)
            for name in names[place[1]]
        }
        for place, by_name in probe_costs.items()
    }


def _left(name: str, place: Place, calibration: Calibration) -> float:
    """What a format's levels leave of the variance of Gaussian coordinates; of keys, weighted by the queries."""
    if name == "bf16":
        return 0.0
    if (bits := learned_bits(name)) is None:
        return ERRORS[int(name.removeprefix("tq"))]
    return float(expected_cost(calibration.k[place[0]].weights, eighth_widths(COLUMNS[bits])).mean())


def _judge_candidates(
    config: ModelConfig, base: KVPlan, costs: Costs, calibration: Calibration, judge: Judge, loss: float
) -> Iterator[tuple[KVPlan, FidelityRow]]:
    """Caches nearer and nearer to the bound, each measured; at least one holds."""
    tails = {base.recent or 0: 1.0}
    budget, trust, within_bound, near, tried_plans = loss * _ADDS_UP, 1.0, False, False, list[KVPlan]()
    for _ in range(_TRIED_AT_MOST):
        plan = smallest(costs, config, budget, calibration, tails)
        if plan in tried_plans:
            break
        tried_plans.append(plan)
        estimated_loss, predicted_loss = (
            judge.estimate(plan) * trust,
            _predicted_loss(costs, plan) * tails.get(plan.recent or 0, 1.0),
        )
        if estimated_loss <= loss or len(tried_plans) == _TRIED_AT_MOST:
            row = judge.measure(plan)
            yield plan, row
            trust, estimated_loss, within_bound = (
                trust * (row.kl_mean / estimated_loss if estimated_loss > 0 else 1.0),
                row.kl_mean,
                within_bound or row.kl_mean <= loss,
            )
        if estimated_loss <= 0:
            return
        if len(tried_plans) == 1 and kinds(config):
            shorter = [tail for tail in TAILS if tail < (plan.recent or 0)]
            tails |= {
                tail: judge.estimate(replace(plan, recent=tail), f"tail {tail}") * trust / estimated_loss for tail in shorter
            }
        elif near or _ENOUGH * loss <= estimated_loss <= loss:
            return
        else:
            near = _NEAR * loss <= estimated_loss <= loss
        # Costs add up to more or less than is found. Once a cache is near the bound, one is tried that uses it to the end.
        budget = (1.0 if near else 0.95) * loss / estimated_loss * predicted_loss
    if not within_bound:  # a cache that loses nothing
        plan = plan_for(KVSpec("bf16"), config)
        yield plan, judge.measure(plan)


def _predicted_loss(costs: Costs, plan: KVPlan) -> float:
    """The sum of a plan's costs beside the usual tail; `bf16` costs nothing."""
    format_names = {(layer, side): plan.layers[layer][side == "v"].name for layer, side in costs}
    return math.fsum(
        0.0 if format_names[place] == "bf16" else by_name[format_names[place]] for place, by_name in costs.items()
    )


def smallest(
    costs: Costs, config: ModelConfig, budget: float, calibration: Calibration, tails: Mapping[int, float] | None = None
) -> KVPlan:
    """The plan of fewest bytes whose costs add up to no more than `budget`; at worst bf16's, which costs nothing.

    Args:
        tails: to choose from, and how many times as much formats cost beside each; the usual one unless given.
    """
    most, groups = config.max_position_embeddings, kinds(config)
    context, plans = min(CONTEXT, most), []
    for tail, times in (tails or {min(TAIL, most): 1.0}).items():
        frontier = Frontier(
            costs, config, tail=tail, sink=SINKS, context=context, calibration=calibration, place_groups=groups
        )
        allocation = frontier.under(budget / times)
        plans.append(allocation.plan if allocation else plan_for(KVSpec("bf16"), config))
    return min(plans, key=lambda plan: bits_per_value(plan, config, context))


def plan_spec(plan: KVPlan, calibration: Calibration) -> KVSpec:
    """The spec of a plan, with the coordinates that its keys need."""
    layer_formats = dict(enumerate(formats.describe(*pair) for pair in plan.layers))
    needs_calibration = any(learned_bits(k.name) is not None for k, _ in plan.layers)
    return KVSpec(
        tail=plan.recent, sink=plan.sink, layers=layer_formats, calibration=calibration if needs_calibration else None
    )


def steps(model: str, num_layers: int | None = None) -> int:
    """Tokens that `on_step` gets at most, counted once in each layer."""
    config = read_config(model, num_layers)
    place_kinds = kinds(config)
    layers = config.num_layers
    probes = sum(PROBED_BY * (layers - layer) for layer, _ in places(config))
    if place_kinds is not None:
        probes = len(place_kinds) * KINDS_PROBED_BY * layers
    num_judgments = 1 + _TRIED_AT_MOST + (len(TAILS) - 1) * (place_kinds is not None)
    return layers * LEARNED_FROM + probes + num_judgments * len(TEXTS) * JUDGED_BY * layers
