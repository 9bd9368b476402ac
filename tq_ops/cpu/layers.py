"""Dense layers in one call for few tokens, where Python between the ops takes longer than many of the ops."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.calls import LayerCalls, is_bf16, stored_weight, too_long
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK
from haarkv.tq_ops.weight import Weight, backing_tensor

FEW = WINDOW_CHUNK
"""Most tokens of a call: as many as every ring of blocks has room for. With more, Python's share is nothing and the tensors
between the ops take memory."""


@dataclass(frozen=True)
class Dense:
    """A layer of attention with RoPE on whole heads and of a gated MLP.

    Attributes:
        weights: by `library.DENSE_VECTORS` and `DENSE_MATRICES`, contiguous: norms all BF16 or all FP32, others of the model's
            dtype or blocks with kernels. Head norms, biases, `mixer_out_norm` and `mlp_out_norm` may be missing.
        num_heads: query heads Hq.
        eps: of all norms.
        gelu: the gate goes through GELU by its tanh, else through SiLU.
        rope: index of the layer's rotary embedding.
    """

    weights: Mapping[str, Weight]
    num_heads: int
    eps: float
    softmax_scale: float
    gelu: bool
    rope: int


@dataclass(frozen=True)
class _CacheStructures:
    """The structures of the layers for one cache, blank where ops run one by one, and the owners of what they point to."""

    layers: ctypes.Array[library.Structure]
    calls: tuple[LayerCalls | None, ...]
    shape_layers: tuple[int, ...]  # a layer of each shape; `place` of a structure is an index of these
    matrices: tuple[library.Structure, ...]


class DenseLayers:
    """Layers of a model in one call, to the bits of the ops one by one; None where the ops have to run."""

    def __init__(self, ops: CpuOps, layers: Sequence[Dense | None]) -> None:
        self._ops, self._layers = ops, tuple(layers)
        self._by_cache: WeakKeyDictionary[PagedKVCache, _CacheStructures] = WeakKeyDictionary()

    def parts(self, span: range, cache: PagedKVCache) -> Iterator[tuple[bool, range]]:
        """Splits `span` into the longest stretches that one call runs (True) or the ops have to run (False); an InputError of
        a head_dim without kernels.
        """
        calls = self._structures(cache).calls
        for in_one, indices in groupby(span, lambda index: calls[index] is not None):
            first, *rest = indices
            yield in_one, range(first, first + 1 + len(rest))

    def run(
        self, hidden: Tensor, part: range, batch: Batch, cache: PagedKVCache, ropes: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor | None:
        """Runs the layers of a part that `parts` marks True, and stores their K and V.

        Args:
            hidden: [T, hidden] of the model's dtype, T up to `FEW`; not changed.
            ropes: cos and sin [T, D/2] fp32 of each rotary embedding.
        Returns:
            [T, hidden], or None where the ops have to run: the kernels refuse K, V or slots, or a tail's ring has no room.
            Some layers may then have stored the tokens.
        Raises:
            ValueError: more new tokens of a sequence than the cache takes at a time.
        """
        cache.require_room(batch)
        if too_long(batch, cache.block_size) or not cache.has_room(batch):
            return None
        structures, hidden = self._structures(cache), hidden.clone(memory_format=torch.contiguous_format)
        turns, keepalive = (library.Turns * len(ropes))(), []
        for turn, pair in zip(turns, ropes, strict=True):
            cos, sin = (x.contiguous() for x in pair)
            turn.cos, turn.sin = cos.data_ptr(), sin.data_ptr()
            keepalive += [cos, sin]
        places = (library.Places * len(structures.shape_layers))()
        for place, layer in zip(places, structures.shape_layers, strict=True):
            layer_batch = cache.kv[layer].place(batch)
            slots, table = layer_batch.slot_mapping.contiguous(), layer_batch.block_table.contiguous()
            place.slots, place.block_table = slots.data_ptr(), table.data_ptr()
            keepalive += [slots, table]
        positions, rows, starts = (x.contiguous() for x in (batch.positions, batch.rows, batch.query_start_loc))
        call = library.Layers(
            layers=ctypes.addressof(structures.layers[part.start]), hidden=hidden, ropes=ctypes.addressof(turns),
            places=ctypes.addressof(places), positions=positions, rows=rows, query_start=starts,
            count=len(part), tokens=hidden.shape[0],
            hidden_size=hidden.shape[1], sequences=batch.block_table.shape[0], max_blocks=batch.block_table.shape[1],
            bf16=is_bf16(hidden), isa=self._ops.isa_number, threads=self._ops.threads,
        )  # fmt: skip
        status = library.load().haarkv_layers(ctypes.byref(call))
        del keepalive  # what the call's arrays point to has to live until here
        return None if status else hidden

    def _structures(self, cache: PagedKVCache) -> _CacheStructures:
        """The structures of a cache, cached."""
        if cache not in self._by_cache:
            calls = tuple(self._layer_calls(cache, index) for index in range(len(self._layers)))
            self._by_cache[cache] = self._fill(cache, calls)
        return self._by_cache[cache]

    def _layer_calls(self, cache: PagedKVCache, index: int) -> LayerCalls | None:
        if self._layers[index] is None or index not in cache.kv:
            return None
        return self._ops.layer_calls(cache.kv[index])

    def _fill(self, cache: PagedKVCache, calls: tuple[LayerCalls | None, ...]) -> _CacheStructures:
        # Layers of one shape have one block table.
        layer_by_shape = {cache.kv[index].shape: index for index, call in enumerate(calls) if call is not None}
        layers, matrices = (library.DenseLayer * len(calls))(), list[library.Structure]()
        for index, (to, dense, call) in enumerate(zip(layers, self._layers, calls, strict=True)):
            if dense is None or call is None:
                continue
            for name, weight in dense.weights.items():
                if name in library.DENSE_MATRICES:
                    matrices.append(stored_weight(weight))
                    setattr(to, name, matrices[-1])
                else:
                    assert name in library.DENSE_VECTORS, name
                    setattr(to, name, backing_tensor(weight).data_ptr())
            to.store, to.attention = ctypes.addressof(call.store), ctypes.addressof(call.attention)
            to.intermediate_size, to.num_heads = dense.weights["gate_proj"].shape[0], dense.num_heads
            to.norms_bf16, to.gelu, to.rope = is_bf16(backing_tensor(dense.weights["input_norm"])), dense.gelu, dense.rope
            to.place, to.eps = list(layer_by_shape).index(cache.kv[index].shape), dense.eps
            to.softmax_scale = dense.softmax_scale
        return _CacheStructures(layers, calls, tuple(layer_by_shape.values()), tuple(matrices))
