"""The tokens of a layer that stay in BF16, as kernels are given them (`window`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache


@dataclass(frozen=True)
class Kept:
    """The tokens in BF16 of one layer.

    Attributes:
        k, v: [num_rows, Hkv, sink + ring, D] bf16, as in `Window.vectors`.
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


def seen_in_bf16(kept: Kept | None) -> dict[str, int]:
    """The constants TAIL and SINK of a kernel; both 0 where nothing is kept."""
    return {"TAIL": kept.tail if kept else 0, "SINK": kept.sink if kept else 0}


def storing(kept: Kept | None, batch: Batch) -> dict[str, Any]:
    """What `window.keep` needs of a kernel's arguments, by name; nothing but constants where nothing is kept."""
    sequences, one_each = batch.seq_lens.shape[0], len(batch.positions) == batch.seq_lens.shape[0]
    if kept is None:
        nothing = dict.fromkeys(("k_window", "v_window", "rows", "positions", "query_start_loc"))
        return nothing | {"sequences": sequences, "SINK": 0, "RING": 0, "SEQUENCE_BITS": 0, "ONE_EACH": True}
    return {
        "k_window": kept.k, "v_window": kept.v, "rows": batch.rows, "positions": batch.positions,
        "query_start_loc": batch.query_start_loc, "sequences": sequences, "SINK": kept.sink, "RING": kept.ring,
        "SEQUENCE_BITS": 0 if one_each else (sequences - 1).bit_length(), "ONE_EACH": one_each,
    }  # fmt: skip


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
