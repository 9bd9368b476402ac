"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from haarkv.executors.reference import Forward, ReferenceExecutor
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu.layout import READS
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable


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

    @staticmethod
    def unsupported(config: DecoderConfig, plan: KVPlan) -> str | None:
        """As `supports`, before there is a model."""
        return unsupported(READS, plan, config.head_dim)
