"""The same model with tiny and huge K and V, to validate what ordinary lengths never reach: the ends of a scale's range.

K times a power of two and Q divided by it, V times one and o_proj divided by it: the model computes the same, and each layer
stores one of its two sides tiny and the other huge, by turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.models.balance import folded
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import lengths_of
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import with_ops

_SHORTEST, _LONGEST = 2.0**-8, 2.0**13
"""Where tiny vectors begin and huge ones end: their scales are normal FP16 numbers, with room beside them."""
_KEPT = 0.05
"""Of its length that a vector may lose where its format still has a scale for it."""


@torch.inference_mode()
def with_extreme_scales(model: DecoderModel, plan: KVPlan, token_ids: Sequence[int]) -> DecoderModel:
    """A model that computes the same, whose K and V are tiny in one layer and huge in the next.

    Args:
        plan: of the cache; a side that is stored without loss has no scale and stays as it is, as does one whose format holds
            no such lengths.
        token_ids: of one prompt, whose K and V are scaled to the ends of the range.
    """
    kv = _stored_by(model, plan, token_ids)
    layers = []
    for index, layer in enumerate(model.weights.layers):
        for side, kv_format, x in (("K", plan.k(index), kv[index][0]), ("V", plan.v(index), kv[index][1])):
            tiny = (index % 2 == 0) == (side == "K")
            exponent = _exponent(kv_format, index, x, tiny)
            layer = folded(layer, side, torch.full(x.shape[1:], 2.0**exponent))
        layers.append(layer)
    return replace(model, weights=replace(model.weights, layers=tuple(layers)))


def _stored_by(model: DecoderModel, plan: KVPlan, token_ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """K and V [T, Hkv, D] of each layer."""
    config, found = model.config, []

    def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        found.append((k, v))
        reference.store_kv(k, v, cache, layer, batch)

    blocks = blocks_for(len(token_ids))
    cache = PagedKVCache(plan, config.kv_shapes, num_blocks=blocks)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    batch = paging.batch([paging.add()], [len(token_ids)])
    model.prefill(torch.tensor(token_ids), batch, cache, with_ops(reference, {"store_kv": store_kv}))
    return found


def _exponent(kv_format: KVFormat, layer: int, x: Tensor, tiny: bool) -> int:
    """Of the power of two that takes vectors [T, Hkv, D] as far as the format goes."""
    lengths = lengths_of(x)
    if not kv_format.lossy or not (lengths > 0).any():
        return 0
    if tiny:
        exponent = math.ceil(math.log2(_SHORTEST / float(lengths[lengths > 0].min())))
    else:
        exponent = math.floor(math.log2(_LONGEST / float(lengths.max())))
    while exponent and not _holds(kv_format, layer, x * 2.0**exponent):
        exponent -= int(math.copysign(1, exponent))
    return exponent


def _holds(kv_format: KVFormat, layer: int, x: Tensor) -> bool:
    """Whether a format stores vectors [T, Hkv, D] at about their length."""
    x = x.transpose(0, 1)
    try:
        restored = lengths_of(kv_format.dequantize(kv_format.quantize(x, layer), layer))
    except NonFiniteError:
        return False
    lengths = lengths_of(x)
    return bool(((restored - lengths).abs() <= _KEPT * lengths).all())
