"""vLLM's CPU worker with page sizes per layer; vLLM loads it by name, and only on a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from haarkv.serving.vllm_plugin.pages import OwnPages


class RotatedCpuWorker(OwnPages, CPUWorker):
    """vLLM's CPU worker with page sizes per layer."""
