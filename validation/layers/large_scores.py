"""How far rounding moves attention where scores are large: a K bias of hundreds leaves few bits for what tells keys apart.

A score is a sum of D products in FP32. In whatever order they are added, it is off by about sqrt(D) * 2**-24 of them (Higham
and Mary, 2019, doi:10.1137/18M1226312), and so is each weight of the softmax: 1e-6 where scores are tens, 1e-4 where they are
thousands. So the reference runs again over keys that are off by that share, at random. By as much as this moves a vector, an
executor's may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.restored import as_numbers

_DRAWS = 3
_SIDES = 2
"""Both sums are rounded, the reference's and the executor's."""


def slack(attend: Callable[[PagedKVCache], Tensor], cache: PagedKVCache, layer: int) -> Tensor:
    """How far rounded scores may move each vector of a result: [...] fp64.

    Args:
        attend: makes [..., N] of a cache, without rounding to BF16 on the way.
        cache: what is attended to, in a layer.
    """
    k = cache.k_format(layer).dequantize(cache.k_fields(layer), layer)
    v = cache.v_format(layer).dequantize(cache.v_fields(layer), layer)
    generator, share = torch.Generator().manual_seed(layer), math.sqrt(k.shape[-1]) * 2.0**-24

    def over(keys: Tensor) -> Tensor:
        return attend(as_numbers(cache, layer, keys, v)).double()

    right = over(k)
    moved = [
        (over(k * (1 + share * (2 * torch.rand(k.shape, generator=generator) - 1))) - right).norm(dim=-1)
        for _ in range(_DRAWS)
    ]
    return _SIDES * torch.stack(moved).amax(0)


def slack_of_op(call: Call, ops: OpTable) -> Tensor | None:
    """`slack` of a recorded attention [T, Hq, D] over the live cache; None of any other op."""
    if call.op != "paged_attention":
        return None
    q, cache, layer, batch, scale = call.args
    return slack(lambda drawn: ops.paged_attention(q.float(), drawn, layer, batch, scale), cache, layer)


def added(ties: Tensor | None, scores: Tensor) -> Tensor:
    """What ties and rounded scores allow together."""
    return scores if ties is None else ties + scores
