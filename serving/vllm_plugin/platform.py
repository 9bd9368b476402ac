"""vLLM's CPU platform with a choice of attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpecKind

from haarkv.serving.vllm_plugin import CPU_WORKER
from haarkv.serving.vllm_plugin.kv_choice import kv_plan, sliding_layers, state_layers
from haarkv.serving.vllm_plugin.limits import require_supported
from haarkv.tq_ops.cpu import library

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


_VLLMS_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
"""vLLM's default worker."""


class RotatedCpuPlatform(CpuPlatform):
    """vLLM's CPU platform, which also accepts `--attention-backend CUSTOM`."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return AttentionBackendEnum.CUSTOM.get_path()

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        from haarkv.serving.vllm_plugin import pages

        super().register_custom_kv_cache_specs(vllm_config)
        pages.register()

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        if vllm_config.attention_config.backend != AttentionBackendEnum.CUSTOM:
            return
        require_supported(vllm_config)
        model, drafts = vllm_config.model_config, vllm_config.speculative_config
        if model is not None and sliding_layers(model):  # they stay with vLLM's own backend
            backends = vllm_config.attention_config.backend_per_kind
            backends.setdefault(KVCacheSpecKind.SLIDING_WINDOW.value, AttentionBackendEnum.CPU_ATTN)
        if drafts is not None and model is not None and (state_layers(model) or kv_plan(vllm_config).has_windows):
            # Layers that draft, such as the model's own of MTP. In BF16 they would make all pages as large as a state, and
            # vLLM's backend has no page layout that a tail can stand beside.
            drafts.attention_backend = drafts.attention_backend or AttentionBackendEnum.CUSTOM
        library.load()  # or its reason, before anything is started
        if vllm_config.parallel_config.worker_cls == _VLLMS_WORKER:
            vllm_config.parallel_config.worker_cls = CPU_WORKER

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import set_current_vllm_config  # its module asks for this platform

        # Of a model with layers that keep a state this asks our backend for the size of a page, which follows from the plan.
        with set_current_vllm_config(vllm_config):
            super().update_block_size_for_backend(vllm_config)
