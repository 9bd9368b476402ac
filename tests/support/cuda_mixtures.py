"""Mixtures of experts for the GPU's kernels, and what they are by their formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from op_tables import relative
from torch import Tensor
from torch.nn import functional

from haarkv.tq_ops.cuda import experts
from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import Weight, weight_numbers


@dataclass(frozen=True)
class Mixture:
    """Experts of a layer, and tokens.

    Attributes:
        crowd: this many experts, the last ones, are far likelier than the others: so many tokens choose one that its pairs
            fill more than a tile.
    """

    count: int
    per_token: int
    hidden: int
    width: int
    tokens: int
    normalized: bool = True
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    crowd: int = 0

    def stack(self, make_weight: Callable[[str, Tensor], Weight] | None = None) -> Stack:
        """Random weights, each as `make_weight` makes it of its name and numbers, else in the model's dtype."""
        generator = torch.Generator().manual_seed(5)

        def weight(name: str, outputs: int, inputs: int) -> Weight:
            numbers = torch.randn(self.count * outputs, inputs, generator=generator) / inputs**0.5
            return make_weight(name, numbers) if make_weight else numbers.to(self.dtype)

        sizes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        weights = {name: weight(name, *size) for name, size in sizes.items()}
        return Stack(self.count, self.per_token, self.normalized, self.activation, **weights)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and logits of the tokens."""
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(self.tokens, self.hidden, generator=generator).to(self.dtype)
        logits = 2 * torch.randn(self.tokens, self.count, generator=generator)
        logits[:, self.count - self.crowd :] += 6.0
        return x, logits

    def expected(self, stack: Stack) -> Tensor:
        """The formula in float64; the gated product is rounded to the model's dtype, as it is by definition."""
        x, logits = self.inputs()
        share, expert_ids = logits.double().softmax(-1).topk(self.per_token)
        if self.normalized:
            share = share / share.sum(-1, keepdim=True)
        weights = (weight_numbers(weight).cpu().double() for weight in (stack.gate, stack.up, stack.down))
        gate, up, down = (weight.view(self.count, -1, weight.shape[1]) for weight in weights)
        act = functional.silu if self.activation == "silu" else lambda z: functional.gelu(z, approximate="tanh")
        out = torch.zeros(self.tokens, self.hidden, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            for s, e in zip(share[token], expert_ids[token], strict=True):
                product = (act(gate[e] @ row) * (up[e] @ row)).to(self.dtype).double()
                out[token] += s * (down[e] @ product)
        return out


CASE = Mixture(5, 2, 24, 20, 6)
"""Few experts and short rows."""
FULL = Mixture(2, 1, 16, 16, 20, crowd=1)
"""All tokens choose one expert: a tile that is full, and another."""


@contextmanager
def unwritten_as_nan() -> Iterator[None]:
    """New tensors hold NaN. A GPU's hold what an earlier call left there, which is right."""
    torch.use_deterministic_algorithms(True)  # which fills new memory as well
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def off_by(
    case: Mixture, device: torch.device | str = "cpu", make_weight: Callable[[str, Tensor], Weight] | None = None
) -> float:
    """How far each token's numbers are from the formula's, of their length."""
    stack = case.stack(make_weight)
    device_stack = Stack(
        *list(vars(stack).values())[:4], *(weight.to(device) for weight in (stack.gate, stack.up, stack.down))
    )
    with unwritten_as_nan():
        ours = experts.run_experts(*(tensor.to(device) for tensor in case.inputs()), device_stack)
    return relative(ours, case.expected(stack))
