"""What attention becomes where its windows end a token earlier or later: the likeliest slip, and in BF16 a faint one.

Rounding moves a layer's output about as far as this slip does, but in another direction. Along the slip's own direction an
executor with it is off by once what the slip changes, one without it by what rounding of so many numbers can give.
"""

from __future__ import annotations

from copy import copy

from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kept import Kept
from haarkv.tq_ops.table import OpTable

SHORT, LONG = "a window one token short", "a window one token long"


def with_tail(window: Kept, tail: int) -> Kept:
    """The same tokens, of which queries see another number in BF16; at least 0."""
    other = copy(window)
    other.tail = max(tail, 0)
    return other


def edges(ops: OpTable, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> dict[str, Tensor]:
    """What each slip changes attention [T, Hq, D] fp32 by, before it is rounded; empty without a tail."""
    windows = cache.kept(layer)
    if not any(window and window.ring for window in windows):
        return {}

    def attended(by: int) -> Tensor:
        k, v = (with_tail(window, window.tail + by) if window and window.ring else window for window in windows)
        fields = cache.k_fields(layer), cache.v_fields(layer)
        other = PagedKVCache.over(cache.plan.layers[layer], layer, fields, (k, v), cache.head_dim)
        return ops.paged_attention(q.float(), other, layer, batch, scale)

    right = attended(0)
    return {SHORT: attended(-1) - right, LONG: attended(1) - right}
