"""vLLM with a packed KV cache: a plug-in that vLLM finds by entry points, and that is still until it is asked for.

vllm serve MODEL --attention-backend CUSTOM        # or: tq serve MODEL --kv tq4

Of vLLM's extension points it uses six: a general plug-in that names the attention backend, a platform plug-in that lets a CPU
choose it, the backend's hook for the size of a page, a worker class that gives each layer pages of its own size, the
platform's hook for who keeps blocks of a new kind, and a logger of statistics for `/metrics`. Nothing of vLLM is replaced.
"""

from __future__ import annotations

KV = "tq4"
"""The format that pages hold unless another is asked for, and that a draft's always hold."""
FORMAT, SKIP_LAYERS = "haarkv_kv", "haarkv_kv_skip_layers"
"""Keys of vLLM's `--additional-config`: the format, as `--kv` takes it; a list of layers that stay in BF16."""
TAIL, SINK = "haarkv_kv_tail", "haarkv_kv_sink"
"""Keys of vLLM's `--additional-config`: how many of a sequence's newest and first tokens are read in BF16."""
CALIBRATION, PLAN = "haarkv_calibration", "haarkv_kv_plan"
"""Keys of vLLM's `--additional-config`: paths of files that `tq calibrate` and `tq plan` wrote."""
BALANCE, ALLOW_COLLAPSE = "haarkv_balance", "haarkv_allow_collapse"
"""Keys of vLLM's `--additional-config`: false leaves uneven channels as they are; true warns where text would be garbage."""
PER_LAYER = "haarkv_metrics_per_layer"
"""Key of vLLM's `--additional-config`: whether `/metrics` tells of each layer."""
CPU_WORKER = "haarkv.serving.vllm_plugin.cpu_worker.RotatedCpuWorker"
GPU_WORKER = "haarkv.serving.vllm_plugin.page_sizes.RotatedGpuWorker"
"""For vLLM's `--worker-cls`: workers that give each layer pages of its own size."""

HOST_MEMORY = "HostMemory"
"""The class of `offload.py` that offloads where vLLM runs on a CPU."""


def register() -> None:
    """Name the backend; what vLLM calls in each of its processes (entry-point group `vllm.general_plugins`)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "haarkv.serving.vllm_plugin.backend.RotatedAttentionBackend")


def platform() -> str | None:
    """The platform that lets a CPU choose the backend, where vLLM runs on a CPU; None elsewhere.

    Entry-point group `vllm.platform_plugins`. On GPUs vLLM's own platform already chooses what it is told to.
    """
    from vllm.platforms import cpu_platform_plugin

    ours = {"vllm.platforms.cpu.CpuPlatform": "haarkv.serving.vllm_plugin.platform.RotatedCpuPlatform"}
    return ours.get(cpu_platform_plugin() or "")
