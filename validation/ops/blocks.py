"""Cases of `linear` by weights in quantised blocks: the product with what is restored from them, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from haarkv.models.gguf_file import block_type_named
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import Blocks, numbers_of
from haarkv.validation.layers.null import Sums, of_numbers
from haarkv.validation.ops.finding import Finding, beside, changed, honest_runs, misshapen

_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,),
}  # fmt: skip
"""Where a block's FP16 scales and minima lie; of MXFP4 its first byte is an exponent."""
_EXPONENTS = (118, 124)


@dataclass(frozen=True)
class Product:
    """`linear` with blocks of one type.

    Attributes:
        kind: name of the type.
        tokens, inputs, outputs: sizes.
        dtype: of x.
    """

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
