"""Quantize and store: K and V are rotated, their codes and scales written to slots, and what stays in BF16 to its windows.

Both are multiplied by a matrix whose columns are in the kernels' order, so each level is chosen where it is packed.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.in_bf16 import layer_windows
from haarkv.tq_ops.cuda.layout import Layout
from haarkv.tq_ops.cuda.planes import store_codes, store_columns
from haarkv.tq_ops.cuda.rotate import (
    STRETCH,
    places,
    power_of_two,
    rotate_columns,
    rotation_operand,
    round_to,
    turned_back,
)
from haarkv.tq_ops.cuda.schedule import NARROW, sequence_bits, token_sequence
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS
from haarkv.tq_ops.kv.cache import LayerView

STRETCHES = tl.constexpr(MOST_POSITIONS // STRETCH.value)

Write = namedtuple(
    "Write",
    "codes scales codes_stride scales_stride centroids forward boundaries kept BITS COLUMNS UNITS PARTS ALONG TYPE",
)
"""K or V of one layer, as it is quantized and stored: as `attention.Read`, with tables of `layout.Layout`.

Attributes:
    kept: [num_rows, Hkv, sink + ring, D] bf16, tokens that stay in it; None where none do.
    ALONG: of `Description`.
    TYPE: operands of the product with `forward`.
