"""What each column of a model's matrices is multiplied with: the importance by which a quantiser counts its errors.

If columns of the input are uncorrelated, a product's mean squared error is the sum over columns of error^2 times the mean
square of the input: that is what is collected here, over all tokens of some windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from haarkv.engine.session import Session
from haarkv.models.weights import TensorNames
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.table import OpTable, with_ops
from haarkv.tq_ops.weight import Weight

_OF_HEAD = 32
"""Tokens of a window whose logits are computed: what the head sees is collected from them."""


def importance(
    session: Session, windows: Sequence[Tensor], on_step: Callable[[str, int], object] = lambda *_: None
) -> dict[str, Tensor]:
    """Mean squares of the inputs of every matrix, by Hugging Face's names: [in] fp32.

    Args:
        session: a model whose weights are as they were read (`balance=False`), on an executor that runs op by op.
        windows: token ids [n] int64 of each, at least one.
        on_step: told what has been done, and how many tokens it took.
    Raises:
        InputError: the executor does not run op by op.
    """
    executor = session.executor
    if executor.ops is None:
        raise InputError(f"executor {executor.name} does not run op by op; take cpu or reference")
    names = TensorNames(executor.weights.named())
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def looking(ops: OpTable) -> OpTable:
        def linear(x: Tensor, weight: Weight) -> Tensor:
            if (name := names.of(weight)) is not None and len(x):
                squares = x.double().square().sum(0)
                sums[name] = sums[name] + squares if name in sums else squares
                counts[name] = counts.get(name, 0) + len(x)
            return ops.linear(x, weight)

        return with_ops(ops, {"linear": linear})

    watched = executor.over(looking)
    assert watched is not None  # who has ops can be looked at
    for window in windows:
        cache, paging = session.new_cache(1, len(window))
        hidden = watched.forward(window, paging.batch([paging.add()], [len(window)]), cache)
        watched.head(hidden[-_OF_HEAD:])
        on_step("a window", len(window))
    return {name: (total / counts[name]).float() for name, total in sums.items()}
