"""Formats that a plan may choose from, what they are predicted to cost, and what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import COLUMNS, PREFIX, learned_bits
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import BF16_BYTES, KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, Shapes, blocks_for, each
from haarkv.validation.fidelity.evaluation import FidelityRow, OnStep, Setup, Workload, evaluate
from haarkv.validation.fidelity.scores import Partial
from haarkv.validation.layers.parts import new_cache

CANDIDATES = ("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "bf16")
"""One format a number of bits, so that no place is given the luckier of two equals."""
TAILS = (0, 16, 32, 64, 128)
"""Tails that are tried, in tokens."""
LEARNED_CANDIDATES = (*(f"{PREFIX}{bits}" for bits in COLUMNS), "tq2", "tq3", "tq4", "tq5", "tq6")
"""The same with a calibration."""

Place = tuple[int, Side]
"""K or V of a layer."""
Candidates = Sequence[str] | Mapping[Side, Sequence[str]]
"""Names of formats, for both sides or for each."""
Costs = Mapping[Place, Mapping[str, float]]
"""Mean KL(bf16 || bf16 but this format at this place), in nats a token."""


def places(config: ModelConfig) -> list[Place]:
    """K and V of every layer, in their order."""
    return [(layer, side) for layer in range(config.num_layers) for side in ("k", "v")]


def at(side: Side, names: Candidates) -> list[str]:
    """Those of some formats that a side takes: learned ones are K's alone."""
    side_names = names[side] if isinstance(names, Mapping) else names
    return [name for name in side_names if side == "k" or learned_bits(name) is None]


def everywhere(name: str) -> str:
    """What stores all of a cache in a format: beside learned keys, values in as many bits."""
    bits = learned_bits(name)
    return f"k={name},v=tq{bits}" if bits else name


def require_candidates(names: Sequence[str], config: ModelConfig, calibration: Calibration | None = None) -> None:
    """Refuse candidates that the model does not take, or that store no token by itself.

    Raises:
        InputError: naming the format.
    """
    for name in names:
        if plan_for(KVSpec(everywhere(name), calibration=calibration), config).has_windows:
            raise InputError(
                f"{name} stores tokens in groups and brings its own tail; name candidates that store each by itself"
            )


def bits_per_value(kv: KVPlan, config: ModelConfig, context: int) -> float:
    """Bits of one number of K or V, all included, as allocated for one sequence of so many tokens."""
    shapes, exact = config.kv_shapes, KVSpec("bf16").plan(config.num_layers)
    return 16 * cache_bytes(kv, context, shapes) / cache_bytes(exact, context, shapes)


def place_bytes(kv: KVPlan, place: Place, shapes: Shapes, context: int, ring_chunk: int = RING_CHUNK) -> int:
    """Bytes of one place for one sequence, in its window's ring if it has one, its tail and sinks included."""
    layer, side = place
    kv_format, shape, blocks = kv.layers[layer][side == "v"], each(shapes, len(kv.layers))[layer], blocks_for(context)
    assert shape is not None, "a place is of a layer that has K and V"
    ring = shape.ring_blocks(blocks, chunk=ring_chunk)
    packed = BLOCK_SIZE * (blocks if ring is None else ring) * shape.num_kv_heads * kv_format.bytes_per_vector(shape.head_dim)
    bf16_tokens = kv.ring_tokens(kv_format) + kv.sink if kv.has_window(kv_format) else 0
    return round(packed) + BF16_BYTES * shape.numbers * bf16_tokens


def with_format(plan: KVPlan, place: Place, name: str, calibration: Calibration | None = None) -> KVPlan:
    """A plan with another format at one place."""
    (layer, side), layers = place, list(plan.layers)
    k_format, v_format = layers[layer]
    kv_format = formats.get(name, side, calibration)
    layers[layer] = (kv_format, v_format) if side == "k" else (k_format, kv_format)
    return replace(plan, layers=tuple(layers))


def session_with_plan(base: Session, plan: KVPlan) -> Session:
    """The baseline's model with another plan.

    Raises:
        InputError: the executor cannot run it, with its reason.
    """
    if reason := base.executor.supports(base.config, plan):
        raise InputError(f"executor {base.executor.name} cannot run {plan.describe()}: {reason}")
    return replace(base, plan=plan)


