"""One case of one op: what comes of it beside honest runs; ops on numbers, and products with quantised blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from haarkv.models.gguf_file import block_type_named
from haarkv.tq_ops import reference
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks, numbers_of
from haarkv.validation.layers.null import RUNS, Figure, Null, Sums, by_figure, collected, drawn, honest, of_numbers

FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes:
        share: how many times what honest runs of the reference allow its worst figure is.
        fault: what else is wrong: a dtype, a shape, an input or a slot that was changed.
    """

    share: float
    figure: str = ""
    fault: str | None = None

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.share <= 1 and self.fault is None


def honest_runs(figures_of: Callable[[OpTable], Iterable[tuple[Figure, Tensor]]]) -> list[Sums]:
    """The figures of honest runs of the reference.

    Args:
        figures_of: of what a table makes of a case. Products with weights in blocks round their activations.
    """
    ops = cast(OpTable, reference)
    tables = (honest(ops, seed, blocks=lambda weight: isinstance(weight, Blocks)) for seed in range(RUNS))
    return drawn([by_figure(figures_of(table)) for table in tables])


def beside(
    runs: list[Sums], figures: Iterable[tuple[Figure, Tensor]], dtype: torch.dtype, fault: str | None = None
) -> Finding:
    """A candidate's figures beside those of honest runs.

    Args:
        dtype: of what the op is given; in BF16 a device may round centroids to FP16.
    """
    excesses = Null(runs).excesses(collected(figures), dtype != torch.float32)
    worst = max(excesses, key=excesses.__getitem__)
    return Finding(excesses[worst], " ".join(str(part) for part in worst if part != -1), fault)


def misshapen(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with a result's dtype or shape, in words; None if nothing is."""
    if ours.dtype == dtype and ours.shape == expected.shape:
        return None
    return f"it returns {ours.dtype} {tuple(ours.shape)}, not {dtype} {tuple(expected.shape)}"


def changed(now: tuple[Any, ...], before: tuple[Any, ...]) -> str | None:
    """What is wrong if an op changed what it was given, in words."""
    pairs = [(a, b) for a, b in zip(now, before, strict=True) if isinstance(a, Tensor)]
    return None if all(same(a, b) for a, b in pairs) else "it changed its input"


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# -- Ops on numbers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """An op without a cache, against its formula in float64.

    Attributes:
        shape: what the op's sizes are, in the order of its docstring.
        dtype: of the activations, and of the result where the op rounds.
        small: quick enough for an interpreter.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    small: bool = True
    plan: ClassVar[None] = None
    head_dim: ClassVar[None] = None

    def __str__(self) -> str:
        return f"{self.op}-{'x'.join(map(str, self.shape))}-{str(self.dtype).removeprefix('torch.')}"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """Random inputs; the two of a gated product are halves of one tensor."""
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        *rows, last = self.shape
        if self.op == "rms_norm":
            return random(*rows, last), random(last), 1e-6
        if self.op == "linear":
            return random(rows[0], rows[1]), random(last, rows[1])
        if self.op == "rope":
            angles = random(rows[0], last // 2, dtype=FP32)
            return random(*rows, last, dtype=FP32), angles.cos(), angles.sin()
        return (*random(*rows, 2 * last, dtype=FP32).chunk(2, dim=-1), self.dtype)

    def expected(self) -> Tensor:
        a, b, c = (x.double() if isinstance(x, Tensor) else x for x in (*self.arguments(torch.device("cpu")), None)[:3])
        if self.op == "rms_norm":
            return a * torch.rsqrt((a * a).mean(-1, keepdim=True) + c) * b
        if self.op == "linear":
            return a @ b.T
        if self.op == "rope":
            low, high = a.chunk(2, dim=-1)
            b, c = b.unsqueeze(1), c.unsqueeze(1)
            return torch.cat([low * b - high * c, high * b + low * c], dim=-1)
        if self.op == "sigmoid_mul":
            return b / (1 + torch.exp(-a))
        if self.op == "gelu_mul":
            return a / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (a + 0.044715 * a**3))) * b
        return a / (1 + torch.exp(-a)) * b

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """Against the formula, rounded where the op rounds to BF16, and beside honest runs."""
        arguments, before = self.arguments(device), self.arguments(device)
        ours, (expected, runs) = getattr(table, self.op)(*arguments), _plain(self)
        fault = misshapen(ours, expected, expected.dtype) or changed(arguments, before)
        return numbers_beside(self.op, expected, ours, runs, self.dtype, fault)


