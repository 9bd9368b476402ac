"""Counts what a step would launch on a GPU, on a machine without one.

Tensors are on torch's `meta` device, which has shapes and no numbers: whatever would wait for the device to know one (`item`,
`nonzero`, a branch on a tensor, a copy to the host) raises. Triton's launches are noted and not made, and so are torch's
operators, all but views and allocations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from haarkv.executors import cuda
from haarkv.executors.cuda import CudaExecutor, DecodeStep
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.cuda import decode, layout, schedule
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec

META = torch.device("meta")
_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "prim::device", "device"}


class _Operators(TorchDispatchMode):
    """Notes every operator of torch that does work; those that are made of others, by these."""

    def __init__(self, kernel_names: list[str]) -> None:
        super().__init__()
        self._launched = kernel_names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in _ALLOCATE:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def record_kernels(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what is launched meanwhile, in order."""
    kernel_names: list[str] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel_names.append(kernel.fn.__name__)

    with patch.context() as only_here:
        for kind in (InterpretedFunction, JITFunction):
            only_here.setattr(kind, "run", note)
        only_here.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        only_here.setattr(schedule, "processors", lambda _: 132)
        only_here.setattr(decode, "_kernel", lambda *_: SimpleNamespace(launch=lambda *_: kernel_names.append("decode")))
        # It looks whether centroids are antisymmetric, once, as a model is loaded.
        only_here.setattr(
            layout, "centroid_words", lambda centroids: torch.empty(5, dtype=torch.int32, device=centroids.device)
        )
        try:
            with _Operators(kernel_names):
                yield kernel_names
        finally:
            # Layouts that were made meanwhile hold no words.
            layout.to_layout.cache_clear()


def executor_on_meta(model: DecoderModel, patch: pytest.MonkeyPatch) -> CudaExecutor:
    """A CUDA executor whose GPU is torch's meta device."""
    patch.setattr(cuda, "open_gpu", lambda _: META)
    patch.setattr(torch.cuda, "get_device_name", lambda _: "no GPU")
    return CudaExecutor(model)


@torch.inference_mode()
def launches(
    executor: CudaExecutor, spec: KVSpec, prompts: list[int], patch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """What a prefill of prompts of so many tokens launches, and what a decode step after it; with the head of each.

    The head's one wait, for whether all is finite, is left out: on this device there is nothing to know.
    """
    config, model, table, blocks = executor.config, executor._model, executor._table, sum(n // 16 + 1 for n in prompts)
    cache = PagedKVCache(
        spec.plan(config.num_layers), config.kv_shapes, num_blocks=blocks, num_rows=len(prompts), block_size=16, device=META,
        states=config.state_shapes,
    )  # fmt: skip
    paging = PagedSequences(blocks, 16)
    ids = [paging.add() for _ in prompts]
    batch = paging.batch(ids, prompts).to(META)
    step = DecodeStep(len(prompts), cache, config.max_position_embeddings, executor._step_on(cache), None)
    with record_kernels(patch) as kernel_names:
        hidden = model.forward(torch.zeros(sum(prompts), dtype=torch.int64, device=META), batch, cache, table)
        executor._sound(model.head(hidden, table))
        prompt_kernels = kernel_names.copy()
    tokens, batch = torch.zeros(len(prompts), dtype=torch.int64, device=META), paging.batch(ids, [1] * len(prompts)).to(META)
    with record_kernels(patch) as kernel_names:
        step(tokens, batch)  # what is made once, is made now, as before a graph is captured
        kernel_names.clear()
        executor._sound(model.head(step(tokens, batch), table))
        return prompt_kernels, kernel_names.copy()
