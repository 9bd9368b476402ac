"""vLLM plug-in for a packed KV cache, found by entry points and inactive until asked for.

vllm serve MODEL --attention-backend CUSTOM        # or: tq serve MODEL --kv tq4

It uses five extension points: a general plug-in that names the attention backend, a platform plug-in that lets a CPU choose
it, the backend's page size hook, a worker class with page sizes per layer, and the platform's hook for block managers. Nothing
of vLLM is replaced.
"""

from __future__ import annotations

KV = "tq4"
"""The default format, and that of a draft's layers."""
FORMAT, SKIP_LAYERS = "haarkv_kv", "haarkv_kv_skip_layers"
"""Keys of vLLM's `--additional-config`: the format as `--kv` takes it; layers in BF16."""
TAIL, SINK = "haarkv_kv_tail", "haarkv_kv_sink"
"""Newest and first tokens of a sequence in BF16."""
CALIBRATION, PLAN = "haarkv_calibration", "haarkv_kv_plan"
"""Paths of files of `tq calibrate` and `tq plan`."""
BALANCE, ALLOW_COLLAPSE = "haarkv_balance", "haarkv_allow_collapse"
"""false: uneven channels stay; true: only warn where text would be garbage."""
CPU_WORKER = "haarkv.serving.vllm_plugin.cpu.RotatedCpuWorker"
GPU_WORKER = "haarkv.serving.vllm_plugin.pages.RotatedGpuWorker"
"""For vLLM's `--worker-cls`: workers that set the size of pages layer by layer."""


def register() -> None:
    """Register the backend (entry point `vllm.general_plugins`)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "haarkv.serving.vllm_plugin.backend.RotatedAttentionBackend")


def platform() -> str | None:
    """The platform class on a CPU (entry point `vllm.platform_plugins`); GPUs need none."""
    from vllm.platforms import cpu_platform_plugin

    ours = {"vllm.platforms.cpu.CpuPlatform": "haarkv.serving.vllm_plugin.platform.RotatedCpuPlatform"}
    return ours.get(cpu_platform_plugin() or "")
