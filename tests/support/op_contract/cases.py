"""One case of one op, judged beside honest runs; ops on numbers, and products with weight blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from block_weights import random_blocks, random_inputs
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks, weight_numbers
from haarkv.validation.layers.null import (
    RUNS,
    Figure,
    Null,
    Sums,
    by_figure,
    collect_sums,
    honest,
    number_figures,
    resample_runs,
    stacked,
)

FP32, BF16 = torch.float32, torch.bfloat16
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """What came of one case.

    Attributes:
        share: worst figure as a multiple of what honest runs allow.
        fault: what else is wrong: a dtype, a shape, a changed input or slot.
    """

    share: float
    figure: str = ""
    fault: str | None = None

    @property
    def passed(self) -> bool:
        return self.share <= 1 and self.fault is None


class Case:
    """One case of an op; `str` names it.

    Attributes:
        dtype: of the op's input; in BF16 a device may round centroids to FP16.
        small: quick enough for an interpreter.
    """

    op: str
    dtype: torch.dtype
    small: bool

    @property
    def heads(self) -> int:
        """KV heads along the second axis of the result; 0 for none."""
        return 0

    @property
    def plan(self) -> KVPlan | None:
        """Of the op's cache, if it uses one."""
        return None

    @property
    def head_dim(self) -> int | None:
        return None

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        raise NotImplementedError

    def read_only_tensors(self, arguments: tuple[Any, ...]) -> list[Tensor]:
        """Tensors that the op must not change."""
        return [part for part in arguments if isinstance(part, Tensor)]

    def outcome(self, result: Any, arguments: tuple[Any, ...]) -> Any:
        """What is judged, on the host."""
        return result.cpu()

    def right(self) -> Any:
        """The right outcome: the reference's."""
        return self._run_on(cast(OpTable, reference), HOST)

    def fault(self, expected: Any, outcome: Any) -> str | None:
        """What is wrong beside the figures: a dtype or a shape."""
        if outcome.dtype == expected.dtype and outcome.shape == expected.shape:
            return None
        return f"it returns {outcome.dtype} {tuple(outcome.shape)}, not {expected.dtype} {tuple(expected.shape)}"

    def figures(self, expected: Any, outcome: Any) -> Iterator[tuple[Figure, Tensor]]:
        return number_figures(self.op, expected, outcome, self.heads)

    def check(self, table: OpTable, device: torch.device) -> Finding:
        """A table's outcome beside those of honest runs of the reference."""
        arguments = self.arguments(device)
        before = [tensor.clone() for tensor in self.read_only_tensors(arguments)]
        outcome = self.outcome(getattr(table, self.op)(*arguments), arguments)
        expected, runs = _honest(self)
        fault = self.fault(expected, outcome)
        if not all(map(same, before, self.read_only_tensors(arguments))):
            fault = "it changed what it is to leave as it is"
        if fault is not None:
            return Finding(math.nan, "", fault)
        excesses = Null(runs).excesses(collect_sums(self.figures(expected, outcome)), self.dtype != FP32)
        worst = max(excesses, key=excesses.__getitem__)
        return Finding(excesses[worst], " ".join(str(part) for part in worst if part != -1))

    def _run_on(self, ops: OpTable, device: torch.device) -> Any:
        arguments = self.arguments(device)
        return self.outcome(getattr(ops, self.op)(*arguments), arguments)


@cache
def _honest(case: Case) -> tuple[Any, Sums]:
    """The right outcome and figures of honest runs; with weight blocks these round their activations."""
    ops, expected = cast(OpTable, reference), case.right()
    tables = (honest(ops, seed, blocks=lambda weight: isinstance(weight, Blocks)) for seed in range(RUNS))
    return expected, resample_runs(stacked([by_figure(case.figures(expected, case._run_on(table, HOST))) for table in tables]))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# -- Ops on numbers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Case):
    """An op without a cache, against its formula in float64.

    Attributes:
        shape: the op's sizes, in the order of its docstring.
        dtype: of the activations, and of the result where the op rounds.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    small: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{'x'.join(map(str, self.shape))}-{str(self.dtype).removeprefix('torch.')}"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
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
        """The formula, in float64."""
        a, b, c = (x.double() if isinstance(x, Tensor) else x for x in (*self.arguments(HOST), None)[:3])
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

    def right(self) -> Tensor:
        """The formula's, rounded where the op rounds to BF16."""
        rounds = self.dtype == BF16 and self.op in ("rms_norm", "silu_mul", "gelu_mul", "sigmoid_mul")
        return self.expected().to(BF16 if rounds else FP32)


# -- Products with quantised blocks -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Product(Case):
    """`linear` with blocks of one type."""

    kind: str
    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    small: bool = True
    op: str = field(default="linear", init=False)

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.inputs}x{self.outputs}"
        return f"{self.op}-{self.kind}-{sizes}-{str(self.dtype).removeprefix('torch.')}"

    def arguments(self, device: torch.device) -> tuple[Any, ...]:
        x = random_inputs(self.tokens, self.inputs).to(self.dtype).to(device)
        return x, random_blocks(self.kind, self.outputs, self.inputs).to(device)

    def right(self) -> Tensor:
        """In float64; honest runs round x to integers, 32 numbers at a time."""
        x, weight = self.arguments(HOST)
        product: Tensor = x.double() @ weight_numbers(weight).double().T
        return product.float()
