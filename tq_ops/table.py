"""What an op table is: the ops that a decoder layer calls, with the same signatures on every backend."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache


class OpTable(Protocol):
    """An op table: a module such as `tq_ops.reference`, whose signatures every other table repeats."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def silu_mul(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor: ...
    def store_kv(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None: ...
    def paged_attention(self, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor: ...


OP_NAMES = ("rms_norm", "linear", "rope", "silu_mul", "store_kv", "paged_attention")
"""Every op of a table, in the order in which a layer first calls them."""
