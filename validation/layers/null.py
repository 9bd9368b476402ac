"""The judge's statistics: how far an executor's figures lie outside the figures of honest runs of the reference.

An honest run is the reference as another correct device may compute it: with rounding noise in sums, and rounding at other
points. For each stage and KV head, sixteen honest runs give the mean and spread of a few figures; `excess` divides a figure of
the executor by the limit that follows. If a correct device rounds elsewhere, change `honest`, not the limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import LARGEST, Blocks, Weight, weight_numbers
from haarkv.validation import bounds

RUNS = 16
"""Number of honest runs."""
_MANY = 32
"""From this number of tokens on, only two honest runs of each kind are computed; `resample_runs` draws sixteen from them.
Kinds round attention at different points (`honest`)."""


class Figure(NamedTuple):
    """A figure of one stage and KV head; head -1: all heads, or a stage without heads.

    Kinds. "energy": squared distance from the reference; 1 is fourteen numbers off by one rounding each. "gain": relative
    excess of a result's size. "slip NAME": share of a known mistake in the result. "changed": number of levels that differ.
    "leaps": number of stored vectors that are too far off (`judge`). "length": relative change of lengths at equal levels.
    """

    stage: str
    head: int
    kind: str


Rows = Mapping[Figure, Tensor]
"""Figure -> [n, 3] fp64, a row for each token. Gain and slip: numerator, denominator, and a sum of fourth powers (`by_ties`).
Other kinds: the number, 0, 0.
"""
RunRows = Mapping[Figure, Tensor]
"""Figure -> [n, runs, 3] fp64: `Rows` of several honest runs."""
Sums = Mapping[Figure, Tensor]
"""Figure -> `Rows` summed over tokens and forwards: [3] fp64 of an executor, [RUNS, 3] of all honest runs."""


def add_sums(one: Sums, other: Sums) -> Sums:
    """The sums over two forwards."""
    return {**one, **{figure: one[figure] + sums if figure in one else sums for figure, sums in other.items()}}


def value(figure: Figure, sums: Tensor) -> Tensor:
    """A figure's value from sums [..., 3]: for a gain or slip numerator / denominator, for other kinds the first sum."""
    top, bottom = sums[..., 0], sums[..., 1]
    return torch.where(top == 0, 0.0, top / bottom) if figure.kind == "gain" or figure.kind.startswith("slip") else top


def by_ties(sums: Tensor) -> float:
    """By how much ties may change a gain or slip: (sum d**4)**(1/4) over the sum of d**2, where d are the numbers of the
    result in units of one rounding. That is enough for one rounding of the largest number, or for roundings with random signs
    of √n among n equal numbers.
    """
    _, bottom, fourth = sums.tolist()
    return fourth**0.25 / bottom if bottom else 0.0


def excess(figure: Figure, candidate: float, honest: Sequence[float], rounds: bool, ties: float = 0.0) -> float:
    """A figure divided by its limit from honest runs; above 1 is a fault. `rounds`: a device may round centroids to FP16."""
    if not math.isfinite(candidate):
        return math.inf
    mean = sum(honest) / len(honest)
    spread = math.sqrt(sum((x - mean) ** 2 for x in honest) / (len(honest) - 1))
    if figure.kind == "energy":
        return candidate / (bounds.FARTHER**2 * (mean + bounds.SIGMAS * spread) + 1)
    if figure.kind == "leaps":
        return math.inf if candidate else 0.0
    if figure.kind == "changed":  # a count: a small one follows Poisson's distribution
        often = 2 * mean + 0.5
        most = max(often + bounds.POISSON_SIGMAS * math.sqrt(often), bounds.FARTHER * (mean + bounds.SIGMAS * spread))
        return candidate / (most + bounds.TIES)
    least = bounds.LEAST[figure.kind.partition(" ")[0]]
    if rounds and figure.kind == "gain" and figure.stage in ("paged_attention", "attention_mlp"):
        least = bounds.FP16_GAIN
    # Every figure between 0 (the reference) and the honest mean is right: near a tie, all honest runs may round the same way.
    nearest = min(max(candidate, min(mean, 0.0)), max(mean, 0.0))
    return abs(candidate - nearest) / (max(least, bounds.FARTHER * bounds.SIGMAS * spread) + ties)


