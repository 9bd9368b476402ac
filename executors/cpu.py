"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig, unknown_layer
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu.layers import DenseLayers
from haarkv.tq_ops.cpu.layout import READS
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable


@dataclass(frozen=True)
class _InOneCall(DecoderModel):
    """A dense model whose layers are one call where tokens are few and nobody looks on at the ops.

    Attributes:
        whole: its layers.
    """

    whole: DenseLayers | None = None

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, ops: OpTable) -> Tensor:
        if self.whole is not None and isinstance(ops, CpuOps):
            done = self.whole.run(hidden, span, batch, cache, self.rope_at(batch.positions)[self.config.common.attention.rope])
            if done is not None:
                return done
        return super().layers(hidden, span, batch, cache, ops)


class CpuExecutor(ReferenceExecutor):
    """Runs a model whose cache `READS` takes, in its dtype; without the compiled kernels as the reference, and says so.

    Args:
        model: weights and shapes.
        isa: the instruction set of its kernels; the CPU's best unless given.
    Raises:
        InputError: this CPU does not have that instruction set, or there are no kernels to choose it for.
    """

    name = "cpu"

    def __init__(self, model: DecoderModel, isa: str | None = None) -> None:
        ops: OpTable
        self._kernels: CpuOps | None = None
        try:
            ops = self._kernels = CpuOps(isa)
            model = _in_one_call(model, ops)
            self.description = f"C++ kernels ({ops.isa}) on the CPU"
            self.batches_alike = True
        except KernelsMissingError as missing:
            if isa:
                raise
            ops = reference
            self.description = f"the reference's plain torch on the CPU, slowly: {missing}"
        super().__init__(model, ops)

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._threads():
            return super().layers(hidden, span, batch, cache)

    def _finite(self, run: Callable[[OpTable], Tensor]) -> Tensor:
        with self._threads():
            return super()._finite(run)

    def _threads(self) -> AbstractContextManager[None]:
        return self._kernels.alone() if self._kernels else nullcontext()

    def supports(self, config: ModelConfig, plan: KVPlan) -> str | None:
        return self.unsupported(config, plan)

    @property
    def whole(self) -> DenseLayers | None:
        """The layers that run in one call; None where each op is a call."""
        return self._model.whole if isinstance(self._model, _InOneCall) else None

    @staticmethod
    def unsupported(config: ModelConfig, plan: KVPlan) -> str | None:
        """As `supports`, before there is a model."""
        return unsupported(READS, plan, config.kv_shapes)


def _in_one_call(model: DecoderModel, ops: CpuOps) -> DecoderModel:
    """The same model, its layers in one call if `DenseLayers` knows them and it is whole."""
    config = model.config
    if model.ranks.size > 1 or len(set(config.layers)) > 1 or unknown_layer(config, ("head_norms", "bias")):
        return model
    layers = model.weights.layers
    if not all(t.is_contiguous() and t.dtype == model.dtype for layer in layers for t in layer.values()):
        return model
    mixer = config.common.attention
    whole = DenseLayers(ops, layers, num_heads=mixer.num_heads, eps=config.common.norm.eps, softmax_scale=mixer.scale)
    return _InOneCall(model.config, model.weights, model.ropes, model.ranks, whole)
