"""The tokens of a layer that stay in BF16, as launches are given them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache


@dataclass(frozen=True)
class Kept:
    """The tokens in BF16 of one layer.

    Attributes:
        k, v: [num_rows, Hkv, sink + ring, D] bf16, as in `tq_ops.kv.kept.Kept.vectors`.
        tail: tokens that a query sees in BF16, itself among them; packed it sees those from `sink` to `tail` before it.
        sink: first tokens that every query sees in BF16.
        ring: newest tokens there is room for.
    """

    k: Tensor
    v: Tensor
    tail: int
    sink: int
    ring: int


def kept_in(cache: PagedKVCache, layer: int) -> Kept | None:
    """What a layer keeps in BF16, if anything."""
    k, v = cache.kept(layer)
    if k is None and v is None:
        return None
    # Every format that the kernels read is lossy, and stores each vector alone.
    assert k is not None
    assert v is not None
    assert (k.tail, k.sink, k.ring) == (v.tail, v.sink, v.ring)
    return Kept(k.vectors, v.vectors, k.tail, k.sink, k.ring)


@dataclass(frozen=True)
class Part:
    """What queries see in BF16, as a part of their attention.

    Attributes:
        parts: [T, Hq, D] fp32, sums of V in its rotated domain, in the kernels' order.
        maxima, sums: [T, Hq] fp32, in units of log2, and of the probabilities.
    """

    parts: Tensor
    maxima: Tensor
    sums: Tensor