@cache
def _plain(case: Plain) -> tuple[Tensor, list[Sums]]:
    rounds = case.dtype == BF16 and case.op in ("rms_norm", "silu_mul", "gelu_mul", "sigmoid_mul")
    expected = case.expected().to(BF16 if rounds else FP32)
    arguments = case.arguments(torch.device("cpu"))
    return expected, honest_runs(lambda ops: of_numbers(case.op, expected, getattr(ops, case.op)(*arguments)))


def numbers_beside(
    op: str, expected: Tensor, ours: Tensor, runs: list[Sums], dtype: torch.dtype, fault: str | None, heads: int = 0
) -> Finding:
    """The finding on an op's result."""
    if fault is not None:
        return Finding(math.nan, "", fault)
    return beside(runs, of_numbers(op, expected, ours.cpu(), heads), dtype)


# -- Products with quantised blocks -----------------------------------------------------------------------------------------
_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,),
}  # fmt: skip
"""Where a block's FP16 scales and minima lie; of MXFP4 its first byte is an exponent."""
_EXPONENTS = (118, 124)


@dataclass(frozen=True)
class Product:
    """`linear` with blocks of one type."""

    kind: str
    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    small: bool = True
    op: ClassVar[str] = "linear"
    plan: ClassVar[None] = None
    head_dim: ClassVar[None] = None

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.inputs}x{self.outputs}"
        return f"{self.op}-{self.kind}-{sizes}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def weight(self) -> Blocks:
        """Random levels, with ordinary scales."""
        kind, generator = block_type_named(self.kind), torch.Generator().manual_seed(4)
        shape = self.outputs, self.inputs // kind.numbers
        data = torch.randint(256, (*shape, kind.nbytes), dtype=torch.uint8, generator=generator)
        for at in _HALVES.get(self.kind, ()):
            scales = (5e-4 + 1.5e-3 * torch.rand(*shape, 1, generator=generator)).half()
            data[..., at : at + 2] = scales.view(torch.uint8)
        if self.kind not in _HALVES:
            data[..., 0] = torch.randint(*_EXPONENTS, shape, dtype=torch.uint8, generator=generator)
        return Blocks(data.view(self.outputs, -1), kind, torch.float32)

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        """x, of which one number in fifty is thirty times as large, as in hidden states; and the weight."""
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.tokens, self.inputs, generator=generator)
        x *= torch.where(torch.rand(1, self.inputs, generator=generator) < 0.02, 30.0, 1.0)
        return x.to(self.dtype).to(device), self.weight.to(device)

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """Against the product in float64; honest runs round x to integers, 32 numbers at a time."""
        x, weight = self.arguments(device)
        before = x.clone()
        ours, (expected, runs) = table.linear(x, weight), _expected(self)
        fault = misshapen(ours, expected, torch.float32) or changed((x,), (before,))
        if fault is not None:
            return Finding(math.nan, "", fault)
        return beside(runs, of_numbers(self.op, expected, ours.cpu()), torch.float32)


@cache
def _expected(case: Product) -> tuple[Tensor, list[Sums]]:
    x, weight = case.arguments(torch.device("cpu"))
    expected = (x.double() @ numbers_of(weight).double().T).float()
    return expected, honest_runs(lambda ops: of_numbers(case.op, expected, ops.linear(x.float(), weight)))
