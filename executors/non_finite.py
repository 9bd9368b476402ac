"""Find out why a forward became NaN or infinite: run it again with every op watched, and name the guilty tensor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from haarkv.models.qwen3_14b.weights import Weights
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.table import OP_NAMES, OpTable


class _FoundError(Exception):
    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        super().__init__(op)
        self.op, self.args_of_op = op, args


def _watched(ops: OpTable, stored_layers: list[int]) -> OpTable:
    """The same op table, which raises at the first op that makes something not finite out of what it is given."""

    def watch(name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def run(*args: Any) -> Any:
            if name == "store_kv":
                stored_layers.append(args[3])
            # Not only results: what the embedding hands in may be bad already.
            if any(not torch.isfinite(a).all() for a in args if isinstance(a, Tensor) and a.is_floating_point()):
                raise _FoundError(name, args)
            result = op(*args)
            if isinstance(result, Tensor) and not torch.isfinite(result).all():
                raise _FoundError(name, args)
            return result

        return run

    return cast(OpTable, SimpleNamespace(**{name: watch(name) for name in OP_NAMES}))


def blame(weights: Weights, ops: OpTable, rerun: Callable[[OpTable], object]) -> NonFiniteError:
    """Name the tensor and layer at which a forward first stops being finite.

    Args:
        weights: of the model.
        ops: the table the forward ran with.
        rerun: runs the same forward with another table; it stores the same K and V at the same slots.
    """
    stored_layers: list[int] = []
    try:
        rerun(_watched(ops, stored_layers))
    except _FoundError as found:
        names = {id(tensor): name for name, tensor in weights.named()}
        for argument in found.args_of_op:
            if isinstance(argument, Tensor) and id(argument) in names and not torch.isfinite(argument).all():
                return NonFiniteError(_describe(names[id(argument)], argument))
        # Before the first residual, what an op is handed has been made by an op, or is rows of the embedding.
        if not stored_layers and not torch.isfinite(found.args_of_op[0]).all():
            return NonFiniteError(_describe("model.embed_tokens.weight", weights.embedding))
        where = f"after layer {stored_layers[-1]}'s K and V were stored" if stored_layers else "in layer 0"
        return NonFiniteError(
            f"{found.op} overflows {where}, although its weights are finite; the model does not fit this dtype or is damaged"
        )
    return NonFiniteError("the forward gave logits that are not finite, and a second run did not; suspect the machine")


def _describe(name: str, tensor: Tensor) -> str:
    index = [int(i) for i in (~torch.isfinite(tensor)).nonzero()[0]]
    return f"the weight {name} holds {tensor[tuple(index)].item()} at {index}; the checkpoint is damaged"