def one_layer(
    plan: KVPlan, config: ModelConfig, layer: int, tokens: int, device: torch.device
) -> tuple[PagedKVCache, PagedSequences]:
    """An empty cache of one layer alone for a sequence of so many tokens, and its bookkeeping."""
    shape, blocks = config.layers[layer].attention.kv_shape, blocks_for(tokens)
    page = page_bytes(plan.layers[layer], shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    pages = {layer: torch.zeros(blocks, page, dtype=torch.uint8, device=device)}
    cache = new_cache(plan, config, blocks, num_rows=1, device=device, pages=pages)
    return cache, PagedSequences(blocks, cache.block_size, num_rows=1)


# -- A chosen plan on another text -------------------------------------------------------------------------------------
SAME_BYTES = 1.05
"""A uniform format of at most so many times the plan's bytes counts as one of the same bytes."""
PLAN = "plan"
"""The plan's own name among the caches of its verification."""


@dataclass(frozen=True)
class Verification:
    """A plan on a text that it was not chosen by.

    Attributes:
        rivals: rows of the uniform candidates next to it in size, fewer bytes first.
        nearer: for each rival, in how many windows the plan's mean KL is the lower one.
    """

    plan: FidelityRow
    rivals: tuple[FidelityRow, ...]
    nearer: tuple[int, ...]
    tokens: int
    windows: int

    @property
    def beaten_by(self) -> FidelityRow | None:
        """The best uniform candidate of the same bytes or fewer, unless the plan has the lower mean KL."""
        same = [row for row in self.rivals if row.bytes_per_token <= SAME_BYTES * self.plan.bytes_per_token]
        best = min(same, key=lambda row: row.kl_mean, default=None)
        return best if best and best.kl_mean <= self.plan.kl_mean else None


def uniform_rivals(
    plan: KVPlan, config: ModelConfig, context: int, candidates: Sequence[str], calibration: Calibration | None = None
) -> dict[str, KVPlan]:
    """Uniform candidates next to a plan in bytes: the largest that take no more, and the smallest that take no fewer.

    With the plan's tail and sinks as well, if it has any, the largest that take no more: what of the gain is theirs.
    """
    plan_bits = bits_per_value(plan, config, context)
    rivals: dict[str, KVPlan] = {}
    for tail, sink in dict.fromkeys(((None, 0), (plan.recent, plan.sink))):
        base_spec = KVSpec(tail=tail, sink=sink, calibration=calibration)
        uniform = [replace(base_spec, kv=everywhere(name)).plan(config.num_layers) for name in candidates]
        bits = [bits_per_value(other, config, context) for other in uniform]
        near = {max((b for b in bits if b <= plan_bits), default=None)}
        if (tail, sink) == (None, 0):
            near.add(min((b for b in bits if b >= plan_bits), default=None))
        rivals |= {other.describe(): other for b, other in zip(bits, uniform, strict=True) if b in near}
    return dict(sorted(rivals.items(), key=lambda item: bits_per_value(item[1], config, context)))


def verify(
    setup: Setup, unseen: Workload, plan: KVPlan, rivals: Mapping[str, KVPlan], on_step: OnStep = lambda *_: None
) -> Verification:
    """A plan and its rivals on a text that it was not chosen by."""
    caches = {name: session_with_plan(setup.base, other) for name, other in {PLAN: plan, **rivals}.items()}
    partial = Partial()
    plan_row, *others = evaluate(replace(setup, caches=caches), unseen, partial=partial, on_step=on_step)

    def window_means(name: str) -> list[float]:
        all_scores = (partial.scores(name, number) for number in range(len(unseen.windows)))
        return [scores.kl.mean().item() for scores in all_scores if scores]

    means = window_means(PLAN)
    nearer = [sum(a < b for a, b in zip(means, window_means(row.kv), strict=True)) for row in others]
    return Verification(plan_row, tuple(others), tuple(nearer), unseen.scored_tokens, len(unseen.windows))
