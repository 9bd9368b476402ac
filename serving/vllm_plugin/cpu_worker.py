"""vLLM's worker of a CPU, whose layers have pages of their own sizes."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from haarkv.serving.vllm_plugin.page_sizes import OwnPages


class RotatedCpuWorker(OwnPages, CPUWorker):
    """As vLLM's; only pages differ."""
