"""Pages as large as what a layer stores: vLLM's hook for the size of a page does not learn which layer it is asked for.

Layers whose pages differ share one group and one block table; that is vLLM's own way with layers of different head sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config

from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, with_content
from haarkv.serving.vllm_plugin.chosen import content_bytes, pair_of
from haarkv.serving.vllm_plugin.windows import fitted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


class OwnPages:
    """What a worker adds to vLLM's. It stands before vLLM's class among the bases."""

    vllm_config: VllmConfig

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Each layer's pages by its name; those of vLLM's own backends as they are, but for windows, see `windows.py`."""
        with set_current_vllm_config(self.vllm_config):
            specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        return fitted({name: self._own(name, spec) for name, spec in specs.items()})

    def _own(self, name: str, spec: Any) -> KVCacheSpec:
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        if layer.get_attn_backend() is not RotatedAttentionBackend:
            return spec
        return with_content(spec, content_bytes(pair_of(self.vllm_config, name), spec.head_size, spec.head_size_v))
