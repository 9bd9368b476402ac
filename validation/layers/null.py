"""The judge: how far a candidate's figures lie outside those of honest runs of the reference.

An honest run is the reference as another device may compute it: sums off by their own rounding noise, rounding at other
points. Sixteen of them give the spread of a few figures for each stage and KV head; outside of it is a fault. What a device
may round is one more kind of honest run, never one more rule.
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
"""Honest runs."""
_MANY = 32
"""From this number of tokens on, two honest runs of a kind are computed, and sixteen drawn from what their tokens show."""


class Figure(NamedTuple):
    """A figure of one stage and KV head (-1: of all heads, or of a stage without heads).

    "energy": squared distance from the reference; 1 is fourteen numbers off by one rounding each. "gain": how much too large a
    result is. "slip NAME": how far it lies along a known mistake, 1 being all of it. "changed": levels that differ. "leaps":
    vectors that are too far off (`judge`). "length": by how much vectors of equal levels are too long.
    """

    stage: str
    head: int
    kind: str


Rows = Mapping[Figure, Tensor]
"""[n, 3] fp64 by figure, a row a token. Of an energy or a count the first column is all; of a gain or a slip they are
numerator, denominator and the sum of fourth powers, which bounds what ties may do.
"""
RunRows = Mapping[Figure, Tensor]
"""[n, runs, 3] fp64: the same of several honest runs."""
Sums = Mapping[Figure, Tensor]
"""Rows summed over tokens, [3] fp64, or [RUNS, 3] of all honest runs; they add up over forwards."""


def add_sums(one: Sums, other: Sums) -> Sums:
    """The sums of two forwards together."""
    return {**one, **{figure: one[figure] + sums if figure in one else sums for figure, sums in other.items()}}


def value(figure: Figure, sums: Tensor) -> Tensor:
    """The ratio of a gain's or slip's sums [..., 3]; of other figures the first sum."""
    top, bottom = sums[..., 0], sums[..., 1]
    return torch.where(top == 0, 0.0, top / bottom) if figure.kind == "gain" or figure.kind.startswith("slip") else top


def by_ties(sums: Tensor) -> float:
    """What ties may make of a gain or a slip: the largest number alone, or some fourteen at random."""
    _, bottom, fourth = sums.tolist()
    return fourth**0.25 / bottom if bottom else 0.0


def excess(figure: Figure, candidate: float, honest: Sequence[float], rounds: bool, ties: float = 0.0) -> float:
    """A figure as a multiple of what honest runs allow; above 1 is a fault. A BF16 model `rounds` centroids to FP16, maybe."""
    if not math.isfinite(candidate):
        return math.inf
    mean = sum(honest) / len(honest)
    spread = math.sqrt(sum((x - mean) ** 2 for x in honest) / (len(honest) - 1))
    if figure.kind == "energy":
        return candidate / (bounds.FARTHER**2 * (mean + bounds.SIGMAS * spread) + 1)
    if figure.kind == "leaps":
        return math.inf if candidate else 0.0
    if figure.kind == "changed":  # a count: few of them vary as Poisson's do
        often = 2 * mean + 0.5
        most = max(often + bounds.POISSON_SIGMAS * math.sqrt(often), bounds.FARTHER * (mean + bounds.SIGMAS * spread))
        return candidate / (most + bounds.TIES)
    least = bounds.LEAST[figure.kind.partition(" ")[0]]
    if rounds and figure.kind == "gain" and figure.stage in ("paged_attention", "attention_mlp"):
        least = bounds.FP16_GAIN
    # A figure between the reference's and the honest mean is right: a number beside a tie may tip one way in all honest runs.
    nearest = min(max(candidate, min(mean, 0.0)), max(mean, 0.0))
    return abs(candidate - nearest) / (max(least, bounds.FARTHER * bounds.SIGMAS * spread) + ties)


@dataclass
class Null:
    """The honest runs of one layer: of the forward at hand, and `totals` of all forwards so far.

    Attributes:
        reach: largest distance of an honest run's K or V from the reference's, in the format's norm, [Hkv, n] by part.
    """

    runs: Sums = field(default_factory=dict)
    reach: Mapping[str, Tensor] = field(default_factory=dict)
    totals: Sums = field(default_factory=dict)
    candidate: Sums = field(default_factory=dict)

    def excesses(self, candidate: Sums, rounds: bool) -> dict[Figure, float]:
        """Of each figure of one forward."""
        return _excesses(candidate, self.runs, rounds)

    def add(self, candidate: Sums) -> None:
        """Count a forward in which no fault was found."""
        self.totals, self.candidate = add_sums(self.totals, self.runs), add_sums(self.candidate, candidate)

    def total_excesses(self, rounds: bool) -> dict[Figure, float]:
        """Of all counted forwards together."""
        return _excesses(self.candidate, self.totals, rounds)


def _excesses(candidate: Sums, honest: Sums, rounds: bool) -> dict[Figure, float]:
    excesses, none = {}, torch.zeros(RUNS, 3, dtype=torch.float64)
    for figure, sums in candidate.items():
        runs = value(figure, honest.get(figure, none)).tolist()
        excesses[figure] = excess(figure, float(value(figure, sums)), runs, rounds, by_ties(sums))
    return excesses


# -- Figures -----------------------------------------------------------------------------------------------------------------
Slips = Mapping[str, Tensor]
"""By how much known mistakes change a result, by name."""


def by_head(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """A result [T, H, *] split by KV head; whole if it has no heads."""
    return x.float().chunk(heads, 1) if heads else (x.float(),)


def number_figures(
    stage: str, ours: Tensor, theirs: Tensor, heads: int = 0, slips: Slips | None = None, step: Tensor | None = None
) -> Iterator[tuple[Figure, Tensor]]:
    """Figures of a stage that gives numbers, [T, H, *] or [T, N].

    Args:
        heads: KV heads along the second axis; 0 for none.
        slips: directions [as ours]; a name that ends in ` @3` is of KV head 3.
        step: what one rounding may move each number by; one step of the largest number unless given.
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
    """[n, 3] fp64: how far numbers [n, *] lie along a direction [n, *]."""
    squares = direction.square()
    sums = (off * direction, squares, squares.square())
    return torch.stack([x.flatten(1).sum(-1) for x in sums], 1).double()


