"""Formats that a plan may choose from, what they are predicted to cost, and what they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from haarkv.codebooks.learned import expected_cost
from haarkv.engine.plans import plan_for
from haarkv.engine.session import Session
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, Side
from haarkv.tq_ops.formats.learned import MULTIPLE, PREFIX, nibbles_of
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KEPT_BYTES, KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

CANDIDATES = ("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "bf16")
"""One format a number of bits, so that no place is given the luckier of two equals."""
TAILS = (0, 16, 32, 64, 128)
"""Tails that are tried, in tokens."""
_LEAST_NIBBLES = 32  # that `cpu` and `cuda` read


Place = tuple[int, Side]
"""K or V of a layer."""
Costs = Mapping[Place, Mapping[str, float]]
"""Mean KL(bf16 || bf16 but this format at this place), in nats a token."""


def places(config: ModelConfig) -> list[Place]:
    """K and V of every layer, in their order."""
    return [(layer, side) for layer in range(config.num_layers) for side in ("k", "v")]


def learned_anchors(head_dim: int) -> tuple[str, ...]:
    """Formats of a calibration that are measured, for the others to be predicted from: about half and one nibble a number."""
    half = max(MULTIPLE, head_dim // 2 // MULTIPLE * MULTIPLE)
    return tuple(dict.fromkeys(f"{PREFIX}{nibbles}" for nibbles in (half, 2 * half)))


def predicted(costs: Costs, learned: Calibration) -> dict[Place, dict[str, float]]:
    """What every number of nibbles costs at each place, from the few that were measured.

        cost(N) = cost(M) * expected_cost(N) / expected_cost(M)        M: the measured one whose expected cost is nearest

    Args:
        costs: of formats of `learned`; others are passed on as they are.
    Returns:
        those, and every multiple of 16 nibbles from 32 on, or half a vector, up to two a coordinate.
    """
    found: dict[Place, dict[str, float]] = {}
    for (layer, side), of_place in costs.items():
        weights = getattr(learned, side)[layer].weights
        dim = weights.shape[1]
        counts = range(max(MULTIPLE, min(_LEAST_NIBBLES, dim // 2)), 2 * dim + 1, MULTIPLE)
        expected = {n: float(expected_cost(weights, n).mean()) for n in counts}
        measured = {nibbles: kl for name, kl in of_place.items() if (nibbles := nibbles_of(name))}
        row = {name: kl for name, kl in of_place.items() if nibbles_of(name) is None}
        for nibbles, cost in expected.items():
            near = min(measured, key=lambda m, c=cost: abs(math.log(expected[m] / c)))  # type: ignore[misc]
            row[f"{PREFIX}{nibbles}"] = measured[near] * cost / expected[near]
        found[layer, side] = row
    return found


def require_candidates(names: Sequence[str], config: ModelConfig, learned: Calibration | None = None) -> None:
    """Refuse candidates that the model does not take, or that store no token by itself.

    Args:
        learned: what `lrN` takes its coordinates from.
    Raises:
        InputError: naming the format.
    """
    for name in names:
        if plan_for(KVSpec(name, calibration=learned), config).windowed:
            raise InputError(
                f"{name} stores tokens in groups and brings its own tail; name candidates that store each by itself"
            )


def bits_per_value(kv: KVPlan, config: ModelConfig, context: int) -> float:
    """Bits of one number of K or V, all included, as allocated for one sequence of so many tokens."""
    shape, slots = (config.heads.num_kv_heads, config.heads.head_dim), BLOCK_SIZE * blocks_for(context)
    values = 2 * config.num_layers * config.heads.num_kv_heads * config.heads.head_dim * slots
    return 8 * cache_bytes(kv, context, *shape) / values


def size_of(kv: KVPlan, place: Place, head_dim: int, context: int) -> int:
    """Bytes of one place and KV head for one sequence, its tail and sinks included."""
    kv_format = kv.layers[place[0]][place[1] == "v"]
    packed = BLOCK_SIZE * blocks_for(context) * kv_format.bytes_per_vector(head_dim)
    window = kv.ring_tokens(kv_format) + kv.sink if kv.keeps(kv_format) else 0
    return round(packed) + KEPT_BYTES * head_dim * window


def with_format(plan: KVPlan, place: Place, name: str, learned: Calibration | None = None) -> KVPlan:
    """A plan with another format at one place.

    Args:
        learned: what `lrN` takes its coordinates from.
    """
    (layer, side), layers = place, list(plan.layers)
    k_format, v_format = layers[layer]
    kv_format = formats.get(name, side, learned)
    layers[layer] = (kv_format, v_format) if side == "k" else (k_format, kv_format)
    return replace(plan, layers=tuple(layers))


def cache_of(base: Session, plan: KVPlan) -> Session:
    """The baseline's model with another plan.

    Raises:
        InputError: the executor cannot run it, with its reason.
    """
    if reason := base.executor.supports(base.config, plan):
        raise InputError(f"executor {base.executor.name} cannot run {plan.describe()}: {reason}")
    return replace(base, plan=plan)
