"""vLLM with its KV cache in `tq4`: a plug-in that vLLM finds by entry points, and that is still until it is asked for.

vllm serve MODEL --attention-backend CUSTOM        # or: tq serve MODEL --kv tq4

Of vLLM's extension points it uses four: a general plug-in that names the attention backend, a platform plug-in that lets a CPU
choose it, the backend's hook for the size of a page, and a logger of statistics for `/metrics`. Nothing of vLLM is replaced.
"""

from __future__ import annotations

KV = "tq4"
"""The format that the pages hold."""
BALANCE, ALLOW_COLLAPSE = "haarkv_balance", "haarkv_allow_collapse"
"""Keys of vLLM's `--additional-config`: false leaves uneven channels as they are; true warns where text would be garbage."""
PER_LAYER = "haarkv_metrics_per_layer"
"""Key of vLLM's `--additional-config`: whether `/metrics` tells of each layer."""

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
