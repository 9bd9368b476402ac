"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu.layout import READS
from haarkv.tq_ops.cpu.library import KernelsMissingError
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.table import OpTable


class CpuExecutor(ReferenceExecutor):
    """Runs a model whose cache `READS` takes, in its dtype; without the compiled kernels as the reference, and says so.

    Args:
        model: weights and shapes.
    """

    name = "cpu"

    def __init__(self, model: DecoderModel) -> None:
        ops: OpTable
        try:
            ops = CpuOps()
            self.description = f"C++ kernels ({ops.isa}) on the CPU"
        except KernelsMissingError as missing:
            ops = reference
            self.description = f"the reference's plain torch on the CPU, slowly: {missing}"
        super().__init__(model, ops)

    def supports(self, config: DecoderConfig, plan: KVPlan) -> str | None:
        return self.unsupported(config, plan)

    @staticmethod
    def unsupported(config: DecoderConfig, plan: KVPlan) -> str | None:
        """As `supports`, before there is a model."""
        return unsupported(READS, plan, config.head_dim)
