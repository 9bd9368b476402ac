"""Reference, candidate, and what neither has rounded: is the candidate as near to the truth as rounding lets it be?

The same stage is run a third time without rounding to BF16. The candidate may be as far from that as the reference is, and its
errors, like the reference's, have no direction: what is too long or too short on the average is no rounding, however small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable
from haarkv.validation import bounds
from haarkv.validation.layers.chance import student_limit
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.windows import SLIPS, edges


@dataclass(frozen=True)
class Errors:
    """Sums over vectors: of errors along a direction, and of their squares in all.

    Attributes:
        along: of the candidate's difference from the reference.
        squares: of the same, squared vector by vector.
        own: of the reference's error along it, squared vector by vector; of FP32, what rounding is expected to make.
        size: of the direction, squared.
        samples: vectors.
        theirs, ours: squared distance of the candidate and of the reference from what is not rounded.
        floor: gains that are no fault whatever the chance.
    """

    along: float
    squares: float
    own: float
    size: float
    samples: int
    theirs: float
    ours: float
    floor: float

    def __add__(self, other: Errors) -> Errors:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return type(self)(**sums | {"floor": max(self.floor, other.floor)})

    @property
    def gain(self) -> float:
        """How much longer the candidate's vectors are along the direction than the reference's; 0.01 is one percent."""
        return self.along / self.size if self.size else 0.0

    @property
    def limit(self) -> float:
        """The largest gain that rounding explains, the smaller of two answers.

        One trusts that both sides round, each as the reference does: sqrt(2 * own), and Student's quantile of so many vectors.
        The other that an error of a vector is as likely up as down, whatever its size: sqrt(2 ln(2 / chance) * squares), by
        Hoeffding.
        """
        if not self.size:
            return math.inf
        by_rounding = math.sqrt(2 * self.own) * student_limit(self.samples) if self.own else 0.0
        by_sign = math.sqrt(2 * math.log(2 / bounds.CHANCE) * self.squares)
        return max(self.floor, min(by_rounding, by_sign) / self.size)

    @property
    def farther(self) -> float | None:
        """How many times as far from the truth the candidate is as the reference; None if the reference does not round."""
        return math.sqrt(self.theirs / self.ours) if self.ours else None

    @property
    def share(self) -> float:
        """The gain as a share of its limit; NaN if it is NaN."""
        return abs(self.gain) / self.limit


@dataclass(frozen=True)
class UnevenErrors(Errors):
    """The same along a direction that is long at a few vectors and short at all others.

    The reference's own errors at these few are too few to tell how much rounding gives. What part of its error lies along the
    direction is therefore taken from all vectors alike, and multiplied by the size of the error of each.

    Attributes:
        own: what rounding to FP32 makes along the direction, squared.
        samples: vectors at which the direction is not zero.
        parts: of the reference's errors that lie along the direction, squared, summed over these.
        expected: squares of the reference's errors times squares of the direction, summed.
        moved: vectors that a draw of rounded x moves, the mean of all draws.
        moved_parts, moved_expected: as `parts` and `expected`, of what the draws move.
        slack: sums along the direction that are no fault whatever the chance.
    """

    parts: float
    expected: float
    moved: float
    moved_parts: float
    moved_expected: float
    slack: float

    @property
    def limit(self) -> float:
        """The largest gain that rounding explains, as `Errors.limit`; the executor may be `bounds.FARTHER` from the truth."""
        if not self.size or not self.samples:
            return math.inf
        both = (1 + bounds.FARTHER**2) * self.expected * self.parts / self.samples
        one = self.own + self.moved_expected * self.moved_parts / max(self.moved, 1.0)
        by_rounding = math.sqrt(both + 2 * one) * student_limit(self.samples)
        by_sign = math.sqrt(2 * math.log(2 / bounds.CHANCE) * self.squares)
        return max(self.slack, min(by_rounding, by_sign)) / self.size


def uneven_errors(
    ours: Tensor, theirs: Tensor, exact: Tensor | None, direction: Tensor, slack: float, moved: Sequence[Tensor] = ()
) -> UnevenErrors:
    """Sum errors over vectors, as `errors`.

    Args:
        slack: see `UnevenErrors`.
    """
    d = direction.double()
    length = d.norm(dim=-1)

    def along(off: Tensor) -> tuple[int, float, float]:
        """Vectors, and `parts` and `expected` of them, of errors [..., N]."""
        size = off.norm(dim=-1)
        there = (length > 0) & (size > 0)
        part = ((off * d).sum(-1) / (length * size).clamp(min=1e-300))[there].square().sum()
        return int(there.sum()), float(part), float((length * size).square().sum())

    found = vars(errors(ours, theirs, exact, direction, 0.0)) | {"own": _by_fp32(ours.double(), d)}
    found["samples"], parts, expected = (int((length > 0).sum()), 0.0, 0.0) if exact is None else along(ours.double() - exact)
    by_draw = [along(by) for by in moved] or [(0, 0.0, 0.0)]
    count, moved_parts, moved_expected = (sum(values) / len(by_draw) for values in zip(*by_draw, strict=True))
    # Half a step is 1 / sqrt(3) of itself on average.
    return UnevenErrors(
        **found, parts=parts, expected=expected, moved=count, moved_parts=moved_parts, moved_expected=moved_expected / 3,
        slack=slack,
    )  # fmt: skip


_FP32_ROUNDING = 2 * 2.0**-48 / 3
"""Variance of a number that was rounded to FP32 twice, relative to its square: half a unit in its last place each time.
At a hidden state of 10,000, as pretrained models have in a few channels, it is more than many a layer adds elsewhere."""


def _by_fp32(a: Tensor, d: Tensor) -> float:
    """Variance of sums along d, of numbers a that both sides rounded to FP32."""
    return _FP32_ROUNDING * float((a * d).square().sum())


def errors(
    ours: Tensor, theirs: Tensor, exact: Tensor | None, direction: Tensor, floor: float, moved: Sequence[Tensor] = ()
) -> Errors:
    """Sum errors over vectors.

    Args:
        ours, theirs, direction: [..., N].
        exact: [..., N], not rounded; None if `ours` is not rounded either.
        floor: see `Errors`.
        moved: [..., N] fp64 of each draw, what half a step of rounded x moves `theirs` by, of `block_steps`.
    """
    a, b, d = ours.double(), theirs.double(), direction.double()
    # Of one side alone; half a step is 1 / sqrt(3) of that on average.
    of_steps = sum((float((by * d).sum(-1).square().sum()) for by in moved), 0.0) / max(1, len(moved)) / 3
    each, size, samples = ((b - a) * d).sum(-1), float(d.square().sum()), d[..., 0].numel()
    along, squares = float(each.sum()), float(each.square().sum())
    if exact is None:
        return Errors(along, squares, _by_fp32(a, d) + of_steps, size, samples, 0.0, 0.0, floor)
    e = exact.double()
    own, far, near = ((a - e) * d).sum(-1).square().sum(), (b - e).square().sum(), (a - e).square().sum()
    return Errors(along, squares, float(own) + of_steps, size, samples, float(far), float(near), floor)


def exact_result(call: Call, ops: OpTable) -> Tensor | None:
    """What an op makes of its inputs without rounding to BF16; None if it does not round. Attention reads the live cache."""
    if not isinstance(call.result, Tensor) or call.result.dtype == torch.float32:
        return None
    first, *rest = call.args
    if call.op == "silu_mul":
        return ops.silu_mul(first, rest[0], torch.float32)
    found: Tensor = getattr(ops, call.op)(first.float(), *rest)
    return found


def errors_of_op(
    call: Call, result: Tensor, ops: OpTable, kv_heads: int, moved: Sequence[Tensor] = ()
) -> dict[str, list[Errors]]:
    """Errors of an op that was given the reference's inputs, along its own result: of attention by KV head, else of all.

    Of attention also along what a larger softmax scale would change, and windows that end elsewhere.

    Args:
        moved: as in `errors`.
    """
    exact, ours = exact_result(call, ops), call.result
    if call.op != "paged_attention":
        return {"gain": [errors(ours, result, exact, ours, bounds.GAIN, moved)]}
    rounded = exact is not None
    floor = bounds.GAIN_BF16_ATTENTION if rounded else bounds.GAIN_FP32_ATTENTION
    parts = [_of_heads(x, kv_heads) for x in (ours, result, exact if exact is not None else ours)]
    steeper = _of_heads(by_scale(call, ops, ours if exact is None else exact), kv_heads)
    # Of few tokens, or equal ones, the scale changes little; an error of FP32's size is large beside that.
    scaled = [
        bounds.SCALE_BF16_ATTENTION if rounded else floor * max(1.0, float(result.norm() / along.norm().clamp(min=1e-30)))
        for result, along in zip(parts[0], steeper, strict=True)
    ]
    heads = [(parts[0][head], parts[1][head], parts[2][head] if rounded else None) for head in range(kv_heads)]
    found = {
        name: [errors(*each, along[head], at_least[head]) for head, each in enumerate(heads)]
        for name, along, at_least in (("gain", parts[0], [floor] * kv_heads), ("softmax scale", steeper, scaled))
    }
    for name, change in edges(ops, *call.args).items():
        ends = _of_heads(change, kv_heads)
        slack = _slack(floor, list(parts[0]), list(ends))
        found[name] = [uneven_errors(*each, ends[head], slack[head]) for head, each in enumerate(heads)]
    return found


def _slack(floor: float, results: list[Tensor], directions: list[Tensor]) -> list[float]:
    """Sums along directions, of results that are off by `floor` of themselves, all of it along these."""
    return [floor * float(result.norm()) * float(along.norm()) for result, along in zip(results, directions, strict=True)]


def _of_heads(x: Tensor, kv_heads: int) -> Tensor:
    """[T, Hq, D] -> [Hkv, T, G, D]."""
    return x.view(x.shape[0], kv_heads, -1, x.shape[-1]).transpose(0, 1)


_STEP = 2.0**-6


def by_scale(call: Call, ops: OpTable, exact: Tensor) -> Tensor:
    """What attention [T, Hq, D] changes by, per relative change of its softmax scale."""
    q, cache, layer, batch, scale = call.args
    return (ops.paged_attention(q.float(), cache, layer, batch, scale * (1 + _STEP)) - exact) / _STEP


def errors_of_layer(
    made: MadeLayer, ours: Tensor, theirs: Tensor, exact: Tensor | None, ops: OpTable, kv_heads: int,
    read: PagedKVCache | None = None, moved: Sequence[Tensor] = (),
) -> dict[str, list[Errors]]:  # fmt: skip
    """Errors of a whole layer's hidden states [T, hidden], along what its parts add to the residual stream.

    The parts: attention by KV head, and what all of the rest adds; and what a larger softmax scale would change, and by KV
    head what windows that end elsewhere would.

    Args:
        made: the layer as the reference ran it.
        read: the cache that the candidate's attention read; if none is given, the reference's own.
        moved: as in `errors`.
    """
    attention = next((call for call in made.calls if call.op == "paged_attention"), None)
    out = next((call for call in made.calls if call.stage == "o_proj"), None)
    rounded = exact is not None
    if attention is None or out is None:
        floor = bounds.GAIN_BF16_ATTENTION if rounded else bounds.GAIN_FP32_LAYER
        return {"layer": [errors(ours, theirs, exact, ours.double() - made.hidden_in.double(), floor, moved)]}

    def through(x: Tensor) -> Tensor:
        return ops.linear(x.flatten(1).to(out.args[0].dtype), out.args[1])

    attended: Tensor = attention.result
    each = [through(_only(attended, head, kv_heads)) for head in range(kv_heads)]
    mlp = ours.double() - made.hidden_in.double() - out.result
    plain = exact_result(attention, ops)
    steeper = by_scale(attention, ops, attended if plain is None else plain)
    floor, scaled = bounds.GAIN_FP32_LAYER, bounds.GAIN_FP32_LAYER
    if rounded:
        floor, scaled = bounds.GAIN_BF16_ATTENTION, bounds.SCALE_BF16_ATTENTION
    along = {
        "attention": ([sum(each[1:], each[0])], floor), "attention of a head": (_apart(each), floor), "MLP": ([mlp], floor),
        "softmax scale": ([through(steeper)], scaled),
    }  # fmt: skip
    found = {
        name: [errors(ours, theirs, exact, direction, at_least, moved) for direction in of]
        for name, (of, at_least) in along.items()
    }
    q, cache, *places = attention.args
    for name, change in edges(ops, q, read or cache, *places).items():
        ends = _apart([through(_only(change, head, kv_heads)) for head in range(kv_heads)])
        slack = _slack(floor, each, ends)
        found[name] = [uneven_errors(ours, theirs, exact, end, by, moved) for end, by in zip(ends, slack, strict=True)]
    return found


def guilty_head(found: dict[str, list[Errors]], ours: Tensor, theirs: Tensor) -> int | None:
    """The KV head whose attention is too large or too small, or whose window ends elsewhere, where that makes most of a
    layer's error; None if none does.

    Args:
        found: of `errors_of_layer`.
        ours, theirs: [T, hidden].
    """
    of_heads = found.get("attention of a head", [])
    if len(of_heads) < 2:
        return None
    gains, rest = [abs(part.gain) for part in of_heads], abs(found["MLP"][0].gain)
    most = max(range(len(gains)), key=gains.__getitem__)
    alone = all(10 * gain < gains[most] for gain in (*gains[:most], *gains[most + 1 :], rest))
    total = float((theirs.double() - ours.double()).square().sum())
    if alone and gains[most] ** 2 * of_heads[most].size > total / 4:
        return most
    for name in SLIPS:
        there = [head for head, part in enumerate(found.get(name, [])) if abs(part.gain - 1) < 1 / 2]
        if len(there) == 1 and found[name][there[0]].size > total / 4:
            return there[0]
    return None


def _apart(directions: list[Tensor]) -> list[Tensor]:
    """Each direction [T, hidden] without what it has in common with the others: what one head does is not laid to another."""
    flat = torch.stack([direction.double().flatten() for direction in directions])
    inverse = torch.linalg.pinv(flat @ flat.T)
    apart = inverse @ flat / inverse.diagonal().clamp(min=1e-300).unsqueeze(-1)
    return [row.view_as(direction) for row, direction in zip(apart, directions, strict=True)]


def _only(attended: Tensor, head: int, kv_heads: int) -> Tensor:
    """Attention [T, Hq, D] of one KV head, zero elsewhere."""
    kept = torch.zeros_like(attended)
    group = attended.shape[1] // kv_heads
    kept[:, head * group : (head + 1) * group] = attended[:, head * group : (head + 1) * group]
    return kept
