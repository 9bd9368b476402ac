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
from haarkv.tq_ops.kv.layer import LayerKV

ROWS = 16
"""Vectors of a program: a tile of the tensor cores."""


@dataclass(frozen=True)
class WindowPair:
    """The tokens in BF16 of one layer.

    Attributes:
        k, v: [num_rows, Hkv, sink + ring, D] bf16, as in `tq_ops.kv.residual_window.WindowPair.vectors`.
        tail: tokens that a query sees in BF16, itself among them; packed it sees those from `sink` to `tail` before it.
        sink: first tokens that every query sees in BF16.
        ring: newest tokens there is room for.
    """

    k: Tensor
    v: Tensor
    tail: int
    sink: int
    ring: int


def layer_windows(kv: LayerKV) -> WindowPair | None:
    """What a layer keeps in BF16, if anything."""
    k, v = kv.windows
    if k is None and v is None:
        return None
    # Every format that the kernels read is lossy, and stores each vector alone.
    assert k is not None
    assert v is not None
    assert (k.tail, k.sink, k.ring) == (v.tail, v.sink, v.ring)
    return WindowPair(k.vectors, v.vectors, k.tail, k.sink, k.ring)


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
    words: of `layout.centroid_words`; None where they are not looked up.
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
    mean, weights, widths, gains, cos, sin: of `layout.LearnedTables`; None of a rotation.
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
    mean, largest, cos, sin: of `layout.LearnedTables`.
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


def turning(layout: Layout, batch: Batch, window: int | None, operand: tl.dtype) -> Turning:
    """Of a layer's K for the queries of a batch; `operand` as `Turning.TYPE`."""
    if not (learned_tables := layout.learned):
        return Turning(*(None,) * 6, *map(constant, (0, 0, operand)))
    tables = learned_tables.mean, learned_tables.largest, learned_tables.cos, learned_tables.sin
    return Turning(layout.rotation, *tables, batch.positions, *map(constant, (learned_tables.half, window or 0, operand)))


def constant(value: Any) -> Any:
    """A value that a kernel is compiled for, inside of a tuple."""
    return tl.constexpr(value)


def read(fields: dict[str, Tensor], layout: Layout, permutes: bool) -> Read:
    """One side of a layer for attention."""
    codes, scales = fields["codes"], fields["scale"]
    return Read(
        codes, scales, codes.stride(0), scales.stride(0), layout.centroids, layout.words,
        *map(constant, (layout.bits, len(layout.columns.units), *layout.columns, permutes)),
    )  # fmt: skip


def write_arguments(fields: dict[str, Tensor], layout: Layout, window: Tensor | None, x: Tensor) -> Write:
    """One side of a layer for `quantize.append`; x says where it runs."""
    codes, scales, learned_tables = fields["codes"], fields["scale"], layout.learned
    mean, weights, widths, gains, cos, sin = (
        (
            learned_tables.mean,
            learned_tables.weights,
            learned_tables.widths,
            learned_tables.gains,
            learned_tables.cos,
            learned_tables.sin,
        )
        if learned_tables
        else (None,) * 6
    )
    return Write(
        codes, scales, codes.stride(0), scales.stride(0), layout.centroids, layout.forward, layout.boundaries, mean, weights,
        widths, gains, cos, sin, window,
        BITS=constant(layout.bits), COLUMNS=constant(len(layout.columns.units)), UNITS=constant(layout.columns.units),
        PARTS=constant(layout.columns.parts), ALONG=constant(layout.along), LEARNED=constant(learned_tables is not None),
        HALF=constant(learned_tables.half if learned_tables else layout.rotation.shape[-1] // 2),
        STRETCHES=constant(len(learned_tables.cos) if learned_tables else 0),
        TYPE=constant(choices.rotation_operand(x, exact_in_bf16=True)),
    )  # fmt: skip


def both_writes(
    fields: tuple[dict[str, Tensor], dict[str, Tensor]],
    layouts: tuple[Layout, Layout],
    windows: WindowPair | None,
    x: Tensor,
    head_dim: int,
) -> dict[str, Any]:
    """K and V of a layer for a kernel that stores them, and its warps, by name."""
    in_bf16 = (windows.k, windows.v) if windows else (None, None)
    k, v = (write_arguments(side, layout, vectors, x) for side, layout, vectors in zip(fields, layouts, in_bf16, strict=True))
    types, has_learned = (k.TYPE.value, v.TYPE.value), any(one.learned for one in layouts)
    return {"k": k, "v": v, "num_warps": choices.store_warps(head_dim, types, max(one.bits for one in layouts), has_learned)}


def keeping(windows: WindowPair | None, batch: Batch) -> Keeping:
    """Where a batch's tokens stay in BF16."""
    if windows is None:
        return Keeping(None, None, None, *map(constant, (0, 0, 0)))
    batch_arrays = batch.rows, batch.positions, batch.query_start_loc
    return Keeping(*batch_arrays, *map(constant, (windows.sink, windows.ring, sequence_bits(batch))))


def sequence_bits(batch: Batch) -> int:
    """As `in_bf16.sequence_of` takes it; 0 where every sequence has one new token."""
    sequences = batch.seq_lens.shape[0]
    return 0 if len(batch.positions) == sequences else max(1, (sequences - 1).bit_length())


def token_arguments(batch: Batch, windows: WindowPair | None, window: int | None, size: int) -> Tokens:
    """The new tokens of a placed batch; `size` as `Tokens.SIZE`."""
    one_each = len(batch.positions) == batch.seq_lens.shape[0]
    window_sizes = (windows.tail, windows.sink) if windows else (0, 0)
    return Tokens(
        batch.positions, batch.query_start_loc, batch.seq_lens, *map(constant, (*window_sizes, window or 0, one_each, size))
    )


def num_tiles(tokens: int, heads: int, layout: Layout) -> int:
    """How many tiles of `rotate.vectors_of` there are."""
    tiles: int = layout.matrices * triton.cdiv(tokens * heads // layout.matrices, ROWS)
    return tiles
