"""Attention over the tokens that stay in BF16: a part of what a query sees, to be merged with the packed one."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices, in_bf16
from haarkv.tq_ops.cuda.arguments import tokens_of
from haarkv.tq_ops.cuda.kept import Kept, Part
from haarkv.tq_ops.cuda.launching import launch
from haarkv.tq_ops.cuda.layout import into_rotated
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache


def attend_kept(q: Tensor, kept: Kept, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Part:
    """Attention over the tokens in BF16, one launch, without waiting for the device.

    Rounding points: in a BF16 model the probabilities are rounded to BF16 and summed rounded, and the sums of V are rotated
    in TF32; the rest is FP32.

    Args:
        q: [T, Hq, D] bf16 or fp32 in the model's domain.
        batch: placed.
        scale: softmax_scale * log2(e).
    """
    (tokens, q_heads, head_dim), heads, sequences = q.shape, cache.shape(layer).num_kv_heads, batch.seq_lens.shape[0]
    group, operand = q_heads // heads, choices.rotation_operand(q, q.dtype == torch.bfloat16)
    tile = choices.kept_tile(triton.cdiv(tokens, sequences), group, head_dim, operand)
    column_tiles = sequences if tokens == sequences else triton.cdiv(tokens * group, tile.columns) + sequences
    matrix = into_rotated(cache.v_format(layer), layer, head_dim, q.device)
    parts = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    maxima, sums = (torch.empty(tokens, q_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    new = tokens_of(batch, kept, cache.shape(layer).window, triton.next_power_of_2(sequences))
    launch(in_bf16.kept_kernel, (column_tiles, heads))(
        q.contiguous(), kept.k, kept.v, batch.rows, parts, maxima, sums, new, sequences, matrix,
        scale,
        HEADS=heads, GROUP=group, D=head_dim, COLUMNS=tile.columns, TOKENS=tile.tokens, RING=kept.ring, TYPE=operand,
        WIDTH=choices.KEPT_WIDTH, num_warps=tile.warps, num_stages=tile.stages, **choices.COMPILED,
    )  # fmt: skip
    return Part(parts, maxima, sums)
