"""What launches hand to kernels: tuples of pointers and constants that belong together, named once for both sides of a cache.

A kernel takes a tuple as one parameter, and hands it on as one. What changes from batch to batch stands beside them: inside a
tuple a number would be a reason to compile anew.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.layout import Layout
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache

ROWS = 16
"""Vectors of a program: a tile of the tensor cores."""


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


Read = namedtuple("Read", "codes scales codes_stride scales_stride centroids words BITS COLUMNS UNITS PARTS PERMUTE")
"""K or V of one layer, as attention reads it. Names in capitals are constants of the kernel.

Attributes:
    codes, scales: the fields; both begin a block's tokens of one head after another's.
    codes_stride, scales_stride: from a block to the next, in bytes and in scales.
    centroids: of `layout.Layout`.
    words: of `layout.words_of`; None where they are not looked up.
    BITS: of a level.
    COLUMNS, UNITS, PARTS: how many columns learned keys lie in, 0 of planes, and `layout.Columns`.
    PERMUTE: whether centroids are looked up, or made two at a time, in registers.
"""


Write = namedtuple(
    "Write",
    "codes scales codes_stride scales_stride centroids forward boundaries mean weights widths gains cos sin kept "
    "BITS COLUMNS UNITS PARTS ALONG LEARNED HALF STRETCHES TYPE",
)
"""K or V of one layer, as it is quantized and stored.

Attributes:
    codes … PARTS: as in `Read`.
    forward, boundaries: of `layout.Layout`.
    mean, weights, widths, gains, cos, sin: of `layout.Learned`; None of a rotation.
    kept: [num_rows, Hkv, sink + ring, D] bf16, tokens that stay in it; None where none do.
    ALONG: of `Description`.
    LEARNED: whether these are learned keys.
    HALF, STRETCHES: of `rotate.places`, D/2 of a rotation, and rows of `cos`.
    TYPE: operands of the product with `forward`.
"""


Turning = namedtuple("Turning", "rotation mean largest cos sin positions HALF WINDOW TYPE")
"""What turns queries for the learned keys of a stretch; of a rotation None, and no constants.

Attributes:
    rotation: of `layout.Layout`.
    mean, largest, cos, sin: of `layout.Learned`.
    positions: of the batch.
    HALF: of `rotate.places`.
    WINDOW: tokens that a query sees; 0 for all.
    TYPE: operands of the product with `rotation`: BF16, and queries as sums of two such numbers, or FP32.
"""


Keeping = namedtuple("Keeping", "rows positions query_start_loc SINK RING SEQUENCE_BITS")
"""Where new tokens are kept in BF16, for `in_bf16.keep`; of nothing kept all but SINK and RING, 0, are None.

Attributes:
    rows, positions, query_start_loc: of the batch.
    SINK, RING: places of first tokens and of newest ones.
    SEQUENCE_BITS: loads that find a token's sequence; 0 where each has one token.
"""


Tokens = namedtuple("Tokens", "positions query_start_loc seq_lens TAIL SINK WINDOW ONE_EACH SIZE")
"""The new tokens of a batch, as attention sees them: tensors of `Batch`, and which of those before they see packed.

Attributes:
    TAIL, SINK: newest and first tokens that are seen in BF16; both 0 where none are.
    WINDOW: tokens that a query sees; 0 for all.
    ONE_EACH: every sequence has one new token.
    SIZE: a power of two, at least as many as there are sequences.
"""


def turning(of: Layout, batch: Batch, window: int | None, operand: tl.dtype) -> Turning:
    """Of a layer's K for the queries of a batch; `operand` as `Turning.TYPE`."""
    if not (learned := of.learned):
        return Turning(*(None,) * 6, *map(constant, (0, 0, operand)))
    tables = learned.mean, learned.largest, learned.cos, learned.sin
    return Turning(of.rotation, *tables, batch.positions, *map(constant, (learned.half, window or 0, operand)))


def constant(value: Any) -> Any:
    """A value that a kernel is compiled for, inside of a tuple."""
    return tl.constexpr(value)


def read(fields: dict[str, Tensor], of: Layout, permutes: bool) -> Read:
    """One side of a layer for attention."""
    codes, scales = fields["codes"], fields["scale"]
    return Read(
        codes, scales, codes.stride(0), scales.stride(0), of.centroids, of.words,
        *map(constant, (of.bits, len(of.columns.units), *of.columns, permutes)),
    )  # fmt: skip


def written(fields: dict[str, Tensor], of: Layout, kept: Tensor | None, x: Tensor) -> Write:
    """One side of a layer for `quantize.append`; x says where it runs."""
    codes, scales, learned = fields["codes"], fields["scale"], of.learned
    mean, weights, widths, gains, cos, sin = (
        (learned.mean, learned.weights, learned.widths, learned.gains, learned.cos, learned.sin) if learned else (None,) * 6
    )
    return Write(
        codes, scales, codes.stride(0), scales.stride(0), of.centroids, of.forward, of.boundaries, mean, weights,
        widths, gains, cos, sin, kept,
        BITS=constant(of.bits), COLUMNS=constant(len(of.columns.units)), UNITS=constant(of.columns.units),
        PARTS=constant(of.columns.parts), ALONG=constant(of.along), LEARNED=constant(learned is not None),
        HALF=constant(learned.half if learned else of.rotation.shape[-1] // 2),
        STRETCHES=constant(len(learned.cos) if learned else 0),
        TYPE=constant(choices.rotation_operand(x, exact_in_bf16=True)),
    )  # fmt: skip


def both_written(
    fields: tuple[dict[str, Tensor], dict[str, Tensor]], of: tuple[Layout, Layout], kept: Kept | None, x: Tensor, head_dim: int
) -> dict[str, Any]:
    """K and V of a layer for a kernel that stores them, and its warps, by name."""
    in_bf16 = (kept.k, kept.v) if kept else (None, None)
    k, v = (written(side, layout, vectors, x) for side, layout, vectors in zip(fields, of, in_bf16, strict=True))
    types, learned = (k.TYPE.value, v.TYPE.value), any(one.learned for one in of)
    return {"k": k, "v": v, "num_warps": choices.store_warps(head_dim, types, max(one.bits for one in of), learned)}


def keeping(kept: Kept | None, batch: Batch) -> Keeping:
    """Where a batch's tokens stay in BF16."""
    if kept is None:
        return Keeping(None, None, None, *map(constant, (0, 0, 0)))
    of_batch = batch.rows, batch.positions, batch.query_start_loc
    return Keeping(*of_batch, *map(constant, (kept.sink, kept.ring, sequence_bits(batch))))


def sequence_bits(batch: Batch) -> int:
    """As `in_bf16.sequence_of` takes it; 0 where every sequence has one new token."""
    sequences = batch.seq_lens.shape[0]
    return 0 if len(batch.positions) == sequences else max(1, (sequences - 1).bit_length())


def tokens_of(batch: Batch, kept: Kept | None, window: int | None, size: int) -> Tokens:
    """The new tokens of a placed batch; `size` as `Tokens.SIZE`."""
    one_each = len(batch.positions) == batch.seq_lens.shape[0]
    of_kept = (kept.tail, kept.sink) if kept else (0, 0)
    return Tokens(
        batch.positions, batch.query_start_loc, batch.seq_lens, *map(constant, (*of_kept, window or 0, one_each, size))
    )


def tiles_of(tokens: int, heads: int, of: Layout) -> int:
    """How many tiles of `rotate.vectors_of` there are."""
    tiles: int = of.matrices * triton.cdiv(tokens * heads // of.matrices, ROWS)
    return tiles
