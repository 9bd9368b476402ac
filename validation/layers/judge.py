"""Judging one stage: equal, a tie, rounding or a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.formats.numbers import Kind
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation import bounds
from haarkv.validation.bounds import LayerBounds
from haarkv.validation.layers.compare import LevelComparison, VectorComparison, compare_tokens, compare_vectors
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.report import FAILS, Reason
from haarkv.validation.layers.trial import Stored


@dataclass(frozen=True)
class Verdict:
    """What was found at one stage.

    Attributes:
        reason: None if there is not a bit of difference.
        error, bound: the figure that comes nearest to its bound, and that bound.
        head, stages, causes: as in `Finding`.
    """

    stage: str
    reason: Reason | None
    error: float
    bound: float
    detail: str
    head: int | None = None
    stages: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether it fails a run."""
        return self.reason in FAILS


@dataclass(frozen=True)
class StoredComparison:
    """K and V of one layer as two executors stored them."""

    k: LevelComparison
    v: LevelComparison
    k_length: float
    v_length: float

    @property
    def unexplained(self) -> int:
        """Of K and V together."""
        return self.k.unexplained + self.v.unexplained

    @property
    def length_error(self) -> float:
        """The larger one; NaN if either is."""
        return float(torch.tensor([self.k_length, self.v_length]).max())


def bounds_of(dtype: torch.dtype) -> LayerBounds:
    """The bounds for models of a dtype."""
    return bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16