"""

Keeping = namedtuple("Keeping", "rows positions query_start_loc SINK RING SEQUENCE_BITS")
"""Which new tokens of a batch stay in BF16: places of first tokens, SINK, and of newest ones, RING; both 0 where none do."""


def store_arguments(at: LayerView, layouts: tuple[Layout, Layout], x: Tensor) -> dict[str, Any]:
    """`Write` of K and of V and the batch's `Keeping` for `prologue_kernel`, and its warps: with four it would spill where
    there are eight. x, K or V, says where it runs.
    """
    operand, windows, batch = rotation_operand(x, exact_in_bf16=True), layer_windows(at.kv), at.batch
    kept: tuple[Tensor | None, ...] = (None, None)
    keeping = Keeping(None, None, None, *map(tl.constexpr, (0, 0, 0)))
    if windows:
        constants = map(tl.constexpr, (windows[0].sink, windows[0].ring, sequence_bits(batch)))
        kept, keeping = (
            tuple(one.vectors for one in windows), Keeping(batch.rows, batch.positions, batch.query_start_loc, *constants)
        )  # fmt: skip
    sides = []
    for fields, layout, vectors in zip(at.kv.fields, layouts, kept, strict=True):
        codes, scales, columns = fields["codes"], fields["scale"], layout.columns
        sides.append(Write(
            codes, scales, codes.stride(0), scales.stride(0), layout.centroids, layout.forward, layout.boundaries, vectors,
            *map(tl.constexpr, (layout.bits, len(columns.units), *columns, layout.along, operand)),
        ))  # fmt: skip
    wide = at.kv.shape.head_dim > 128 or operand == tl.float32 or any(one.bits > NARROW or one.learned for one in layouts)
    return {"k": sides[0], "v": sides[1], "keeping": keeping, "num_warps": 8 if wide else 4}


@triton.jit
def exact_norm(low, high):
    """As `tq_ops.formats.rotated.exact_norm`: low, high [rows, D/2] of unit vectors, zeros where x is zero; norm [rows]."""
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    tiny = largest < 7.888609052210118e-31  # 2**-100: denormals first become normal numbers
    lift = tl.where(tiny, 18446744073709551616.0, 1.0)
    exponent = ((largest * lift).to(tl.int32, bitcast=True) >> 23) - 127
    # In two steps, since 2**-127 is no normal number.
    first = exponent >> 1
    down, further = power_of_two(-first), power_of_two(first - exponent)
    low = low * lift[:, None] * down[:, None] * further[:, None]
    high = high * lift[:, None] * down[:, None] * further[:, None]
    norm = tl.sqrt_rn(tl.sum(low * low, 1) + tl.sum(high * high, 1))
    divisor = tl.where(norm > 0, norm, 1.0)[:, None]
    norm = norm * power_of_two(first) * power_of_two(exponent - first) * tl.where(tiny, 5.421010862427522e-20, 1.0)
    return tl.div_rn(low, divisor), tl.div_rn(high, divisor), norm


@triton.jit
def levels(y, boundaries, BITS: tl.constexpr):
    """Number of boundaries [2**BITS - 1], ascending, that each coordinate reaches, int32."""
    level = tl.zeros(y.shape, tl.int32)
    if BITS <= 4:
        for index in tl.static_range(2**BITS - 1):
            level += (y >= tl.load(boundaries + index)).to(tl.int32)
    else:
        # Bit by bit from the top: BITS loads for each coordinate, rather than a comparison with each of many boundaries.
        for bit in tl.static_range(BITS):
            higher = level + 2 ** (BITS - 1 - bit)
            level = tl.where(y >= tl.load(boundaries + higher - 1), higher, level)
    return level


@triton.jit
def by_rotation(low, high, into, D: tl.constexpr, ROWS: tl.constexpr):
    """Levels [ROWS, D/2] of both halves of rotated vectors, and their scales [ROWS] fp32; `into` is a `Write`."""
    low, high, norm = exact_norm(low, high)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    rotated_low = rotate_columns(low, high, into.forward, 0, ROWS, D, D // 2, into.TYPE, False)
    rotated_high = rotate_columns(low, high, into.forward, D // 2, ROWS, D, D // 2, into.TYPE, False)
    low, high = levels(rotated_low, into.boundaries, into.BITS), levels(rotated_high, into.boundaries, into.BITS)
    low_centroid, high_centroid = tl.load(into.centroids + low), tl.load(into.centroids + high)
    if into.ALONG:
        length = tl.sum(low_centroid * rotated_low, 1) + tl.sum(high_centroid * rotated_high, 1)
    else:
        length = tl.sqrt_rn(tl.sum(low_centroid * low_centroid, 1) + tl.sum(high_centroid * high_centroid, 1))
    return low, high, tl.where(length > 0, tl.div_rn(norm, tl.where(length > 0, length, 1.0)), 0.0)


@triton.jit
def fit_levels(y, gain, weight, width, centroids, boundaries):
    """Levels [ROWS, D/2] of half of the coordinates of y, of deviation 1, scaled by a gain.

    `weight`, `width` [1, D/2]: of each coordinate, and bits of its level. Returns levels; sums [ROWS] of weight * centroid *
    y, and of weight * centroid**2.
    """
    level, value = tl.zeros(y.shape, tl.int32), gain * y
    width_offset = (1 << width) - 1 - width  # the first of its boundaries
    for bit in tl.static_range(6):
        half = (1 << width) >> (bit + 1)
        higher = level + half
        boundary = tl.load(boundaries + width_offset + higher - 1, half > 0, float("inf"))
        level = tl.where(value >= boundary, higher, level)
    centroid = tl.load(centroids + ((1 << width) - 2) + level)
    weighted_centroid = centroid * weight
    return level, tl.sum(weighted_centroid * y, 1), tl.sum(weighted_centroid * centroid, 1)


@triton.jit
def by_coordinates(low, high, into, learned, matrix, D: tl.constexpr, ROWS: tl.constexpr):
    """As `by_rotation`, of learned keys; `matrix` is the head of all these vectors."""
    half, dim = tl.arange(0, D // 2), matrix * D + tl.arange(0, D // 2)
    low, high = low - tl.load(learned.mean + dim)[None, :], high - tl.load(learned.mean + D // 2 + dim)[None, :]
    low, high, gamma = exact_norm(low, high)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    forward = into.forward + matrix * (D * D)
    y_low = rotate_columns(low, high, forward, 0, ROWS, D, D // 2, into.TYPE, False)
    y_high = rotate_columns(low, high, forward, D // 2, ROWS, D, D // 2, into.TYPE, False)
    rho = tl.sqrt_rn((tl.sum(y_low * y_low, 1) + tl.sum(y_high * y_high, 1)) / D)
    weight_low, weight_high = tl.load(learned.weights + dim)[None, :], tl.load(learned.weights + D // 2 + dim)[None, :]
    length = gamma * tl.sqrt_rn(tl.sum(y_low * y_low * weight_low, 1) + tl.sum(y_high * y_high * weight_high, 1))
    divisor = tl.where(rho > 0, rho, 1.0)[:, None]
    y_low, y_high = tl.div_rn(y_low, divisor), tl.div_rn(y_high, divisor)
    width_low, width_high = tl.load(learned.widths + half)[None, :], tl.load(learned.widths + D // 2 + half)[None, :]
    level_low, level_high = tl.zeros((ROWS, D // 2), tl.int32), tl.zeros((ROWS, D // 2), tl.int32)
    square, best = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS,), -1.0, tl.float32)
    # A loop and not three copies of it, which take three times as long to compile.
    for attempt in tl.range(0, 3):
        gain = tl.load(learned.gains + attempt)
        next_low, inner_low, square_low = fit_levels(y_low, gain, weight_low, width_low, into.centroids, into.boundaries)
        next_high, inner_high, square_high = fit_levels(y_high, gain, weight_high, width_high, into.centroids, into.boundaries)
        inner, next_square = inner_low + inner_high, square_low + square_high
        fit = tl.div_rn(inner * inner, next_square)
        better = fit > best
        level_low = tl.where(better[:, None], next_low, level_low)
        level_high = tl.where(better[:, None], next_high, level_high)
        square, best = tl.where(better, next_square, square), tl.where(better, fit, best)
    return level_low, level_high, tl.div_rn(length, tl.sqrt_rn(square))


@triton.jit
def by_stretch(low, high, token, live, learned, positions, D: tl.constexpr):
    """Learned keys turned as their stretches store them."""
    # The positions of rows that only pad a batch mean nothing.
    stretch = tl.load(positions + token, live, 0) // STRETCH
    stretch = tl.minimum(tl.maximum(stretch, 0), STRETCHES - 1).to(tl.int32)
    at = stretch[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    return turned_back(low, high, tl.load(learned.cos + at), tl.load(learned.sin + at))


@triton.jit
def append(
    low, high, token, head, matrix, live, side: tl.constexpr, into, learned, positions, slots, fault, layer,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, STAND_IN: tl.constexpr,
):  # fmt: skip
    """Quantize vectors [ROWS, D], as halves of `places`, and store them in `into`, a `Write`.

    The first vector that is not finite is noted in `fault` [1] int64 (`layout.fault_place`) and left out, or with STAND_IN
    stored with zeros. A negative slot is skipped. Returns [ROWS], which vectors are stored, or would be without WRITE.
    """
    if learned is not None and not STAND_IN:
        # What is too large to be turned is refused as well.
        low, high = by_stretch(low, high, token, live, learned, positions, D)
    # inf - inf and NaN - NaN are NaN, which is not 0.
    bad = (tl.sum(low - low, 1) + tl.sum(high - high, 1)) != 0
    left_out = bad
    if STAND_IN:
        low, high = tl.where(low - low == 0, low, 0.0), tl.where(high - high == 0, high, 0.0)
        left_out = tl.zeros(bad.shape, tl.int1)
        if learned is not None:
            low, high = by_stretch(low, high, token, live, learned, positions, D)
    if learned is not None:
        low, high, scale = by_coordinates(low, high, into, learned, matrix, D, ROWS)
    else:
        low, high, scale = by_rotation(low, high, into, D, ROWS)
    scale = tl.minimum(scale, 65504.0)
    slot = tl.load(slots + token, live, -1)
    live = live & (slot >= 0)
    key = ((layer.to(tl.int64) * 2 + side) << 48) + (token.to(tl.int64) << 16) + head
    tl.atomic_min(fault + tl.zeros((ROWS,), tl.int32), key, mask=live & bad)
    live = live & (left_out == 0)
    if WRITE:
        block, row = slot // BLOCK, head * BLOCK + slot % BLOCK
        at = block * into.codes_stride + row * (D * into.BITS // 8)
        if into.COLUMNS > 0:
            store_columns(into, at, live, low, high, D)
        else:
            store_codes(into.codes, at, live, low, high, D, into.BITS)
        tl.store(into.scales + block * into.scales_stride + row, scale.to(tl.float16), live)
    return live


@triton.jit
def keep(low, high, token, head, live, window, into, sequences, HEADS: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr):
    """Store vectors [ROWS, D], halves of `places`, in `window` in BF16: token j at `SINK + j % RING`, a sink at j as well."""
    sequence = token_sequence(token, into.query_start_loc, sequences, into.SEQUENCE_BITS) if into.SEQUENCE_BITS > 0 else token
    row, position = tl.load(into.rows + sequence, live, 0), tl.load(into.positions + token, live, 0).to(tl.int32)
    at = window + ((row * HEADS + head) * ((into.SINK + into.RING) * D))[:, None]
    low_dims, high_dims = places(HALF, D)
    low, high = round_to(low, tl.bfloat16), round_to(high, tl.bfloat16)
    if into.RING > 0:
        newest = at + ((position % into.RING + into.SINK) * D)[:, None]
        tl.store(newest + low_dims[None, :], low, live[:, None])
        tl.store(newest + high_dims[None, :], high, live[:, None])
    if into.SINK > 0:
        first, live = at + (position * D)[:, None], live & (position < into.SINK)
        tl.store(first + low_dims[None, :], low, live[:, None])
        tl.store(first + high_dims[None, :], high, live[:, None])


@triton.jit
def append_and_keep(
    low, high, token, head, matrix, live, side: tl.constexpr, into, learned, keeping, sequences, positions, slots, fault,
    layer, HEADS: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WRITE: tl.constexpr, STAND_IN: tl.constexpr,
):  # fmt: skip
    """`append`, and `keep` of the same vectors, where `keeping` says so."""
    keeps: tl.constexpr = WRITE and keeping.SINK + keeping.RING > 0
    # Learned coordinates take registers, and nothing finite is refused: the vectors need not wait until levels are chosen.
    if keeps and learned is not None:
        finite = (tl.sum(low - low, 1) + tl.sum(high - high, 1)) == 0
        valid = live & finite & (tl.load(slots + token, live, -1) >= 0)
        keep(low, high, token, head, valid, into.kept, keeping, sequences, HEADS, HALF, D)
    live = append(
        low, high, token, head, matrix, live, side, into, learned, positions, slots, fault, layer, D, BLOCK, ROWS, WRITE,
        STAND_IN,
    )  # fmt: skip
    if keeps and learned is None:
        keep(low, high, token, head, live, into.kept, keeping, sequences, HEADS, HALF, D)