@dataclass
class Null:
    """The null hypothesis, that the executor is right, as honest runs of one layer: `runs` of the present forward, `totals`
    over counted forwards (`candidate`: the executor).

    Attributes:
        reach: part -> [Hkv, n], the largest distance of an honest run's K or V from the reference's, in the format's norm.
    """

    runs: Sums = field(default_factory=dict)
    reach: Mapping[str, Tensor] = field(default_factory=dict)
    totals: Sums = field(default_factory=dict)
    candidate: Sums = field(default_factory=dict)

    def excesses(self, candidate: Sums, rounds: bool) -> dict[Figure, float]:
        """`excess` of each figure of the present forward."""
        excesses, none = {}, torch.zeros(RUNS, 3, dtype=torch.float64)
        for figure, sums in candidate.items():
            runs = value(figure, self.runs.get(figure, none)).tolist()
            excesses[figure] = excess(figure, float(value(figure, sums)), runs, rounds, by_ties(sums))
        return excesses

    def add(self, candidate: Sums) -> None:
        """Add the present forward, in which no fault was found, to the totals."""
        self.totals, self.candidate = add_sums(self.totals, self.runs), add_sums(self.candidate, candidate)

    def total_excesses(self, rounds: bool) -> dict[Figure, float]:
        """`excess` of each figure, summed over the counted forwards."""
        return Null(self.totals).excesses(self.candidate, rounds)


# -- Figures -----------------------------------------------------------------------------------------------------------------
Slips = Mapping[str, Tensor]
"""Name of a known mistake -> the change that it makes to a result."""


