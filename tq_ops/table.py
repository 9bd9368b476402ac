"""What an op table is: the ops that a decoder layer calls, with the same signatures on every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.weight import Weight


class OpTable(Protocol):
    """An op table: a module such as `tq_ops.reference`, whose signatures every other table repeats."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def gelu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def sigmoid_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def store_kv(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None: ...
    def paged_attention(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor: ...
    def gated_delta(
        self, x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, cache: PagedKVCache, layer: int,
        batch: Batch,
    ) -> Tensor: ...  # fmt: skip


OP_NAMES = (
    "rms_norm", "linear", "rope", "silu_mul", "gelu_mul", "sigmoid_mul", "store_kv", "paged_attention", "gated_delta",
)  # fmt: skip
"""Every op of a table, in the order in which a layer first calls them."""

_SIGNATURES = {name: signature(getattr(OpTable, name)) for name in OP_NAMES}


def arguments(op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a call hands to an op, by the names of its parameters: `arguments("store_kv", …)["layer"]`."""
    bound = _SIGNATURES[op].bind(None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def with_ops(ops: OpTable, replaced: Mapping[str, Callable[..., Any]]) -> OpTable:
    """An op table in which some ops are others."""
    return cast(OpTable, SimpleNamespace(**{name: replaced.get(name, getattr(ops, name)) for name in OP_NAMES}))
