"""The reference executor: plain torch, the spec that every other executor is compared with."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.weights import Weights
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable
from haarkv.tq_ops.weight import dense


class ReferenceExecutor(Executor):
    """Runs a model op by op, in the model's dtype: fp32, or bf16 rounded where the device rounds."""

    name = "reference"
    ops: OpTable
    device = torch.device("cpu")
    description = "the reference (plain torch on the CPU)"

    def __init__(self, model: DecoderModel, ops: OpTable = reference) -> None:
        self.config = model.config
        self.ops = ops
        self._model = model

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:  # noqa: ARG004
        return None

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> Executor:
        executor = copy(self)
        executor.ops = wrap(self.ops)
        return executor

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
        """A part of a forward, or NonFiniteError that names the weight; not on several ranks: the weight may be another's."""
        shared, what = self._model.ranks.size > 1, ""
        try:
            result = run(self.ops)
            # A NaN is both the least and the largest. One pass that writes nothing: ten times as fast as asking every number.
            if torch.isfinite(torch.stack(result.aminmax())).all():
                return result
        except NonFiniteError as error:
            if shared:
                raise
            what = str(error)  # K or V, too, is named by the weight behind it
        if shared:
            raise not_finite_among_ranks()
        raise blame(self._model.weights, what)


# -- Why a forward is not finite -----------------------------------------------------------------------------------------


def blame(weights: Weights, what: str = "") -> NonFiniteError:
    """The error of a forward that is not finite: the first weight that is not, or that all are and `what` was not."""
    for name, weight in weights.named_tensors():
        tensor = dense(weight)
        if len(bad := (~torch.isfinite(tensor)).nonzero()):
            index = bad[0].tolist()
            value = tensor[tuple(index)].item()
            return NonFiniteError(f"the weight {name} holds {value} at {index}; the checkpoint is damaged")
    what = what or "logits are not finite"
    return NonFiniteError(
        f"{what}, although all weights are finite; the model does not fit this dtype or is damaged: tq validate says in which "
        "layer"
    )


def not_finite_among_ranks() -> NonFiniteError:
    """The error of one of several ranks, which does not have all weights."""
    return NonFiniteError(
        "the forward gave values that are not finite; run it without --tensor-parallel to see which weight it is"
    )
