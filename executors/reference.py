"""The reference executor: plain torch, the spec that every other executor is compared with."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.weights import EMBEDDING, TensorNames, Weights
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OP_NAMES, OpTable, arguments, with_ops
from haarkv.tq_ops.weight import Blocks, Weight, dense


class ReferenceExecutor(Executor):
    """Runs a model op by op, in the model's dtype: fp32, or bf16 rounded where the device rounds.

    Args:
        ops: the table to run, `tq_ops.reference` or a wrapping of it.
    """

    name = "reference"
    ops: OpTable
    device = torch.device("cpu")
    description = "the reference (plain torch on the CPU)"

    def __init__(self, model: DecoderModel, ops: OpTable = reference) -> None:
        self.config = model.config
        self.ops = ops
        self._model = model

    @property
    def weights(self) -> Weights:
        return self._model.weights

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:  # noqa: ARG004
        return None

    def over(self, wrap: Callable[[OpTable], OpTable]) -> Executor:
        wrapped = copy(self)
        wrapped.ops = wrap(self.ops)
        return wrapped

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        run = partial(self._model.forward, token_ids, batch, cache)
        return self._finite(run)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        return self._finite(partial(self._model.head, hidden))

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        return self._model.layers(hidden, span, batch, cache, self.ops)

    def _finite(self, run: Callable[[OpTable], Tensor]) -> Tensor:
        """Run a part of a forward and refuse a result that is not finite, naming the weight that made it so.

        One of several ranks says what it saw and no more: it cannot run the forward again without the others.
        """
        shared = self._model.ranks.size > 1
        try:
            result = run(self.ops)
            # A NaN is both the least and the largest. One pass that writes nothing: ten times as fast as asking every number.
            if torch.isfinite(torch.stack(result.aminmax())).all():
                return result
        except NonFiniteError:
            if shared:
                raise
            # K or V, too, is named by the weight behind it
        if shared:
            raise not_finite_among_ranks()
        raise blame(self._model.weights, self.ops, run) from None


# -- Why a forward is not finite -----------------------------------------------------------------------------------------
class _FoundError(Exception):
    def __init__(self, op: str, given: list[Weight]) -> None:
        super().__init__(op)
        self.op, self.given = op, given


@dataclass
class _Progress:
    """How far a forward has come: ops that went well, and layers whose K and V were stored."""

    sound: int = 0
    stored: list[int] = field(default_factory=list)


def _watched(ops: OpTable, progress: _Progress) -> OpTable:
    """The same op table, which raises at the first op that makes something not finite out of what it is given."""

    def watch(name: str) -> Callable[..., Any]:
        op = getattr(ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = arguments(name, *args, **kwargs)
            if name == "store_kv":
                progress.stored.append(given["layer"])
            numbers = [a for a in given.values() if isinstance(a, Blocks) or (isinstance(a, Tensor) and a.is_floating_point())]
            # Not only results: what the embedding hands in may be bad already.
            if not all(map(_finite, numbers)):
                raise _FoundError(name, numbers)
            result = op(*args, **kwargs)
            if isinstance(result, Tensor) and not torch.isfinite(result).all():
                raise _FoundError(name, numbers)
            progress.sound += 1
            return result

        return run

    return with_ops(ops, {name: watch(name) for name in OP_NAMES})


def blame(weights: Weights, ops: OpTable, rerun: Callable[[OpTable], object]) -> NonFiniteError:
    """Name the tensor and layer at which a forward first stops being finite.

    Args:
        rerun: runs the same forward with another table; it stores the same K and V at the same slots.
    """
    progress = _Progress()
    try:
        rerun(_watched(ops, progress))
    except _FoundError as found:
        names = TensorNames(weights.named())
        for tensor in found.given:
            if (name := names.of(tensor)) is not None and not _finite(tensor):
                return NonFiniteError(_describe(name, tensor))
        # The first op is handed rows of the embedding.
        if not progress.sound and not _finite(found.given[0]):
            return NonFiniteError(_describe(EMBEDDING, weights.embedding))
        # A layer may use a weight beside its ops, as it adds a bias: the ops see only what comes of it.
        last = progress.stored[-1] if progress.stored else -1
        for layer in range(max(last, 0), min(last + 2, len(weights.layers))):
            for name, tensor in weights.of_layer(layer):
                if not _finite(tensor):
                    return NonFiniteError(_describe(name, tensor))
        where = f"after layer {last}'s K and V were stored" if progress.stored else "in layer 0"
        return NonFiniteError(
            f"{found.op} overflows {where}, although its weights are finite; the model does not fit this dtype or is damaged"
        )
    return NonFiniteError("the forward gave logits that are not finite, and a second run did not; suspect the machine")


def not_finite_among_ranks() -> NonFiniteError:
    """What one of several ranks says, which cannot run a forward again without the others."""
    return NonFiniteError(
        "the forward gave values that are not finite; run it without --tensor-parallel to see which weight it is"
    )


def _finite(weight: Weight) -> bool:
    return bool(torch.isfinite(dense(weight)).all())


def _describe(name: str, weight: Weight) -> str:
    tensor = dense(weight)
    index = [int(i) for i in (~torch.isfinite(tensor)).nonzero()[0]]
    return f"the weight {name} holds {tensor[tuple(index)].item()} at {index}; the checkpoint is damaged"
