"""Pages as large as what a layer stores: vLLM's hook for the size of a page does not learn which layer it is asked for.

Layers whose pages differ share one group and one block table; that is vLLM's own way with layers of different head sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.worker.gpu_worker import Worker

from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, with_content
from haarkv.serving.vllm_plugin.kv_choice import content_bytes, kv_plan, layer_formats
from haarkv.serving.vllm_plugin.tails import SUFFIX, tails_beside

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OwnPages:
    """What a worker adds to vLLM's. It stands before vLLM's class among the bases."""

    vllm_config: VllmConfig

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Each layer's pages by its name; those of vLLM's own backends as they are, but for windows, see `fit_windows`.

        Where the plan keeps the newest tokens in BF16, tails are added to vLLM's layers, and their pages to those.
        """
        with set_current_vllm_config(self.vllm_config):
            specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        specs = {name: spec for name, spec in specs.items() if not name.endswith(SUFFIX)}
        for name in filter(self._is_packed, specs):
            content = content_bytes(layer_formats(self.vllm_config, name), specs[name].head_size, specs[name].head_size_v)
            specs[name] = with_content(specs[name], content)
        return fit_windows(self._equal_pages(specs)) | self._tails(specs)

    def _tails(self, specs: dict[str, Any]) -> dict[str, KVCacheSpec]:
        plan, layers = kv_plan(self.vllm_config), self.vllm_config.compilation_config.static_forward_context
        names = [name for name in specs if any(map(plan.has_window, layer_formats(self.vllm_config, name)))]
        if not names:
            return {}
        tails = tails_beside(specs, names, plan.recent or 0, plan.sink)
        for name in names:
            layers[name + SUFFIX] = tails[name + SUFFIX]
            layers[name].impl.keep_newest(tails[name + SUFFIX])
        return {name: tail.spec for name, tail in tails.items()}

    def _equal_pages(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Packed pages of one size, where some layers keep a state.

        A state takes a whole page, so vLLM makes all pages as large as it; layers whose pages differ would be groups with
        block tables of their own.
        """
        ours = [name for name in specs if self._is_packed(name)]
        if not ours or not any(isinstance(spec, MambaSpec) for spec in specs.values()):
            return specs
        content = max(specs[name].state_content_bytes for name in ours)
        return specs | {name: with_content(specs[name], content) for name in ours}

    def _is_packed(self, name: str) -> bool:
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        return layer.get_attn_backend() is RotatedAttentionBackend


class RotatedGpuWorker(OwnPages, Worker):
    """vLLM's worker of a GPU; only pages differ. It has not run."""


# -- Sliding windows ----------------------------------------------------------------------------------------------------------

_LEAST_TOKENS = 32
"""Of a block of vLLM's own backend on a CPU."""


def fit_windows(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Layers with a sliding window in the largest blocks whose pages are no larger than the packed ones, or in the least.

    vLLM keeps these layers itself, in BF16, in groups with block tables of their own. All groups share one pool, so all pages
    must be of one size: a page of BF16 holds fewer tokens than a packed one, and what is left of it is not used.
    """
    packed = max((spec.page_size_bytes for spec in specs.values() if not isinstance(spec, SlidingWindowSpec)), default=0)
    return {name: _fit_window(spec, packed) if isinstance(spec, SlidingWindowSpec) else spec for name, spec in specs.items()}


def _fit_window(spec: SlidingWindowSpec, page_bytes: int) -> SlidingWindowSpec:
    # Halves of a block, so that vLLM finds a number of tokens that are whole blocks of every group.
    while spec.page_size_bytes > page_bytes and spec.block_size % (2 * _LEAST_TOKENS) == 0:
        spec = replace(spec, block_size=spec.block_size // 2)
    return spec