def first(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The first fault; without one, the first difference; None if there is none."""
    different = [v for v in verdicts if v.reason]
    return next((v for v in different if v.fails), different[0] if different else None)


def together(verdict: Verdict) -> Verdict:
    """What was found of a whole layer whose ops are right one by one: a fault is the executor's way to run them together."""
    if verdict.reason != "fault":
        return verdict
    return replace(verdict, detail=f"{verdict.detail}; each op by itself is right, so the fault is in how the layer runs them")


def judge_op(call: Call, result: Any, intact: bool, limits: LayerBounds) -> Verdict:
    """One op that was given what the reference's was given."""
    if not intact:
        return Verdict(call.stage, "fault", torch.inf, 0.0, "changed the inputs that it was given")
    ours = call.result
    if not isinstance(ours, Tensor):  # store_kv, which returns nothing
        return Verdict(call.stage, "fault", torch.inf, 0.0, f"returned {result!r}")
    if not isinstance(result, Tensor) or result.shape != ours.shape or result.dtype != ours.dtype:
        got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else repr(result)
        return Verdict(call.stage, "fault", torch.inf, 0.0, f"returned {got}, not {list(ours.shape)} {ours.dtype}")
    bound = limits.rounded_op if ours.dtype != torch.float32 else limits.op
    if call.op == "paged_attention":
        bound = max(limits.attention, bounds.RESTORED_TO_BF16_ATTENTION if _restores(*call.args[1:3]) else 0.0)
    compared = compare_vectors(ours, result)
    verdict = _judge_error(call.stage, compared.identical, compared.rel_l2, bound, "relative L2")
    if verdict.reason == "fault" and call.op == "paged_attention":
        return replace(verdict, head=_guilty_head(ours, result, call.args[1].num_kv_heads, bound))
    return verdict


def _restores(cache: PagedKVCache, layer: int) -> bool:
    """Whether vectors of a layer are restored to BF16 before they are attended to."""
    sides = [kv_format.numbers(cache.head_dim) for kv_format in (cache.k_format(layer), cache.v_format(layer))]
    return any(numbers and numbers.kind is Kind.RESTORED for numbers in sides)


def _guilty_head(ours: Tensor, result: Tensor, kv_heads: int, bound: float) -> int | None:
    """The one KV head of attention [T, Hq, D] that is wrong; None if several are, or if there is one."""
    pairs = zip(ours.chunk(kv_heads, 1), result.chunk(kv_heads, 1), strict=True)
    wrong = [head for head, (a, b) in enumerate(pairs) if not compare_vectors(a, b).rel_l2 <= bound]
    return wrong[0] if len(wrong) == 1 < kv_heads else None


def _judge_error(stage: str, identical: bool, error: float, bound: float, what: str) -> Verdict:
    # A NaN is within no bound.
    reason: Reason | None = None if identical else "rounding" if error <= bound else "fault"
    return Verdict(stage, reason, error, bound, "" if identical else f"{what} {error:.2e}, bound {bound:.1e}")


def compare_both(
    cache: PagedKVCache, layer: int, ours: Stored, theirs: Stored, k: Tensor, v: Tensor, noise: float | Tensor
) -> StoredComparison:
    """Compare K and V of a layer, each in its own format.

    Args:
        cache: whose formats they are stored in.
        k, v: [T, Hkv, D] fp32, what `ours` was quantized from.
        noise: as in `KVFormat.choice`.
    """
    k_compared, k_length = compare_tokens(cache.k_format(layer), layer, ours["k"], theirs["k"], k, noise)
    v_compared, v_length = compare_tokens(cache.v_format(layer), layer, ours["v"], theirs["v"], v, noise)
    return StoredComparison(k_compared, v_compared, k_length, v_length)


def judge_stored(
    compared: StoredComparison, strays: dict[int, list[int]], layer: int, limits: LayerBounds, kv_heads: int = 1
) -> list[Verdict]:
    """What a layer stored: slots that it had no business with, then K, then V."""
    verdicts = []
    if strays:
        where = ", ".join(f"layer {at}: {_slots(slots)}" for at, slots in strays.items() if at == layer) or "; ".join(
            f"layer {at}: {_slots(slots)}" for at, slots in strays.items()
        )
        verdicts.append(Verdict("untouched_slots", "fault", torch.inf, 0.0, f"wrote where nothing was to be written: {where}"))
    for side, levels, length in (("k", compared.k, compared.k_length), ("v", compared.v, compared.v_length)):
        sound = levels.unexplained == 0 and length <= limits.length
        same = levels.different == 0 and length == 0
        reason: Reason | None = None if same else "fault" if not sound else "tie" if levels.different else "rounding"
        detail = (
            f"{levels.different} of {levels.total} differ, {levels.unexplained} of them unexplained; "
            f"length off by {length:.1e}, bound {limits.length:.1e}"
        )
        error = torch.inf if levels.unexplained else length
        head = levels.guilty[0] if reason == "fault" and len(levels.guilty) == 1 < kv_heads else None
        verdicts.append(Verdict(f"store_kv.{side}", reason, error, limits.length, "" if same else detail, head=head))
    return verdicts


def _slots(slots: list[int]) -> str:
    shown = ", ".join(map(str, slots[:4]))
    return f"slots {shown} and {len(slots) - 4} more" if len(slots) > 4 else f"slots {shown}"


def judge_hidden(stage: str, compared: VectorComparison, limits: LayerBounds) -> Verdict:
    """Hidden states after a layer."""
    sound = compared.cosine >= limits.cosine and compared.rel_l2 <= limits.rel_l2 and compared.update <= limits.update
    reason: Reason | None = None if compared.identical else "rounding" if sound else "fault"
    detail = (
        f"lowest cosine {compared.cosine:.7f} (bound {limits.cosine:.8g}), relative L2 {compared.rel_l2:.2e} "
        f"({limits.rel_l2:.1e}), relative to what the layer adds {compared.update:.2e} ({limits.update:.1e})"
    )
    return Verdict(stage, reason, compared.rel_l2, limits.rel_l2, "" if compared.identical else detail)


def judge_logits(stage: str, expected: Tensor, logits: Tensor, problem: str, limits: LayerBounds) -> Verdict:
    """Logits [B, vocab] of a whole forward against those of the head on its own last hidden state."""
    if problem:
        return Verdict(stage, "fault", torch.inf, 0.0, problem)
    error = float(((logits - expected).abs().amax(-1) / expected.std(dim=-1)).max())
    what = "logits of the whole forward against the head on its own layers: largest difference / deviation"
    return _judge_error(stage, torch.equal(expected, logits), error, limits.logits, what)
