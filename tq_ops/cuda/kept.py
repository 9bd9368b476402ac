"""The tokens of a layer that stay in BF16, as kernels are given them, and the launch that attends to them (`window`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.layout import into_rotated
from haarkv.tq_ops.cuda.window import window_kernel
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
    k, v = cache.windows(layer)
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


def attend_kept(q: Tensor, kept: Kept, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Part:
    """Attention over the tokens in BF16, one launch, without waiting for the device.

    Rounding points: in a BF16 model the probabilities are rounded to BF16 and summed rounded, and the sums of V are rotated
    in TF32; the rest is FP32.

    Args:
        q: [T, Hq, D] bf16 or fp32 in the model's domain.
        scale: softmax_scale * log2(e).
    """
    (tokens, q_heads, head_dim), heads, sequences = q.shape, cache.num_kv_heads, batch.seq_lens.shape[0]
    group, one_each, operand = q_heads // heads, tokens == sequences, choices.rotation_operand(q, q.dtype == torch.bfloat16)
    tile = choices.window_tile(triton.cdiv(tokens, sequences), group, head_dim, operand)
    column_tiles = sequences if one_each else triton.cdiv(tokens * group, tile.columns) + sequences
    parts = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    maxima, sums = (torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    window_kernel[(column_tiles, heads)](
        q.contiguous(), kept.k, kept.v, batch.rows, parts, maxima, sums, batch.positions, batch.query_start_loc, sequences,
        batch.seq_lens, into_rotated(cache.v_format(layer), layer, head_dim, q.device), scale,
        HEADS=heads, GROUP=group, D=head_dim, COLUMNS=tile.columns, TOKENS=tile.tokens,
        SIZE=triton.next_power_of_2(sequences), ONE_EACH=one_each, RING=kept.ring, TYPE=operand, WIDTH=choices.WINDOW_WIDTH,
        num_warps=tile.warps, num_stages=tile.stages, **seen_in_bf16(kept),
    )  # fmt: skip
    return Part(parts, maxima, sums)
