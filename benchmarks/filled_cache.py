"""A sequence whose cache is filled with random K and V, so that what comes after a long context can be run and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import verify
from haarkv.engine.plans import plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.config import ModelConfig
from haarkv.models.catalog import load_model, read_config
from haarkv.models.rope import RopeTable, extended
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.table import OpTable, with_ops

_FILL = 4096


@dataclass(frozen=True)
class Request:
    """What is measured; a line of the results says it again.

    Attributes:
        model, dtype, layers, executor: as in `engine.loading.load`.
        kv: one KV format, or `k=NAME,v=NAME`.
        contexts: tokens that are stored before the steps.
        prefill: of the longest context, so many last tokens are computed.
        steps: decode steps that count, at each context.
        threads: 1 measures the CPU time of the one thread, more measure wall time.
    """

    model: str
    layers: int | None
    dtype: str
    executor: str
    kv: str
    contexts: tuple[int, ...]
    prefill: int
    steps: int
    threads: int

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(self.contexts)

    @property
    def config(self) -> ModelConfig:
        """Of the model, extended if its positions are too few."""
        return extended(read_config(self.model, self.layers), self.longest + self.steps + 1)

    def clock(self) -> Callable[[], float]:
        """What tells the time, in seconds."""
        return time.thread_time if self.threads == 1 else time.perf_counter


class Case:
    """One sequence in a cache of its own.

    Args:
        context: tokens that are to be stored before the steps.
        computed: the last ones of them, which are left to compute.
    """

    def __init__(self, request: Request, executor: Executor, context: int, computed: int = 0) -> None:
        config = request.config
        blocks = blocks_for(context + request.steps + 1)
        self.request, self.executor, self.clock = request, executor, request.clock()
        self.cache = PagedKVCache(
            plan_for(KVSpec(request.kv), config), config.kv_shapes,
            num_blocks=blocks, num_rows=1,
        )  # fmt: skip
        self.paging = PagedSequences(blocks, self.cache.block_size, num_rows=1)
        self.sequence, self.context = self.paging.add(), context
        self._fill(context - computed)

    @torch.inference_mode()
    def _fill(self, tokens: int) -> None:
        """Store random K and V, the same in every layer."""
        ops, config, draw = self.executor.ops, self.executor.config, torch.Generator().manual_seed(0)
        assert ops is not None, "`loaded` takes executors that run op by op"
        most = self.cache.most_new_tokens or _FILL
        for begin in range(0, tokens, most):
            batch = self.paging.batch([self.sequence], [min(most, tokens - begin)])
            shape = (len(batch.positions), config.heads.num_kv_heads, config.heads.head_dim)
            k, v = (torch.empty(shape, dtype=torch.bfloat16).normal_(generator=draw) for _ in "kv")
            for layer in range(config.num_layers):
                ops.store_kv(k, v, self.cache, layer, batch)

    def prefill(self, tokens: int) -> float:
        """Seconds that the next tokens take, in chunks."""
        ids = [i % self.executor.config.vocab_size for i in range(tokens)]
        began = self.clock()
        prefill_in_chunks(self.executor, [ids], [self.sequence], self.paging, self.cache)
        return self.clock() - began

    def step(self) -> dict[str, float]:
        """Milliseconds of a decode step, and of its parts."""
        spent, clock = {"attention": 0.0}, self.clock

        def timed(ops: OpTable) -> OpTable:
            def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Any, softmax_scale: float) -> Tensor:
                began = clock()
                out = ops.paged_attention(q, cache, layer, batch, softmax_scale)
                spent["attention"] += clock() - began
                return out

            return with_ops(ops, {"paged_attention": paged_attention})

        executor = self.executor.over(timed)
        assert executor is not None, "`loaded` takes executors that run op by op"
        token, began = torch.tensor([1]), clock()
        batch = self.paging.batch([self.sequence], [1])
        paged = clock()
        verify(executor, token, batch, self.cache).argmax(-1).tolist()
        ended = clock()
        found = {"step": ended - began, "attention": spent["attention"], "paging": paged - began}
        found["rest"] = ended - paged - spent["attention"]
        return {name: 1e3 * seconds for name, seconds in found.items()}


def loaded(request: Request) -> Executor:
    """The executor of a request.

    Raises:
        InputError: what it names is not there, does not fit together, or does not run op by op on the host.
    """
    torch.set_num_threads(request.threads)
    config = request.config
    plan = plan_for(KVSpec(request.kv), config)
    model = load_model(request.model, request.dtype, request.layers)
    model = replace(model, config=config, rope=RopeTable(config))
    executor = catalog.create(request.executor, model, plan, None)
    if executor.ops is None or executor.device.type != "cpu":
        raise InputError(f"executor {request.executor} does not run op by op on the host; choose cpu or reference")
    if reason := executor.supports(config, plan):
        raise InputError(f"executor {request.executor} cannot run {request.kv}: {reason}")
    return executor
