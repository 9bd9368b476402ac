"""vLLM's worker of a GPU, whose layers have pages of their own sizes. It has not run."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from haarkv.serving.vllm_plugin.own_pages import OwnPages


class RotatedGpuWorker(OwnPages, Worker):
    """As vLLM's; only pages differ."""
