"""How often rounding makes two honest executors differ: the chance of each tie, and of so many together.

Two executors that round at the same points differ where their FP32 sums, taken in another order, lead a number to the other
side of a rounding point or of a boundary between two levels. How often that happens follows from the FP32 noise alone. The
reference runs a layer again with such noise, up to the K and V that it stores; the noise is larger by the factors of
`bounds.AMPLIFIED`. What it moves a coordinate by, divided by the distance between two boundaries, is the chance of a tie; the
chance grows with the noise, so it is divided by the factor again. That needs no formula for what lies between, and a rare tie
that moves much (an input of the projections that falls to the other BF16 neighbour) is seen as well as many that move little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Blocks, Weight
from haarkv.validation import bounds
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.parts import parts_of
from haarkv.validation.layers.reference import Moved

_ULP = 2.0**-24
_THETA = torch.linspace(0.05, 14.0, 120, dtype=torch.float64)


@dataclass(frozen=True)
class Chances:
    """What noise does to each stored vector of one part of a layer: of FP32, amplified, in the first runs, `bounds.AMPLIFIED`;
    of steps of x, if these are rounded, in those that follow.

    Attributes:
        levels: [runs, T, H] fp64: the chance that any level differs.
        lengths: the same of the stored length, the levels being equal.
    """

    levels: Tensor
    lengths: Tensor

    def __getitem__(self, heads: slice) -> Chances:
        return Chances(self.levels[..., heads], self.lengths[..., heads])


class _StoredError(Exception):
    """Carries K and V out of a layer that need not run any further."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.pair = (k, v)


def _stop(k: Tensor, v: Tensor, *_: object) -> NoReturn:
    raise _StoredError(k, v)


def noisy(ops: OpTable, noise: float, generator: torch.Generator) -> OpTable:
    """An op table whose FP32 arithmetic is off as an honest device's may be, times `noise`; it ends with `store_kv`.

    A sum of n products taken one after the other is off by 2**-24 * sqrt(n / 6) of the products' root of summed squares: each
    partial sum is rounded, and partial sums grow with the root of their number. An approximate reciprocal root is good for
    2**-22.
    """

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = ops.rms_norm(x.float(), weight, eps)
        return (wide * (1 + noise * _ULP * (4 * normal(wide[..., :1]) + normal(wide)))).to(x.dtype)

    def linear(x: Tensor, weight: Weight) -> Tensor:
        y = ops.linear(x, weight)
        if isinstance(weight, Blocks):
            # A sum of products with normal numbers has the same spread, and needs no squares of what is restored.
            return y + noise * _ULP * math.sqrt(x.shape[-1] / 6) * ops.linear(x.float() * normal(x), weight)
        spread = (x.float().square() @ weight.float().square().T).sqrt()
        return y + noise * _ULP * math.sqrt(x.shape[-1] / 6) * spread * normal(y)

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = ops.rope(x, cos, sin)
        return y * (1 + noise * _ULP * normal(y))

    return with_ops(ops, {"rms_norm": rms_norm, "linear": linear, "rope": rope, "store_kv": _stop})


def chances_of_layer(
    model: DecoderModel, ops: OpTable, cache: PagedKVCache, made: MadeLayer, steps: Moved | None = None
) -> dict[str, Chances]:
    """The chances of K and V that a layer makes of its hidden states, by part; `ops` are the reference's.

    Args:
        steps: what rounding x moves them by. It moves them every time and smoothly, so that nothing has to be amplified.
    """
    generator = torch.Generator().manual_seed(made.index)
    moved = []
    for noise in bounds.AMPLIFIED:
        try:
            span = range(made.index, made.index + 1)
            model.layers(made.hidden_in, span, made.batch, cache, noisy(ops, noise, generator))
        except _StoredError as stored:
            moved.append(stored.pair)
    if steps is not None:
        # Half a step is 1 / sqrt(3) of itself on average.
        pairs = zip(steps.k, steps.v, strict=True)
        moved += [((made.k + k / math.sqrt(3)).float(), (made.v + v / math.sqrt(3)).float()) for k, v in pairs]
    return _chances(cache, made, moved, generator)


