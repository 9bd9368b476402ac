"""Mixtures of experts for the GPU's kernels, what they are by their formula, and faults that the kernels could have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import planted_kernels
import torch
from op_tables import relative
from torch import Tensor
from torch.nn import functional

from haarkv.tq_ops.cuda import experts
from haarkv.tq_ops.fused import Stack
from haarkv.tq_ops.weight import Weight, numbers_of


@dataclass(frozen=True)
class Mixture:
    """Experts of a layer, and tokens.

    Attributes:
        crowded: this many experts, the last ones, are far likelier than the others: so many tokens choose one that its pairs
            fill more than a tile.
        outputs_of: makes a weight of [experts * out, in] fp32, by its name; in the model's dtype unless given.
    """

    count: int
    per_token: int
    hidden: int
    width: int
    tokens: int
    normalized: bool = True
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    crowded: int = 0

    def stack(self, stored: Callable[[str, Tensor], Weight] | None = None) -> Stack:
        """Random weights, each as `stored` makes it of its name and numbers, else in the model's dtype."""
        generator = torch.Generator().manual_seed(5)

        def weight(name: str, outputs: int, inputs: int) -> Weight:
            drawn = torch.randn(self.count * outputs, inputs, generator=generator) / inputs**0.5
            return stored(name, drawn) if stored else drawn.to(self.dtype)

        sizes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        weights = {name: weight(name, *size) for name, size in sizes.items()}
        return Stack(self.count, self.per_token, self.normalized, self.activation, **weights)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and logits of the tokens."""
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(self.tokens, self.hidden, generator=generator).to(self.dtype)
        logits = 2 * torch.randn(self.tokens, self.count, generator=generator)
        logits[:, self.count - self.crowded :] += 6.0
        return x, logits

    def expected(self, stack: Stack) -> Tensor:
        """The formula in float64; the gated product is rounded to the model's dtype, as it is by definition."""
        x, logits = self.inputs()
        share, chosen = logits.double().softmax(-1).topk(self.per_token)
        if self.normalized:
            share = share / share.sum(-1, keepdim=True)
        weights = (numbers_of(weight).cpu().double() for weight in (stack.gate, stack.up, stack.down))
        gate, up, down = (weight.view(self.count, -1, weight.shape[1]) for weight in weights)
        act = functional.silu if self.activation == "silu" else lambda z: functional.gelu(z, approximate="tanh")
        out = torch.zeros(self.tokens, self.hidden, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            for s, e in zip(share[token], chosen[token], strict=True):
                made = (act(gate[e] @ row) * (up[e] @ row)).to(self.dtype).double()
                out[token] += s * (down[e] @ made)
        return out


CASE = Mixture(5, 2, 24, 20, 6)
"""Few experts and short rows, for faults; an even number of tokens."""
FULL = Mixture(2, 1, 16, 16, 20, crowded=1)
"""All tokens choose one expert: a tile that is full, and another."""

FAULTS: dict[str, tuple[Mixture, str, str]] = {
    "experts of the token beside it": (CASE, "logits + token.to(tl.int64)", "logits + (token ^ 1).to(tl.int64)"),
    "shares that are not normalised": (CASE, "if NORMALIZED:", "if not NORMALIZED:"),
    "a token's last expert is left out": (CASE, "for place in range(PER_TOKEN):", "for place in range(PER_TOKEN - 1):"),
    "the last expert is never chosen": (CASE, "inside = expert < EXPERTS\n", "inside = expert < EXPERTS - 1\n"),
    "weights of another expert": (CASE, "row = expert.to(tl.int64)", "row = ((expert + 1) % 5).to(tl.int64)"),
    "the token after the pair's own": (CASE, "read, to = pair // PER_TOKEN, at", "read, to = (pair + 1) // PER_TOKEN % 6, at"),
    "the gate in place of up": (CASE, "gated(total, sums_of(up,", "gated(total, sums_of(gate,"),
    "the last pair of a tile is left out": (CASE, "(column < count)[None, :]", "(column < count - 1)[None, :]"),
    "what a tile has no room for": (FULL, "leads = here & (earlier % COLUMNS == 0)", "leads = here & (earlier == 0)"),
}  # fmt: skip


SHORT = tuple(FAULTS)[:3] + tuple(FAULTS)[-1:]
"""Those that every run of the tests plants."""


def planted(name: str) -> AbstractContextManager[None]:
    """The kernels with a fault."""
    _, old, new = FAULTS[name]
    return planted_kernels.planted(experts, old, new)


@contextmanager
def unwritten_as_nan() -> Iterator[None]:
    """New tensors hold NaN. A GPU's hold what an earlier call left there, which is right."""
    torch.use_deterministic_algorithms(True)  # which fills new memory as well
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def off_by(case: Mixture, device: torch.device | str = "cpu", stored: Callable[[str, Tensor], Weight] | None = None) -> float:
    """How far each token's numbers are from the formula's, of their length."""
    stack = case.stack(stored)
    moved = Stack(*list(vars(stack).values())[:4], *(weight.to(device) for weight in (stack.gate, stack.up, stack.down)))
    with unwritten_as_nan():
        ours = experts.through(*(tensor.to(device) for tensor in case.inputs()), moved)
    return relative(ours, case.expected(stack))
