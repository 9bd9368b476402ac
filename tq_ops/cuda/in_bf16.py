"""Attention over the tokens that stay in BF16 beside the packed ones, whose result is one more part.

They lie in the model's own domain (`tq_ops.kv.residual_window`), so that every backend reads the same cache. Attention over
them is one launch before that over packed tokens: each query sees its sinks and its tail, as far as its sliding window
reaches. Its sums of V are brought into V's rotated domain, where `schedule.merge_kernel` and csrc/merge.cuh add them to those
of packed tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.layout import to_layout
from haarkv.tq_ops.cuda.rotate import dot, rotation_operand, round_to
from haarkv.tq_ops.cuda.schedule import find_column_tile, sequence_tiles, token_arguments
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.kv.layer import LayerKV
from haarkv.tq_ops.kv.residual_window import ResidualWindow

_WIDTH = 32  # columns of the rotated sums that are made at once
_MANY = 64  # columns of a sequence


Windows = tuple[ResidualWindow, ResidualWindow]
"""K and V of one layer in BF16, of the same tail, sinks and ring."""


def layer_windows(kv: LayerKV) -> Windows | None:
    """The tokens of a layer that stay in BF16, if any."""
    k, v = kv.windows
    if k is None and v is None:
        return None
    # Every format that the kernels read is lossy, and stores each vector alone.
    assert k is not None
    assert v is not None
    assert (k.tail, k.sink, k.ring) == (v.tail, v.sink, v.ring)
    return k, v


class Part(NamedTuple):
    """Attention over some of the tokens, not normalized.

    Attributes:
        vectors: [T, Hq, D] fp32, sums of V in its rotated domain, in the kernels' order.
        maxima, sums: [T, Hq] fp32, in units of log2, and of the probabilities.
    """

    vectors: Tensor
    maxima: Tensor
    sums: Tensor


@triton.jit
def round_to_tf32(x):
    """FP32 x to the ten fraction bits of TF32, to nearest. Tensor cores cut the others off: products would be too small."""
    nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, nearest, x)


@triton.jit(do_not_specialize=["sequences"])
def window_kernel(
    q, k_window, v_window, rows, part, tokens, sequences, matrix, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, RING: tl.constexpr,
    TYPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention of new tokens over what they see in BF16. Grid: [column tiles, HEADS].

    It walks the sinks and then the tails of its queries, TOKENS at a time; what one of them does not see is masked.

    Args:
        q: [T, HEADS * GROUP, D] in the model's domain.
        part: `Part`, of sums of exp2(logit - maximum) * v; of a sequence without tokens the maximum is -inf, sums are 0.
        matrix: [D, D] fp32 of `into_rotated`.
        scale: softmax_scale * log2(e).
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, local_tile = tile, 0
    SINK: tl.constexpr = tokens.SINK
    # Of its tail a query sees what lies within its window.
    TAIL: tl.constexpr = tokens.TAIL if tokens.WINDOW == 0 else min(tokens.TAIL, tokens.WINDOW)
    if not tokens.ONE_EACH:
        _, columns = sequence_tiles(tokens, sequences, TOKENS, GROUP, COLUMNS)
        sequence, local_tile = find_column_tile(columns, tile)
    if sequence < sequences:
        column = local_tile * COLUMNS + tl.arange(0, COLUMNS)
        token = tl.load(tokens.query_start_loc + sequence) + column // GROUP
        live = token < tl.load(tokens.query_start_loc + sequence + 1)
        position = tl.load(tokens.positions + token, live, -1).to(tl.int32)
        vector = (token * (HEADS * GROUP) + kv_head * GROUP + column % GROUP).to(tl.int64)
        stop = tl.minimum(tl.load(tokens.seq_lens + sequence), tl.max(position, 0) + 1)
        begin, count = 0, SINK
        if TAIL > 0:
            begin = tl.maximum(tl.min(tl.where(live, position, 2147483646), 0) + 1 - TAIL, SINK)
            count = tl.maximum(stop - begin, 0) + SINK
        dims, halves = tl.arange(0, D)[None, :], tl.arange(0, D // 2)[None, :]
        queries = tl.load(q + vector[:, None] * D + dims, live[:, None], 0.0)
        row_at = (tl.load(rows + sequence) * HEADS + kv_head) * ((SINK + RING) * D)
        peak, total = tl.full((COLUMNS,), -float("inf"), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        low, high = tl.zeros((COLUMNS, D // 2), tl.float32), tl.zeros((COLUMNS, D // 2), tl.float32)
        for first in tl.range(0, count, TOKENS):
            index = first + tl.arange(0, TOKENS)
            key_position, place = index, index
            if TAIL > 0:
                key_position = tl.where(index < SINK, index, begin + index - SINK)
                place = tl.where(index < SINK, index, key_position % RING + SINK)
            # Places that no token of this sequence lies at hold leftovers, NaN perhaps.
            valid = (index < count) & (key_position < stop)
            at = row_at + (place * D)[:, None]
            k = tl.load(k_window + at + dims, valid[:, None], 0.0)
            logits = dot(queries, tl.trans(k), tl.zeros((COLUMNS, TOKENS), tl.float32), TYPE) * scale
            late, sees = position[:, None] - key_position[None, :], valid[None, :]
            sees = sees & (late >= 0) & ((late < TAIL) | (key_position[None, :] < SINK))
            if tokens.WINDOW > 0:
                sees = sees & (late < tokens.WINDOW)
            logits = tl.where(sees, logits, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(logits, 1))
            finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            p, shrink = tl.exp2(logits - finite[:, None]), tl.exp2(peak - finite)
            # The sum is that of what is multiplied, which BF16 rounds.
            p = round_to(p, TYPE)
            total, peak = total * shrink + tl.sum(p.to(tl.float32), 1), new_peak
            v_at = v_window + at + halves
            low = dot(p, tl.load(v_at, valid[:, None], 0.0), low * shrink[:, None], TYPE)
            high = dot(p, tl.load(v_at + D // 2, valid[:, None], 0.0), high * shrink[:, None], TYPE)
        row = tl.where(live, vector, 0)
        tl.store(part.maxima + row, peak, live)
        tl.store(part.sums + row, total, live)
        width = tl.arange(0, WIDTH)[None, :]
        out, half_matrix = part.vectors + row[:, None] * D + width, matrix + tl.arange(0, D // 2)[:, None] * D + width
        # TF32 keeps as many bits as the FP16 of the rotated queries.
        precision: tl.constexpr = "tf32x3" if tl.float32 == TYPE else "tf32"
        if tl.float32 != TYPE:
            low, high = round_to_tf32(low), round_to_tf32(high)
        for piece in tl.static_range(D // WIDTH):
            rotated = tl.dot(low, tl.load(half_matrix + piece * WIDTH), input_precision=precision)
            high_matrix = tl.load(half_matrix + (D // 2) * D + piece * WIDTH)
            rotated = tl.dot(high, high_matrix, rotated, input_precision=precision)
            tl.store(out + piece * WIDTH, rotated, live[:, None])


@cache
def into_rotated(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device, tf32: bool) -> Tensor:
    """[D, D] fp32 in the kernels' order: `y = x @ m`, for which `y @ rotation.T = x`; with `tf32` rounded to TF32.

    By the rotation itself, whose entries are rounded to BF16, a round trip is off by 3e-3 of a vector's length.
    """
    rotation = to_layout(kv_format, layer, head_dim, torch.device("cpu")).rotation
    inverse: Tensor = torch.linalg.inv(rotation.double().T)
    matrix = inverse.float().contiguous()
    if tf32:
        matrix = ((matrix.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return matrix.to(device)


def _tile(most: int, group: int, head_dim: int, operand: tl.dtype) -> dict[str, int]:
    """Sizes of a launch for `most` new tokens of a sequence, whose loads are on their way before the first is worked on."""
    columns = max(16, 1 << (group - 1).bit_length()) if most == 1 else 16
    if operand == tl.float32 or head_dim > 128:
        return {"COLUMNS": columns, "TOKENS": 16 if operand == tl.float32 else 32, "num_warps": 8, "num_stages": 2}
    return {"COLUMNS": 64 if most * group >= _MANY else columns, "TOKENS": 32, "num_warps": 4, "num_stages": 3}


def attend_windows(q: Tensor, windows: Windows, at: LayerView, scale: float) -> Part:
    """Attention of q [T, Hq, D] over the tokens in BF16, one launch, without waiting; `scale` is softmax_scale * log2(e).

    Rounding points: in a BF16 model probabilities to BF16, summed rounded; sums of V are rotated in TF32.
    """
    batch, shape = at.batch, at.kv.shape
    (tokens, q_heads, head_dim), heads, sequences = q.shape, shape.num_kv_heads, len(batch.seq_lens)
    group, operand = q_heads // heads, rotation_operand(q, q.dtype == torch.bfloat16)
    tile = _tile(triton.cdiv(tokens, sequences), group, head_dim, operand)
    column_tiles = sequences if tokens == sequences else triton.cdiv(tokens * group, tile["COLUMNS"]) + sequences
    part = Part(*(torch.empty(shape, device=q.device) for shape in (q.shape, q.shape[:2], q.shape[:2])))
    launch(window_kernel, (column_tiles, heads))(
        q.contiguous(), *(one.vectors for one in windows), batch.rows, part,
        token_arguments(batch, windows, shape.window), sequences,
        into_rotated(at.kv.v.kv_format, at.layer, head_dim, q.device, operand != tl.float32), scale,
        HEADS=heads, GROUP=group, D=head_dim, RING=windows[0].ring, TYPE=operand, WIDTH=_WIDTH, **tile,
    )  # fmt: skip
    return part
