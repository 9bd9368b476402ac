"""Dense layers in one call, for few tokens: where Python between the ops would take longer than many of the ops."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.calls import Prepared, is_bf16
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache

FEW = 64
"""Tokens up to which a call serves them. Of more, Python's share is nothing, and what lies between the ops takes memory."""


@dataclass(frozen=True)
class _Filled:
    """What a cache makes of the layers: the structures, and the calls that they point to."""

    layers: ctypes.Array[library.DenseLayer]
    calls: tuple[Prepared, ...]


class DenseLayers:
    """Layers of a dense model, run to the bits of the same ops one by one.

    Args:
        ops: whose kernels, instruction set and threads are used.
        layers: of each layer its tensors by the fields of `library.DENSE_WEIGHTS`, all bf16 or all fp32; norms of heads and
            biases may be missing. Contiguous, as checkpoints hold them.
        num_heads: query heads Hq.
        eps: of all norms.
        softmax_scale: of the logits, 1/sqrt(D).
    """

    def __init__(
        self, ops: CpuOps, layers: Sequence[Mapping[str, Tensor]], *, num_heads: int, eps: float, softmax_scale: float
    ) -> None:
        self._ops, self._layers = ops, layers
        self._num_heads, self._eps, self._softmax_scale = num_heads, eps, softmax_scale
        self._filled: WeakKeyDictionary[PagedKVCache, _Filled | None] = WeakKeyDictionary()
        self.spent: Tensor | None = None
        """[len(library.PARTS)] int64: nanoseconds are added to it while it is there."""

    def run(
        self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache, rope: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Hidden states after the layers of `span`, which store their K and V.

        Args:
            hidden: [T, hidden] of the weights' dtype; it is left as it is.
            rope: cos and sin [T, D/2] fp32.
        Returns:
            [T, hidden], or None where the ops have to run one by one: more than `FEW` tokens, a cache of some layers,
            formats that the kernels do not quantize, or K, V or slots that they refuse. The same tokens may then have been
            stored by some layers.
        Raises:
            InputError: a plan or head_dim that the kernels cannot read.
        """
        if hidden.shape[0] > FEW or (filled := self._of(cache)) is None:
            return None
        hidden, (cos, sin) = (
            hidden.clone(memory_format=torch.contiguous_format),
            (x.contiguous() for x in rope),
        )
        slots, positions, rows, starts, table = (
            x.contiguous() for x in (batch.slot_mapping, batch.positions, batch.rows, batch.query_start_loc, batch.block_table)
        )
        call = library.Layers(
            layers=ctypes.addressof(filled.layers[span.start]) if span else 0, hidden=hidden, cos=cos, sin=sin, slots=slots,
            positions=positions, rows=rows, block_table=table, query_start=starts,
            spent=0 if self.spent is None else self.spent, count=len(span), tokens=hidden.shape[0],
            hidden_size=hidden.shape[1], intermediate_size=self._layers[0]["gate_proj"].shape[0], sequences=table.shape[0],
            max_blocks=table.shape[1], num_heads=self._num_heads, bf16=is_bf16(hidden), isa=self._ops.isa_number,
            threads=self._ops.threads, eps=self._eps, softmax_scale=self._softmax_scale,
        )  # fmt: skip
        refused = library.load().haarkv_layers(ctypes.byref(call))
        return None if refused else hidden

    def _of(self, cache: PagedKVCache) -> _Filled | None:
        """The structures of a cache, made once; None where it lacks layers, or the kernels cannot quantize a format."""
        if cache not in self._filled:
            layers = range(len(self._layers))
            calls = tuple(self._ops.prepared(cache, layer) for layer in layers) if set(layers) <= set(cache.held) else ()
            whole = calls and all(of.store is not None for of in calls)
            self._filled[cache] = self._fill(calls) if whole else None
        return self._filled[cache]

    def _fill(self, calls: tuple[Prepared, ...]) -> _Filled:
        layers = (library.DenseLayer * len(calls))()
        for to, weights, of in zip(layers, self._layers, calls, strict=True):
            for name, tensor in weights.items():
                setattr(to, name, tensor.data_ptr())
            assert of.store is not None
            to.store, to.attention = ctypes.addressof(of.store), ctypes.addressof(of.attention)
        return _Filled(layers, calls)
