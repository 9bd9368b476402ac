"""Pieces of kernels: rounding, products, rotation of vectors into the domain of the codes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.layout import Layout
from haarkv.tq_ops.formats.stretches import STRETCH as _STRETCH

STRETCH = tl.constexpr(_STRETCH)
ROWS = 16
"""Vectors of a program: a tile of the tensor cores."""


@triton.jit
def round_to(x, TYPE: tl.constexpr):
    """FP32 x as TYPE, to nearest, ties to even. Triton's interpreter truncates to BF16 instead of rounding."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x).to(TYPE)
    return x.to(TYPE)


@triton.jit
def dot(a, b, into, TYPE: tl.constexpr):
    """`into + a @ b` in FP32, operands as TYPE; FP32 operands take three TF32 products, which keep FP32 precision."""
    if tl.float32 == TYPE:
        return tl.dot(a.to(TYPE), b.to(TYPE), into, input_precision="tf32x3")
    return tl.dot(a.to(TYPE), b.to(TYPE), into)


@triton.jit
def vector_ids(tile, tokens, HEADS: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr):
    """Token and head [ROWS] of a tile's vectors, and the matrix that they share: each KV head of learned keys has its own.

    A token past the last is none. Tiles of the first matrix come first.
    """
    shared: tl.constexpr = HEADS // MATRICES
    matrix = 0
    if MATRICES > 1:
        tiles = tl.cdiv(tokens * shared, ROWS)
        matrix = tile // tiles
        tile = tile % tiles
    vector = tile * ROWS + tl.arange(0, ROWS)
    return vector // shared, matrix * shared + vector % shared, matrix


