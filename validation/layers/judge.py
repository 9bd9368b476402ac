"""Judging one stage: equal, a tie, rounding or a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation import bounds
from haarkv.validation.bounds import LayerBounds
from haarkv.validation.layers.compare import LevelComparison, VectorComparison, compare_tokens, compare_vectors
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.parts import Stored, parts_of
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.reference import Noise
from haarkv.validation.layers.report import Reason, Verdict
from haarkv.validation.layers.slack import nearer
from haarkv.validation.layers.states import STATE, StateComparison, compare_states, state_of
from haarkv.validation.layers.trial import Strays


@dataclass(frozen=True)
class PartComparison:
    """One part of what a layer stores, as two executors stored it.

    Attributes:
        stage: that stores it.
        length: largest relative difference of a vector's length.
    """

    stage: str
    levels: LevelComparison
    length: float

    @property
    def different_share(self) -> float:
        """Of its coordinates."""
        return self.levels.different / self.levels.total


@dataclass(frozen=True)
class StoredComparison:
    """What one layer stored of two executors, part by part; parts that no token goes to are left out.

    Attributes:
        parts: of K and V.
        states: of a layer that keeps a state.
    """

    parts: dict[str, PartComparison]
    states: tuple[StateComparison, ...] = ()

    def match(self, side: str) -> float | None:
        """Share of equal levels of packed K or V; None where there are none."""
        return self.parts[side].levels.match if side in self.parts else None

    @property
    def state_error(self) -> float | None:
        """The largest of a state; None where there is none; NaN if one is."""
        return float(torch.tensor([state.error for state in self.states]).max()) if self.states else None

    @property
    def different(self) -> int:
        """Of all parts together."""
        return sum(part.levels.different for part in self.parts.values())

    @property
    def unexplained(self) -> int:
        """Of all parts together."""
        return sum(part.levels.unexplained for part in self.parts.values())

    @property
    def length_error(self) -> float:
        """The largest; NaN if one is."""
        return float(torch.tensor([0.0, *(part.length for part in self.parts.values())]).max())


def bounds_of(dtype: torch.dtype) -> LayerBounds:
    """The bounds for models of a dtype."""
    return bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16


def for_width(limits: LayerBounds, dtype: torch.dtype, hidden_size: int) -> LayerBounds:
    """The bounds for a model of a hidden size: where that is small, one rounded number of it turns K further."""
    if dtype == torch.float32:
        return limits
    return replace(limits, kv_noise=max(limits.kv_noise, bounds.BF16_TURN / hidden_size**0.5))


def together(verdict: Verdict) -> Verdict:
    """What was found of a whole layer whose ops are right one by one: a fault is the executor's way to run them together."""
    if verdict.reason != "fault":
        return verdict
    return replace(verdict, detail=f"{verdict.detail}; each op by itself is right, so the fault is in how the layer runs them")


def judge_op(
    call: Call, result: Any, intact: bool, limits: LayerBounds, allowed: Tensor | None = None, steps: Tensor | None = None
) -> Verdict:
    """One op that was given what the reference's was given.

    Args:
        allowed: by how much each vector of the result may differ beside its bound, of `slack.of_op`.
        steps: the same, of `block_steps.most`; it is a part of the bound that is said.
    """
    if not intact:
        return Verdict.broken(call.stage, "changed the inputs that it was given")
    ours = call.result
    if not isinstance(ours, Tensor):  # store_kv, which returns nothing
        return Verdict.broken(call.stage, f"returned {result!r}")
    if not isinstance(result, Tensor) or result.shape != ours.shape or result.dtype != ours.dtype:
        got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else repr(result)
        return Verdict.broken(call.stage, f"returned {got}, not {list(ours.shape)} {ours.dtype}")
    bound = limits.rounded_op if ours.dtype != torch.float32 else limits.op
    if call.op == "paged_attention":
        bound = limits.attention
    if steps is not None:
        return _judge_error(call.stage, torch.equal(ours, result), *beside(ours, result, bound, steps), "relative L2")
    if call.op == "gated_delta":
        bound = bounds.DELTA
    compared = compare_vectors(ours, result, allowed=allowed)
    verdict = _judge_error(call.stage, compared.identical, compared.rel_l2, bound, "relative L2")
    if verdict.reason == "fault" and call.op == "paged_attention":
        return replace(
            verdict,
            head=_guilty_head(ours, nearer(ours, result, allowed), call.args[1].shape(call.args[2]).num_kv_heads, bound),
        )
    return verdict


def _guilty_head(ours: Tensor, result: Tensor, kv_heads: int, bound: float) -> int | None:
    """The one KV head of attention [T, Hq, D] that is wrong; None if several are, or if there is one."""
    pairs = zip(ours.chunk(kv_heads, 1), result.chunk(kv_heads, 1), strict=True)
    wrong = [head for head, (a, b) in enumerate(pairs) if not compare_vectors(a, b).rel_l2 <= bound]
    return wrong[0] if len(wrong) == 1 < kv_heads else None


def _judge_error(stage: str, identical: bool, error: float, bound: float, what: str) -> Verdict:
    # A NaN is within no bound.
    reason: Reason | None = None if identical else "rounding" if error <= bound else "fault"
    return Verdict(stage, reason, error, bound, "" if identical else f"{what} {error:.2e}, bound {bound:.1e}")