def pad_counts(numbers: Tensor) -> Tensor:
    """[n, 3] fp64 of numbers [n] that are no ratio."""
    return torch.nn.functional.pad(numbers.double()[:, None], (0, 2))


def by_figure(pairs: Iterable[tuple[Figure, Tensor]]) -> Rows:
    """Rows by figure; those of one figure are concatenated."""
    rows: dict[Figure, list[Tensor]] = {}
    for figure, part in pairs:
        rows.setdefault(figure, []).append(part)
    return {figure: torch.cat(parts) if len(parts) > 1 else parts[0] for figure, parts in rows.items()}


def split_runs(pairs: Iterable[tuple[Figure, Tensor]], runs: int) -> RunRows:
    """Figures of runs that were computed at once, the rows of a token's runs together."""
    return {figure: rows.reshape(-1, runs, 3) for figure, rows in by_figure(pairs).items()}


def stacked(runs: Sequence[Rows]) -> RunRows:
    """Figures of runs that were computed one by one."""
    return {figure: torch.stack([run[figure] for run in runs], 1) for figure in runs[0]}


def repeat_rows(x: Tensor, runs: int) -> Tensor:
    """[n * runs, *] of [n, *]: each row `runs` times."""
    return x.repeat_interleave(runs, 0) if runs > 1 else x


def collect_sums(pairs: Iterable[tuple[Figure, Tensor]]) -> Sums:
    """The sums of a candidate's figures."""
    return {figure: rows.sum(0) for figure, rows in by_figure(pairs).items()}


def num_honest_runs(tokens: int, attention: torch.dtype = torch.float32) -> int:
    """How many of the sixteen runs are computed for T tokens; BF16 attention is rounded in two ways."""
    return RUNS if tokens < _MANY else 2 if attention == torch.float32 else 4


def resample_runs(rows: RunRows) -> Sums:
    """Sixteen honest runs, all computed or drawn from two of each kind, the kinds in turn.

    A drawn run is, token by token, the mean of the two plus or minus their difference over sqrt(2).
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
"""Twice FP32's unit of rounding: in which order a device adds is not known."""


def repeated_batch(batch: Batch, runs: int) -> Batch:
    """A batch with each token repeated `runs` times at its place; for reading, not for storing."""
    positions, slots = (repeat_rows(x, runs) for x in (batch.positions, batch.slot_mapping))
    return replace(batch, positions=positions, slot_mapping=slots, query_start_loc=runs * batch.query_start_loc)


def _of_one_run(batch: Batch, runs: int) -> Batch:
    """The inverse."""
    positions, slots = batch.positions[::runs], batch.slot_mapping[::runs]
    return replace(batch, positions=positions, slot_mapping=slots, query_start_loc=batch.query_start_loc // runs)


def honest(
    ops: OpTable, seed: int, runs: int = 1, tokens: int | None = None, blocks: Callable[[object], bool] = lambda _: False
) -> OpTable:
    """The reference's table as other devices may compute it. Each op gives the rows of all runs, a token's together.

    Args:
        seed: of the noise. Counted from it, odd runs round attention once, at its end.
        tokens: of one run, if ops are given the rows of all runs, as `store_kv` and `gated_delta` always are.
        blocks: weights whose products round x to integers.
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
        # Of all runs' tokens the first run's show how widely the terms of their sums are spread.
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
        # The same rounding points, which fall elsewhere.
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
    """[T, out] fp32: sqrt(sum of (x * w)**2), the length of a product's terms as independent ones."""
    numbers = weight_numbers(weight) if isinstance(weight, Blocks) else weight
    return (x.float().square() @ numbers.float().square().T).sqrt_()


BLOCK_X_NUMBERS = 32
BLOCK_X_LARGEST = 32_767.0
BLOCK_X_TOTAL = 524_000.0
"""The step of each 32 numbers is the larger of their largest size and the sum of their sizes, each divided by its constant."""


def half_steps(x: Tensor, weight: Blocks) -> Tensor:
    """[T, in] fp64: by how much each number of x may be off before it is multiplied with weight blocks.

    Each 32 numbers become 16-bit integers times one step (`CpuOps.linear`), off by half a step at most. Blocks with 8-bit
    activations round x in the reference too; then only numbers near the middle of two steps may differ.
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