def num_tiles(tokens: int, heads: int, layout: Layout) -> int:
    """Tiles of `vector_ids`."""
    tiles: int = layout.matrices * triton.cdiv(tokens * heads // layout.matrices, ROWS)
    return tiles


@triton.jit
def places(HALF: tl.constexpr, D: tl.constexpr):
    """Offsets in memory of a vector's two halves [D/2], so that RoPE turns number i of both together.

    RoPE turns numbers i and i + HALF together; if HALF is less than D/2, it leaves those from 2 * HALF on alone.
    """
    number = tl.arange(0, D // 2)
    low, high = number, number + D // 2
    if HALF < D // 2:
        low, high = tl.where(number < HALF, low, low + HALF), tl.where(number < HALF, number + HALF, high)
    return low, high


@triton.jit
def turned_back(low, high, cos, sin):
    """Halves [ROWS, D/2] turned back by angles whose cos and sin are [ROWS or 1, D/2]."""
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def rotate_columns(
    low, high, rotation, first,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Columns first … first + WIDTH - 1 of `x @ rotation`, or with BACK of `x @ rotation.T`: [ROWS, WIDTH] fp32.

    `low`, `high` [ROWS, D/2] are the halves of x; a single row is multiplied without tensor cores, which take 16.
    """
    i, column = tl.arange(0, D // 2)[:, None], first + tl.arange(0, WIDTH)[None, :]
    # BACK reads the same matrix along its other axis.
    at = rotation + (column * D + i if BACK else i * D + column)
    across: tl.constexpr = (D // 2) * (1 if BACK else D)
    if ROWS == 1:
        product = tl.trans(low) * tl.load(at).to(tl.float32) + tl.trans(high) * tl.load(at + across).to(tl.float32)
        return tl.sum(product, 0)[None, :]
    zero = tl.zeros((ROWS, WIDTH), tl.float32)
    return dot(high, tl.load(at + across), dot(low, tl.load(at), zero, TYPE), TYPE)


@triton.jit
def power_of_two(exponent):
    """2**exponent, exponent int32 in -126 … 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_gains(low, high, largest, D: tl.constexpr):
    """Powers of two [ROWS], at least 1: queries in learned coordinates over them fit FP16; `largest` of one head."""
    dim = tl.arange(0, D // 2)
    largest_low, largest_high = tl.load(largest + dim)[None, :], tl.load(largest + D // 2 + dim)[None, :]
    most = tl.sum(tl.abs(low.to(tl.float32)) * largest_low, 1) + tl.sum(tl.abs(high.to(tl.float32)) * largest_high, 1)
    return power_of_two(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - 126 - 15, 0))


@triton.jit
def rotate_finely(
    low, high, rotation, first,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """As `rotate_columns`, of FP32 vectors [ROWS, D/2] that hold no BF16 numbers.

    With BF16 operands each number is the sum of two, which together keep 16 bits: five more than the FP16 of the result.
    """
    if tl.bfloat16 == TYPE:
        i, column = tl.arange(0, D // 2)[:, None], first + tl.arange(0, WIDTH)[None, :]
        at = rotation + i * D + column
        out = tl.zeros((ROWS, WIDTH), tl.float32)
        for half in tl.static_range(2):
            x = low if half == 0 else high
            matrix = tl.load(at + half * (D // 2 * D))
            near = round_to(x, TYPE)
            out = dot(near, matrix, dot(round_to(x - near.to(tl.float32), TYPE), matrix, out, TYPE), TYPE)
    else:
        out = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
    return out


class Rotated(NamedTuple):
    """Queries in the domain of the codes; for learned keys once for each stretch, unset where a query does not see it.

    Attributes:
        queries: [T, Hq, D], or of S stretches [S, T, Hq, D], fp16 in a BF16 model, else fp32.
        gains: [S, T, Hq] fp32, powers of two that these queries were divided by, to fit FP16; None of a rotation.
        lacks: [S, T, Hq] fp32, the turned query's product with K's mean; None of a rotation.
    """

    queries: Tensor
    gains: Tensor | None
    lacks: Tensor | None


@triton.jit
def for_stretch(low, high, stretch, learned, head, D: tl.constexpr):
    """Queries of one KV head, as halves [ROWS, D/2] of `places`, turned for the keys of a stretch.

    Returns:
        low, high fp32; gains [ROWS]; and what logits lack [ROWS], the products with K's mean.
    """
    dim = tl.arange(0, D // 2)
    at = stretch * (D // 2) + dim
    cos, sin = tl.load(learned.cos + at)[None, :], tl.load(learned.sin + at)[None, :]
    low, high = turned_back(low.to(tl.float32), high.to(tl.float32), cos, sin)
    mean = learned.mean + head * D + dim
    lacks = tl.sum(low * tl.load(mean)[None, :], 1) + tl.sum(high * tl.load(mean + D // 2)[None, :], 1)
    return low, high, query_gains(low, high, learned.largest + head * D, D), lacks


@triton.jit
def store_rotated(
    low, high, token, head, matrix, tokens, first, share, shares, rotation, out, learned, positions,
    HEADS: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Columns first … first + WIDTH - 1 of rotated queries [ROWS], rounded to the dtype of `out`, a `Rotated`.

    Learned keys: once for each stretch that is seen; each of `shares` programs takes every `shares`-th.
    """
    live = token < tokens
    vector, column = token * HEADS + head, first + tl.arange(0, WIDTH)[None, :]
    if learned is None:
        rotated = rotate_columns(low, high, rotation, first, ROWS, D, WIDTH, TYPE, False)
        at = out.queries + vector[:, None].to(tl.int64) * D + column
        tl.store(at, round_to(rotated, out.queries.dtype.element_ty), live[:, None])
    else:
        position = tl.load(positions + token, live, 0).to(tl.int32)
        begin = 0
        if WINDOW > 0:  # tokens that a query sees
            begin = tl.maximum(tl.min(tl.where(live, position, 2147483646), 0) + 1 - WINDOW, 0) // STRETCH
        for stretch in range(begin + share, tl.max(position, 0) // STRETCH + 1, shares):
            now_low, now_high, gain, lack = for_stretch(low, high, stretch, learned, matrix, D)
            rotated = rotate_finely(
                now_low, now_high, rotation + matrix * (D * D), first, ROWS, D, WIDTH, TYPE
            ) / gain[:, None]  # fmt: skip
            place = vector.to(tl.int64) + stretch * (tokens * HEADS)
            at = out.queries + place[:, None] * D + column
            tl.store(at, round_to(rotated, out.queries.dtype.element_ty), live[:, None])
            if first == 0:
                tl.store(out.gains + place, gain, live)
                tl.store(out.lacks + place, lack, live)


def rotation_operand(x: Tensor, exact_in_bf16: bool) -> tl.dtype:
    """BF16 where both operands hold BF16 numbers, else FP32. The interpreter gets FP32: its BF16 products are wrong."""
    return tl.bfloat16 if exact_in_bf16 and x.is_cuda else tl.float32
