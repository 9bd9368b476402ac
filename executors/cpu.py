"""The CPU executor: the reference's forward over the op table in C++."""

from __future__ import annotations

from executors.reference import ReferenceExecutor
from models.qwen3_14b.config import Qwen3Config
from models.qwen3_14b.layer import Ops
from models.qwen3_14b.model import Qwen3
from tq_ops import reference
from tq_ops.cpu.layout import unsupported
from tq_ops.cpu.library import KernelsMissingError
from tq_ops.cpu.ops import CpuOps
from tq_ops.plan import KVPlan


class CpuExecutor(ReferenceExecutor):
    """Runs a model whose cache is `tq4` or `tbq4_0`, in its dtype; without the compiled kernels as the reference, and says so.

    Args:
        model: weights and shapes.
    """

    name = "cpu"

    def __init__(self, model: Qwen3) -> None:
        ops: Ops
        try:
            ops = CpuOps()
            self.description = f"C++ kernels ({ops.level}) on the CPU"
        except KernelsMissingError as missing:
            ops = reference
            self.description = f"the reference's plain torch on the CPU, slowly: {missing}"
        super().__init__(model, ops)

    def supports(self, config: Qwen3Config, plan: KVPlan) -> str | None:
        return unsupported(plan, config.head_dim)
