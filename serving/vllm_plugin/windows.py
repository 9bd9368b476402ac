"""Layers that attend to a sliding window, beside layers that attend to all tokens: vLLM keeps the former itself, in BF16.

vLLM gives such a model several groups of layers, each with a block table of its own, and frees what has left the window. All
groups share one pool, so all pages must be of one size. A page of BF16 holds fewer tokens than a packed one of as many bytes:
these layers get smaller blocks, and what is left of a page is not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, KVCacheSpecKind, SlidingWindowSpec

from haarkv.serving.vllm_plugin.chosen import sliding_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LEAST_TOKENS = 32
"""Of a block of vLLM's own backend on a CPU."""


def leave_to_vllm(vllm_config: VllmConfig) -> None:
    """Give layers with a sliding window, where there are some, to vLLM's own backend."""
    if vllm_config.model_config is not None and sliding_layers(vllm_config.model_config):
        chosen = vllm_config.attention_config.backend_per_kind
        chosen.setdefault(KVCacheSpecKind.SLIDING_WINDOW.value, AttentionBackendEnum.CPU_ATTN)


def fitted(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Layers with a sliding window in the largest blocks whose pages are no larger than the packed ones, or in the least."""
    packed = max((of.page_size_bytes for of in specs.values() if not isinstance(of, SlidingWindowSpec)), default=0)
    return {name: _fitted(of, packed) if isinstance(of, SlidingWindowSpec) else of for name, of in specs.items()}


def _fitted(spec: SlidingWindowSpec, page_bytes: int) -> SlidingWindowSpec:
    # Halves of a block, so that vLLM finds a number of tokens that are whole blocks of every group.
    while spec.page_size_bytes > page_bytes and spec.block_size % (2 * _LEAST_TOKENS) == 0:
        spec = replace(spec, block_size=spec.block_size // 2)
    return spec
