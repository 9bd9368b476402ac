"""What an executor may differ by that multiplies with quantised blocks as they lie.

Each 32 numbers of x become 16-bit integers times one step there: the larger of their largest size / 32,767 and of the sum of
their sizes / 524,000 (`CpuOps.linear`). A number is off by half a step at most, and nothing else is: the products with the
blocks' levels are exact, and sums in FP32 have the bounds that they have anyway. The reference restores the blocks and
multiplies, and rounds no x. So it runs again with each number of x half a step up or down, as drawn. Twice the most that any
of three draws moves a vector is what an executor's may be off by for it, and no more. Where all draws move a vector along one
line, three of them may all be small by chance: what is off by more is held against sixteen.

Where the blocks ask for 8 bits, the reference rounds x too (`weight.activations`). What is left are numbers beside the middle
of two steps, which noise moves to the other one: in the draws each number is moved by a small part of a step.

Half a step is the most that a number can be off by; on average it is 1 / sqrt(3) of that. Twice a draw is thus 3.5 times what
rounding does on average. A fault that is smaller shows in sums over many tokens: rounding has no direction (`ledger`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import LARGEST, Blocks, Weight, activations, numbers_of
from haarkv.validation import bounds

if TYPE_CHECKING:
    from haarkv.models.base import DecoderModel
    from haarkv.models.weights import Weights

DRAWS, MOST_DRAWS = 3, 16
_TIMES = 2
_REMEMBERED = 2**31
"""Bytes of restored weights that are kept."""


def half_steps(x: Tensor, weight: Blocks) -> Tensor:
    """What each number of x [T, in] may be off by before it is multiplied: fp64 [T, in]."""
    sizes = x.double().abs()
    if weight.column_scales is not None:
        sizes = sizes * weight.column_scales
    by_block = sizes.view(len(x), -1, bounds.BLOCK_X_NUMBERS)
    if weight.x_bits == 8:
        most = bounds.BLOCK_X_TIE * by_block.amax(-1) / LARGEST
    else:
        steps = torch.maximum(by_block.amax(-1) / bounds.BLOCK_X_LARGEST, by_block.sum(-1) / bounds.BLOCK_X_TOTAL)
        most = bounds.BLOCK_X_HALF_STEP * steps
    half = most.repeat_interleave(bounds.BLOCK_X_NUMBERS, dim=1)
    return half if weight.column_scales is None else half / weight.column_scales


def most(moved: Iterable[Tensor]) -> Tensor:
    """What vectors may be off by, of what each draw moves them by: [...] fp64 of [..., N]."""
    return _TIMES * torch.stack([by.double().norm(dim=-1) for by in moved]).amax(0)


class BlockSteps:
    """Products of which an executor rounds x.

    Args:
        used: types of the blocks that it multiplies with, by name.
        ties: whether any of them asks for 8 bits, so that draws move few numbers by much: more of them would excuse more.
    Attributes:
        most_draws: that what is off is held against.
    """

    def __init__(self, used: Collection[str] = (), ties: bool = False) -> None:
        self.used, self.most_draws = tuple(sorted(used)), DRAWS if ties else MOST_DRAWS

    @classmethod
    def of(cls, types: Collection[str], weights: Weights) -> BlockSteps:
        """Of those types that a model has."""
        blocks = [weight for _, weight in weights.named() if isinstance(weight, Blocks) and weight.type.name in types]
        return cls({weight.type.name for weight in blocks}, any(weight.x_bits == 8 for weight in blocks))

    def __bool__(self) -> bool:
        return bool(self.used)

    def rounds(self, weight: object) -> bool:
        """Whether x is rounded where it is multiplied with a weight."""
        return isinstance(weight, Blocks) and weight.type.name in self.used

    def moved(
        self, run: Callable[[OpTable], Tensor], ops: OpTable, seed: int, draws: Iterable[int] = range(DRAWS)
    ) -> list[Tensor]:
        """What half a step of each x moves a result by, of each draw.

        Args:
            run: makes it by an op table, without rounding on the way.
            ops: of which the reference's is made.
        """
        right = run(ops).double()
        return [run(table).double() - right for table in self.drawn(ops, seed, draws)]

    def most_of_logits(self, model: DecoderModel, hidden: Tensor, ops: OpTable) -> Tensor | None:
        """[N], what any logit of last hidden states [N, hidden] may be off by; None if the head rounds nothing."""
        if not self.rounds(model.weights.lm_head):
            return None
        moved = self.moved(lambda table: model.head(hidden.float(), table), ops, hidden.shape[-1])
        return _TIMES * torch.stack([by.abs().amax(-1) for by in moved]).amax(0)

    def drawn(self, ops: OpTable, seed: int, draws: Iterable[int] = range(DRAWS)) -> list[OpTable]:
        """Op tables that move each number of x half a step up or down before they multiply."""
        return [with_ops(ops, {"linear": self._moving(ops, seed * MOST_DRAWS + draw)}) for draw in draws]

    def _moving(self, ops: OpTable, seed: int) -> Callable[[Tensor, Weight], Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def linear(x: Tensor, weight: Weight) -> Tensor:
            if isinstance(weight, Blocks) and self.rounds(weight):
                signs = 2.0 * torch.randint(2, x.shape, generator=generator) - 1
                x = (x.double() + signs * half_steps(x, weight)).float()
            return ops.linear(x, weight)

        return linear


NO_STEPS = BlockSteps()
"""Of an executor that rounds no x."""


def remembering(ops: OpTable) -> OpTable:
    """A table on the host that restores blocks once, not at each product, as far as 2 GiB go; the oldest are forgotten."""
    kept: WeakKeyDictionary[Blocks, Tensor] = WeakKeyDictionary()

    def linear(x: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, Blocks):
            return ops.linear(x, weight)
        if (restored := kept.pop(weight, None)) is None:
            restored = numbers_of(weight)
        kept[weight] = restored
        while len(kept) > 1 and sum(numbers.nbytes for numbers in kept.values()) > _REMEMBERED:
            del kept[next(iter(kept.keys()))]
        return ops.linear(activations(x.float(), weight), restored)

    return with_ops(ops, {"linear": linear})
