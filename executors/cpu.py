"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.executors.reference import Forward, ReferenceExecutor
from haarkv.models import fused
from haarkv.models.base import DecoderConfig, DecoderModel
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
            done = self.whole.run(hidden, span, batch, cache, self.rope.at)
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

    def _finite(self, forward: Forward, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._threads():
            return super()._finite(forward, token_ids, batch, cache)

    def _threads(self) -> AbstractContextManager[None]:
        return self._kernels.alone() if self._kernels else nullcontext()

    def supports(self, config: DecoderConfig, plan: KVPlan) -> str | None:
        return self.unsupported(config, plan)

    @property
    def whole(self) -> DenseLayers | None:
        """The layers that run in one call; None where each op is a call."""
        return self._model.whole if isinstance(self._model, _InOneCall) else None

    @staticmethod
    def unsupported(config: DecoderConfig, plan: KVPlan) -> str | None:
        """As `supports`, before there is a model."""
        return unsupported(READS, plan, config.head_dim)


def _in_one_call(model: DecoderModel, ops: CpuOps) -> DecoderModel:
    """The same model, its layers in one call if they are dense and it is whole."""
    if model.ranks.size > 1 or fused.unsupported(model.config):
        return model
    config = model.config
    layers = [{field: tensor for field, _, tensor in layer.named()} for layer in model.weights.layers]
    if not all(t.is_contiguous() and t.dtype == model.dtype for tensors in layers for t in tensors.values()):
        return model
    whole = DenseLayers(ops, layers, num_heads=config.num_heads, eps=config.rms_norm_eps, softmax_scale=config.softmax_scale)
    return _InOneCall(model.config, model.weights, model.rope, model.ranks, whole)
