"""`/metrics` of the packed cache: bytes, tokens, ratio to BF16, and tokens computed again after preemption.

vLLM reports the share of blocks in use; cached prefixes of no request count as free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from haarkv.serving.vllm_plugin.kv_choice import LEAST_TOKENS, exact_pair, kv_plan, sliding_layers, state_layers
from haarkv.serving.vllm_plugin.limits import is_asked_for
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

M = TypeVar("M")
_PREFIX = "haarkv:"
_GAUGES = {
    "kv_allocated_bytes": "Bytes of the compressed KV cache that vLLM has allocated, all layers and ranks.",
    "kv_held_bytes": "Bytes of the blocks that requests hold.",
    "kv_held_tokens": "Tokens that those blocks have room for.",
    "kv_compression_ratio": "Bytes that BF16 would take, by the bytes that are taken.",
}
_BYTE_GAUGES = ("kv_allocated_bytes", "kv_held_bytes")
"""Gauges where tokens stay in BF16: a block then holds more packed tokens than BF16 ones."""
_RECOMPUTE_COUNTER = "recomputed_tokens", "Tokens of preempted requests whose K and V were computed again."


class RotatedStatLogger(StatLoggerBase):
    """Gauges of one engine (entry point `vllm.stat_logger_plugins`); none if its cache is not packed."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._gauges: dict[str, Gauge] = {}
        self._recomputed: Counter | None = None
        if is_asked_for(vllm_config):
            self._recomputed = _metric(Counter, *_RECOMPUTE_COUNTER, "model_name", "engine")
            model = vllm_config.model_config
            if sliding_layers(model) or state_layers(model):
                return  # a block then holds more tokens of some layers than of others, or none
            keeps_tokens = kv_plan(vllm_config).has_windows
            gauges = {name: text for name, text in _GAUGES.items() if name in _BYTE_GAUGES or not keeps_tokens}
            self._gauges = {name: _gauge(name, text, "model_name", "engine") for name, text in gauges.items()}

    def log_engine_initialized(self) -> None:
        self._set(usage=0.0)

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is not None:
            self._set(scheduler_stats.kv_cache_usage)
            if self._recomputed is not None:
                self._recomputed.labels(*self._labels).inc(recomputed_tokens(scheduler_stats))

    def _set(self, usage: float) -> None:
        if not self._gauges:
            return
        cache, plan = self._config.cache_config, kv_plan(self._config)
        blocks, pages = cache.num_gpu_blocks or 0, layer_page_bytes(self._config, plan)
        used_blocks, block = round(usage * max(blocks - 1, 0)), max(sum(pages), least_of_tails(self._config, plan))
        bf16 = layer_page_bytes(self._config, KVSpec("bf16").plan(len(pages)))
        values = {
            "kv_allocated_bytes": blocks * block,
            "kv_held_bytes": used_blocks * block,
            "kv_held_tokens": used_blocks * cache.block_size,
            "kv_compression_ratio": sum(bf16) / sum(pages),
        }
        for name, gauge in self._gauges.items():
            if name in values:
                gauge.labels(*self._labels).set(values[name])


def layer_page_bytes(vllm_config: VllmConfig, plan: KVPlan) -> list[int]:
    """Bytes of one block of each of the model's own layers, all ranks."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    block_size = vllm_config.cache_config.block_size
    return [page_bytes(pair, heads, model.get_head_size(), block_size) for pair in plan.layers]


def least_of_tails(vllm_config: VllmConfig, plan: KVPlan) -> int:
    """Bytes of the smallest block of BF16 tokens, all layers and ranks; a vLLM block has room for it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    layers = sum(any(map(plan.has_window, pair)) for pair in plan.layers)
    return layers * page_bytes(exact_pair(), heads, model.get_head_size(), LEAST_TOKENS)


def recomputed_tokens(stats: SchedulerStats) -> int:
    """Tokens of resumed requests that were computed again; vLLM counts them with prefix caching on."""
    return stats.prefix_cache_stats.preempted_queries - stats.prefix_cache_stats.preempted_hits


def _metric(kind: Callable[..., M], name: str, text: str, *labels: str, **settings: str) -> M:
    """A metric; replaces that of an earlier engine of this process."""
    if (older := REGISTRY._names_to_collectors.get(_PREFIX + name)) is not None:
        REGISTRY.unregister(older)
    return kind(_PREFIX + name, text, labels, **settings)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return _metric(Gauge, name, text, *labels, multiprocess_mode="mostrecent")