def chances_of_store(cache: PagedKVCache, made: MadeLayer) -> dict[str, Chances]:
    """The chances where the layer's K and V were given, and only quantizing them is off, by part."""
    pair = made.k, made.v
    return _chances(cache, made, [pair] * len(bounds.AMPLIFIED), torch.Generator().manual_seed(made.index))


def _chances(
    cache: PagedKVCache, made: MadeLayer, moved: Sequence[tuple[Tensor, Tensor]], generator: torch.Generator
) -> dict[str, Chances]:
    runs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    plain = [1.0] * (len(moved) - len(bounds.AMPLIFIED))
    for pair, noise in zip(moved, (*bounds.AMPLIFIED, *plain), strict=True):
        for part in parts_of(cache, made.index):
            x, y = (part.given(*vectors, made.batch) for vectors in ((made.k, made.v), pair))
            runs.setdefault(part.name, []).append(_of_part(part.kv_format, made.index, x, y, noise, generator))
    return {name: Chances(*map(torch.stack, zip(*pairs, strict=True))) for name, pairs in runs.items()}


def _of_part(
    kv_format: KVFormat, layer: int, x: Tensor, y: Tensor, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Chances [T, H] that levels and lengths of x [T, H, D] differ, of which noise made y.

    A number that is kept in FP32 differs wherever sums are taken in another order, so one is expected, whatever the noise that
    chances are divided by. Whether it is off in one direction is judged elsewhere.
    """
    # Quantizing takes sums, too: of D squares, and of D products with a column of the rotation.
    of_sums = noise * _ULP * math.sqrt(x.shape[-1] / 6)
    y = y * (1 + of_sums * torch.randn(y.shape, generator=generator))
    x, y = x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()
    fields = kv_format.quantize(x, layer)
    other = kv_format.quantize(y, layer)
    levels = kv_format.levels(fields)
    first = kv_format.choice(x, layer, 0.0, levels)
    if levels is None or first is None:
        stored = next(iter(fields.values()))
        if stored.dtype == torch.float32:
            return torch.full_like(x[..., 0], noise, dtype=torch.float64).T, torch.zeros_like(x[..., 0]).double().T
        step = torch.ldexp(torch.full_like(x, torch.finfo(stored.dtype).eps), torch.frexp(x).exponent - 1)
        width, differs = ((y - x).abs() / step.clamp(min=1e-38)).sum(-1), (next(iter(other.values())) != stored).any(-1)
        return _chance(width, differs).T, torch.zeros_like(width.double()).T
    second = kv_format.choice(y, layer, 0.0, levels)
    assert second is not None
    inner = first.boundaries.diff() if len(first.boundaries) > 1 else first.value.abs().mean().view(1)
    cell = inner[(levels.long() - 1).clamp(0, len(inner) - 1)]
    again = kv_format.levels(other)
    assert again is not None
    differs = (again != levels).any(-1)
    of_levels = _chance(((second.value - first.value).abs() / cell).sum(-1), differs)
    dtypes = [field.dtype for field in fields.values() if field.dtype.is_floating_point]
    length = x.double().norm(dim=-1)
    if torch.float32 in dtypes:
        return of_levels.T, torch.where(length > 0, float(noise), 0.0).double().T
    steps = [torch.finfo(dtype).eps / 2 for dtype in dtypes]
    off = (y.double().norm(dim=-1) / length - 1).abs() + of_sums * torch.randn(length.shape, generator=generator).abs()
    of_lengths = torch.where(length > 0, 1 - torch.exp(-off / max(steps)), 0.0) if steps else torch.zeros_like(length)
    return of_levels.T, of_lengths.T


def _chance(width: Tensor, differs: Tensor) -> Tensor:
    """The expected number of ties is smooth; what the noisy run did to this very vector counts where it is more."""
    return torch.maximum(1 - torch.exp(-width.double()), differs.double())


def log10_of_so_many(count: int, chances: Tensor) -> float:
    """log10 of a bound on the chance that rounding alone makes `count` vectors differ (Chernoff).

        P <= min over t of exp(margin * sum over tokens of mean over runs (exp(m * (e**t - 1)) - 1) / noise - t * count)

    where m is the expected number in one token's vectors of a noisy run. A token is as in a noisy run with a chance of
    1 / noise, else as in the reference. Its vectors go together: one input that falls to the other neighbour moves them all.

    Args:
        chances: [runs, T, n] fp64, of each token's vectors, amplified.
    """
    if count == 0:
        return 0.0
    each = chances.sum(-1)
    grown = (torch.expm1(each.unsqueeze(-1) * torch.expm1(_THETA)).sum(1) * _shares(len(each)).unsqueeze(-1)).sum(0)
    exponent = bounds.TIE_MARGIN * grown - _THETA * count
    return min(0.0, float(exponent.nan_to_num(nan=torch.inf).min()) / math.log(10))


def expected(chances: Tensor) -> float:
    """The number of vectors that rounding is expected to make differ: [runs, T, n], amplified."""
    return float((chances.sum((1, 2)) * _shares(len(chances))).sum())


def _shares(runs: int) -> Tensor:
    """[runs]: what a run's chances count. Those of both kinds of noise are added; of each, the mean of its runs is taken."""
    amplified = torch.tensor(bounds.AMPLIFIED, dtype=torch.float64)
    of_fp32, more = 1 / (amplified * len(amplified)), runs - len(amplified)
    return torch.cat([of_fp32, torch.full((more,), 1 / max(more, 1), dtype=torch.float64)])


def student_limit(samples: int) -> float:
    """What the mean of so many samples, in its own standard errors, exceeds with a chance below `bounds.CHANCE`.

    sqrt(n * (chance ** (-2 / n) - 1)), an upper bound of Student's quantile; sqrt(2 ln(1 / chance)) of many.
    """
    if samples < 1:
        return math.inf
    exponent = -2 * math.log(bounds.CHANCE) / samples
    return math.sqrt(samples * math.expm1(exponent)) if exponent < 600 else math.inf


def one_sided(values: Tensor, alike: Tensor | None = None) -> float:
    """log10 of a bound on the chance that independent errors, each as likely up as down, add up to so much (Hoeffding).

        P <= 2 exp(-s**2 / 2), s = |sum| / sqrt(sum of squares), whatever their sizes

    Args:
        values: [n], one of each token.
        alike: [n] int64, the same number for tokens that err together: those of one vector. V of the first layer is one
            vector a token of the vocabulary.
    """
    if alike is not None:
        _, which = torch.unique(alike, return_inverse=True)
        values = torch.zeros(int(which.max()) + 1 if len(which) else 0, dtype=torch.float64).index_add(
            0, which, values.double()
        )
    size = float(values.double().square().sum())
    if size == 0:
        return 0.0
    return min(0.0, (math.log(2) - float(values.double().sum()) ** 2 / size / 2) / math.log(10))


def stored_differently(
    kv_format: KVFormat, layer: int, ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Which vectors two executors store differently.

    Args:
        ours, theirs: fields [T, Hkv, *].
    Returns:
        [T, Hkv] bool: another level, or another number; bool: the same levels and another length; fp64: the relative
        difference of the lengths.
    """
    a, b = by_token(ours), by_token(theirs)
    first, second = kv_format.levels(a), kv_format.levels(b)
    if first is None or second is None:
        different = torch.stack([(a[name] != b[name]).flatten(2).any(-1) for name in a]).any(0)
    else:
        different = (first != second).any(-1)
    one, other = kv_format.lengths(a, layer), kv_format.lengths(b, layer)
    off = torch.where(one > 0, (other - one) / one.clamp(min=1e-300), 0.0)
    return different.T, ((off != 0) & ~different).T, off.T