def by_head(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """A result [T, H, *] split by KV head; in one piece if `heads` is 0."""
    return x.float().chunk(heads, 1) if heads else (x.float(),)


def number_figures(
    stage: str, ours: Tensor, theirs: Tensor, heads: int = 0, slips: Slips | None = None, step: Tensor | None = None
) -> Iterator[tuple[Figure, Tensor]]:
    """Figures of a stage whose result is numbers, [T, H, *] or [T, N].

    Args:
        ours, theirs: the reference's result and the other's.
        heads: number of KV heads along the second axis; 0 for none.
        slips: changes in ours' shape; a name that ends in ` @3` belongs to KV head 3.
        step: change of each number by one rounding; unless given, `bounds.STEP` times the largest number.
    """
    steps = by_head(step, heads) if step is not None else (None,) * max(heads, 1)
    off = (theirs.float() - ours.float()) if theirs.shape == ours.shape else torch.full_like(ours, torch.nan)
    weights = []
    places = range(heads) if heads else (-1,)
    for head, part, reference, unit in zip(places, by_head(off, heads), by_head(ours, heads), steps, strict=True):
        unit = (bounds.STEP[ours.dtype] * reference.abs().max()) if unit is None else unit
        weight = torch.where(unit > 0, 1 / unit, 0.0)
        energy = part * weight if bool((unit > 0).any()) else part
        yield Figure(stage, head, "energy"), pad_counts(energy.flatten(1).square().sum(-1) / bounds.TIES)
        yield Figure(stage, head, "gain"), _inner_products(part * weight, reference * weight)
        weights.append(weight)
    for name, direction in (slips or {}).items():
        whole = float(direction.float().square().sum())
        for head, part, slip_direction, weight in zip(
            places, by_head(off, heads), by_head(direction, heads), weights, strict=True
        ):
            if float(slip_direction.square().sum()) > 1e-3 * whole / max(heads, 1):
                place = int(name.rpartition("@")[2]) if "@" in name else head
                yield (
                    Figure(stage, place, f"slip {name.partition(' @')[0]}"),
                    _inner_products(part * weight, slip_direction * weight),
                )


def _inner_products(off: Tensor, direction: Tensor) -> Tensor:
    """[n, 3] fp64, `Rows` of a gain or slip: off * direction, direction**2 and direction**4, each summed over [*]."""
    squares = direction.square()
    sums = (off * direction, squares, squares.square())
    return torch.stack([x.flatten(1).sum(-1) for x in sums], 1).double()


def pad_counts(numbers: Tensor) -> Tensor:
    """[n, 3] fp64, `Rows` of numbers [n] that are no ratio."""
    return torch.nn.functional.pad(numbers.double()[:, None], (0, 2))


def by_figure(pairs: Iterable[tuple[Figure, Tensor]]) -> Rows:
    """Figure -> rows; if a figure occurs twice, its rows are concatenated."""
    rows: dict[Figure, list[Tensor]] = {}
    for figure, part in pairs:
        rows.setdefault(figure, []).append(part)
    return {figure: torch.cat(parts) if len(parts) > 1 else parts[0] for figure, parts in rows.items()}


def split_runs(pairs: Iterable[tuple[Figure, Tensor]], runs: int) -> RunRows:
    """`RunRows` of runs that were computed at once; their rows go token by token, and run by run within a token."""
    return {figure: rows.reshape(-1, runs, 3) for figure, rows in by_figure(pairs).items()}


def stacked(runs: Sequence[Rows]) -> RunRows:
    """`RunRows` of runs that were computed one by one."""
    return {figure: torch.stack([run[figure] for run in runs], 1) for figure in runs[0]}


def repeat_rows(x: Tensor, runs: int) -> Tensor:
    """[n * runs, *] of [n, *]: each row `runs` times."""
    return x.repeat_interleave(runs, 0) if runs > 1 else x


def collect_sums(pairs: Iterable[tuple[Figure, Tensor]]) -> Sums:
    """The sums of figures over tokens."""
    return {figure: rows.sum(0) for figure, rows in by_figure(pairs).items()}


def num_honest_runs(tokens: int, attention: torch.dtype = torch.float32) -> int:
    """Number of honest runs that are computed for `tokens` tokens: 16, or two of each kind. BF16 attention has two kinds."""
    return RUNS if tokens < _MANY else 2 if attention == torch.float32 else 4


def resample_runs(rows: RunRows) -> Sums:
    """Sums of sixteen honest runs, from all sixteen or from two of each kind.

    From two, a run is drawn token by token: their mean plus or minus (at random) their difference / sqrt(2). As many are
    drawn of each kind.
    """
    generator, sums = torch.Generator().manual_seed(0), {}
    for figure, numbers in rows.items():
        tokens, runs, _ = numbers.shape
        sums[figure] = numbers.sum(0)
        if runs < RUNS:
            one, other = numbers.chunk(2, 1)  # [n, kinds, 3]
            signs = 2 * torch.randint(2, (2 * RUNS // runs, tokens, runs // 2), generator=generator).double() - 1
            off = torch.einsum("rtk,tkn->rkn", signs, one - other) / math.sqrt(2)
            sums[figure] = (sums[figure].view(2, -1, 3).sum(0) / 2 + off).flatten(0, 1)
    return sums


# -- Honest runs -------------------------------------------------------------------------------------------------------------
_ULP = 2 * 2.0**-24
"""Twice FP32's unit of rounding, because the order in which a device adds is unknown."""


def repeated_batch(batch: Batch, runs: int) -> Batch:
    """A batch with each token `runs` times in a row, at the same position; for reading, not for storing."""
    positions, slots = (repeat_rows(x, runs) for x in (batch.positions, batch.slot_mapping))
    return replace(batch, positions=positions, slot_mapping=slots, query_start_loc=runs * batch.query_start_loc)


def _of_one_run(batch: Batch, runs: int) -> Batch:
    """The inverse of `repeated_batch`."""
    positions, slots = batch.positions[::runs], batch.slot_mapping[::runs]
    return replace(batch, positions=positions, slot_mapping=slots, query_start_loc=batch.query_start_loc // runs)


def honest(
    ops: OpTable, seed: int, runs: int = 1, tokens: int | None = None, blocks: Callable[[object], bool] = lambda _: False
) -> OpTable:
    """An op table of honest runs: the reference's ops with noise. Results have T * runs rows, all runs of a token in a row.

    Args:
        seed: seed of the noise. Runs r with odd seed + r round BF16 attention only once, at its end.
        tokens: T if arguments hold the rows of all runs, None if those of one. `store_kv` and `gated_delta` always get all.
        blocks: whether the executor rounds x to integers for products with this weight.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator)

    def each(x: Tensor) -> Tensor:
        return repeat_rows(x, runs) if tokens is None else x

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = each(ops.rms_norm(x.float(), weight, eps))
        return (y * (1 + _ULP * (4 * noise(y[..., :1]) + noise(y)))).to(x.dtype)

    def linear(x: Tensor, weight: Weight) -> Tensor:
        # The size of the noise follows from the terms of each sum; the rows of the first run are enough for that.
        spread = _spread(x[::runs] if tokens is not None and len(x) == runs * tokens else x, weight)
        if isinstance(weight, Blocks) and blocks(weight):
            x = each(x)
            noisy_x = (x.double() + (2 * torch.rand(x.shape, generator=generator) - 1) * half_steps(x, weight)).float()
            y = ops.linear(noisy_x, weight)
        else:
            y = each(ops.linear(x, weight))
        spread = spread if len(spread) == len(y) else repeat_rows(spread, runs)
        return y + _ULP * math.sqrt(x.shape[-1] / 6) * spread * noise(spread)

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = each(ops.rope(x, cos, sin))
        return y * (1 + _ULP * noise(y))

    def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
        k, v = (x + 2 * _ULP * x.square().mean(-1, keepdim=True).sqrt() * noise(x) for x in map(each, (k, v)))
        ops.store_kv(k, v, at)

    def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
        one, q = at.batch if tokens is None else _of_one_run(at.batch, runs), each(q)

        def attend(q: Tensor, runs: int) -> Tensor:
            return ops.paged_attention(q, replace(at, batch=repeated_batch(one, runs)), softmax_scale)

        wide = attend(q.float() * (1 + 8 * _ULP * noise(q)), runs)
        out = (wide * (1 + 8 * _ULP * noise(wide))).to(q.dtype)
        twice = slice(seed % 2, runs, 2)
        if q.dtype == torch.float32 or not range(runs)[twice]:
            return out
        # The other runs round at the reference's points: its rounding errors, with random signs.
        by_run, queries, result = (x.view(-1, runs, *x.shape[1:])[:, twice] for x in (wide, q, out))
        rounding_error = attend(queries.flatten(0, 1), queries.shape[1]).view(by_run.shape) - by_run
        result.copy_(by_run + rounding_error.float() * noise(by_run).sign())
        return out

    def product(name: str) -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
        def run(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
            y = each(getattr(ops, name)(gate, up, torch.float32))
            return (y * (1 + 4 * _ULP * noise(y))).to(dtype)

        return run

    def gated_delta(x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, at: LayerView) -> Tensor:
        x, a, b = (y * (1 + 4 * _ULP * noise(y)) for y in map(each, (x, a, b)))
        y = ops.gated_delta(x, a, b, conv, a_log, dt_bias, at)
        return y * (1 + 4 * _ULP * noise(y))

    products = {name: product(name) for name in ("silu_mul", "gelu_mul", "sigmoid_mul")}
    return with_ops(
        ops,
        {
            "rms_norm": rms_norm, "linear": linear, "rope": rope, "store_kv": store_kv, "paged_attention": paged_attention,
            "gated_delta": gated_delta, **products,
        },
    )  # fmt: skip


def _spread(x: Tensor, weight: Weight) -> Tensor:
    """[T, out] fp32: sqrt(sum of (x * w)**2), the length of the terms of each sum, taken as independent."""
    numbers = weight_numbers(weight) if isinstance(weight, Blocks) else weight
    return (x.float().square() @ numbers.float().square().T).sqrt_()


BLOCK_X_NUMBERS = 32
BLOCK_X_LARGEST = 32_767.0
BLOCK_X_TOTAL = 524_000.0
"""The step of each 32 numbers: max(largest size / `BLOCK_X_LARGEST`, sum of sizes / `BLOCK_X_TOTAL`)."""


def half_steps(x: Tensor, weight: Blocks) -> Tensor:
    """[T, in] fp64: the largest error of each number of x when it is rounded for a product with weight blocks.

    Each 32 numbers become 16-bit integers times one step (`CpuOps.linear`), so the error is at most half a step. With 8-bit
    activations the reference rounds x, too; then only numbers near the middle of two steps may differ.
    """
    sizes = x.double().abs()
    if weight.column_scales is not None:
        sizes = sizes * weight.column_scales
    by_block = sizes.view(len(x), -1, BLOCK_X_NUMBERS)
    if weight.x_bits == 8:
        most = bounds.BLOCK_X_TIE * by_block.amax(-1) / LARGEST
    else:
        most = 0.51 * torch.maximum(by_block.amax(-1) / BLOCK_X_LARGEST, by_block.sum(-1) / BLOCK_X_TOTAL)
    half = most.repeat_interleave(BLOCK_X_NUMBERS, dim=1)
    return half if weight.column_scales is None else half / weight.column_scales