def beside(ours: Tensor, theirs: Tensor, bound: float, steps: Tensor) -> tuple[float, float]:
    """The distance of the vector [..., N] that comes nearest to its bound, and that bound, both relative to its length.

    Args:
        bound: relative to a vector's length.
        steps: [...], what each may be off by as well.
    """
    a = ours.double()
    distance, length = (theirs.double() - a).norm(dim=-1).flatten(), a.norm(dim=-1).flatten().clamp(min=1e-300)
    error, most = distance / length, bound + steps.flatten() / length
    worst = int((error / most).argmax())  # a NaN is more than any
    return float(error[worst]), float(most[worst])


def compare_both(cache: PagedKVCache, made: MadeLayer, theirs: Stored, noise: Noise) -> StoredComparison:
    """Compare what an executor stored of a layer's K and V with the reference's, each part in its own format.

    Args:
        cache: whose formats they are stored in.
        theirs: what `take` finds.
        noise: as in `KVFormat.choice`.
    """
    if (state := state_of(cache, made.index)) is not None:
        return StoredComparison({}, compare_states(state, made.batch, made.stored[STATE], theirs[STATE]))
    compared, by_side = {}, noise if isinstance(noise, Mapping) else {"k": noise, "v": noise}
    for part in parts_of(cache, made.index):
        tokens = part.where(made.batch)[0]
        if len(tokens):
            x, allowed = part.given(made.k, made.v, made.batch), by_side[part.side]
            allowed = allowed[tokens] if isinstance(allowed, Tensor) else allowed
            both = compare_tokens(part.kv_format, made.index, made.stored[part.name], theirs[part.name], x, allowed)
            compared[part.name] = PartComparison(part.stage, *both)
    return StoredComparison(compared)


def judge_stored(
    compared: StoredComparison, strays: Strays, layer: int, limits: LayerBounds, kv_heads: int = 1
) -> list[Verdict]:
    """What a layer stored: places that it had no business with, then each part."""
    verdicts = judge_strays(strays, layer) + [_judge_state(state, limits) for state in compared.states]
    for part in compared.parts.values():
        levels, length = part.levels, part.length
        sound = levels.unexplained == 0 and length <= limits.length
        same = levels.different == 0 and length == 0
        reason: Reason | None = None if same else "fault" if not sound else "tie" if levels.different else "rounding"
        detail = (
            f"{levels.different} of {levels.total} differ, {levels.unexplained} of them unexplained; "
            f"length off by {length:.1e}, bound {limits.length:.1e}"
        )
        error = torch.inf if levels.unexplained else length
        head = levels.guilty[0] if reason == "fault" and len(levels.guilty) == 1 < kv_heads else None
        verdicts.append(Verdict(part.stage, reason, error, limits.length, "" if same else detail, head=head))
    return verdicts


def _judge_state(state: StateComparison, limits: LayerBounds) -> Verdict:
    if state.problem:
        return Verdict.broken(state.stage, state.problem)
    # Its numbers are FP32 sums, as attention's are in a model of FP32.
    verdict = _judge_error(state.stage, state.identical, state.error, limits.state, "relative L2 of a head")
    return replace(verdict, head=state.head) if verdict.fails else verdict


def judge_strays(strays: Strays, layer: int | None, who: str = "") -> list[Verdict]:
    """The verdict on what changed where nothing was to be written, if anything did.

    Args:
        layer: where it is looked for first; None for all layers alike.
        who: wrote it, where that is no layer.
    """
    at = {layer: strays[layer]} if layer in strays else strays
    found: dict[str, list[str]] = {}
    for number, parts in at.items():
        for name, places in parts.items():
            stage = {"k": "untouched_slots", "v": "untouched_slots", STATE: "untouched_state"}.get(name, "untouched_window")
            found.setdefault(stage, []).append(f"layer {number}, {name}: {_some(places)}")
    words = f"{who} wrote" if who else "wrote"
    return [
        Verdict.broken(stage, f"{words} where nothing was to be written: {'; '.join(found[stage])}") for stage in sorted(found)
    ]


def _some(places: list[str]) -> str:
    shown = ", ".join(places[:4])
    return f"{shown} and {len(places) - 4} more" if len(places) > 4 else shown


def judge_hidden(stage: str, compared: VectorComparison, limits: LayerBounds) -> Verdict:
    """Hidden states after a layer."""
    sound = compared.cosine >= limits.cosine and compared.rel_l2 <= limits.rel_l2 and compared.update <= limits.update
    reason: Reason | None = None if compared.identical else "rounding" if sound else "fault"
    detail = (
        f"lowest cosine {compared.cosine:.7f} (bound {limits.cosine:.8g}), relative L2 {compared.rel_l2:.2e} "
        f"({limits.rel_l2:.1e}), relative to what the layer adds {compared.update:.2e} ({limits.update:.1e})"
    )
    return Verdict(stage, reason, compared.rel_l2, limits.rel_l2, "" if compared.identical else detail)


def judge_logits(
    stage: str, expected: Tensor, logits: Tensor, problem: str, limits: LayerBounds, steps: Tensor | None = None
) -> Verdict:
    """Logits [B, vocab] of a whole forward against those of the head on its own last hidden state.

    Args:
        steps: [B], what each logit may be off by beside its bound, of `block_steps`.
    """
    if problem:
        return Verdict.broken(stage, problem)
    deviation = expected.std(dim=-1)
    error, bound = (logits - expected).abs().amax(-1) / deviation, torch.full_like(deviation, limits.logits)
    if steps is not None:
        bound = bound + steps / deviation
    worst = int((error / bound).argmax())
    what = "logits of the whole forward against the head on its own layers: largest difference / deviation"
    return _judge_error(stage, torch.equal(expected, logits), float(error[worst]), float(bound[worst]), what)
