"""The calls of the C interface that a cache and a layer decide, filled in once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.layout import READS, Layout, layout
from haarkv.tq_ops.cpu.library import Cell
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, Turns
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kept import Kept, KeptBlocks
from haarkv.tq_ops.kv.reads import misfit, wrong_head_dim
from haarkv.tq_ops.weight import Blocks, Weight


@dataclass(frozen=True)
class Prepared:
    """Calls filled in with what a cache and a layer decide. Each owns the tensors that it points to."""

    attention: library.Attention
    store: library.Store


def prepare(cache: PagedKVCache, layer: int, isa: int) -> Prepared | None:
    """Fill in the calls of a layer for one instruction set, an index of `library.ISAS`.

    Returns:
        None where the kernels do not read K's or V's format, or a stretch of keys ends within a block.
    Raises:
        InputError: a head_dim that the kernels are not made for.
    """
    shape, pair = cache.shape(layer), cache.plan.layers[layer]
    if reason := wrong_head_dim(READS, shape.head_dim):
        raise InputError(reason)
    if any(misfit(READS, kv_format, shape.head_dim) for kv_format in pair):
        return None
    k_fields, v_fields = cache.k_fields(layer), cache.v_fields(layer)
    keys, values = (layout(kv_format, layer, shape.head_dim) for kv_format in pair)
    turns = pair[0].turns(layer)
    if turns and STRETCH % cache.block_size:
        return None
    stretches = _stretches(turns)
    k_kept, v_kept = map(_kept, cache.kept(layer))
    attention = library.Attention(
        cache=library.Cache(
            k=_side(k_fields, keys, k_kept), v=_side(v_fields, values, v_kept),
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=cache.block_size,
        ),
        stretches=stretches, q=0, out=0, rotation=_matrix(keys.rotate, shape.head_dim, keys.rotate_pairs),
        rotation_back=_matrix(values.rotate_back, shape.head_dim, values.rotate_back_pairs),
        block_table=0, query_start=0, positions=0, rows=0, kept_table=0, sequences=0, max_blocks=0, kept_blocks=0, num_heads=0,
        bf16=0, window=shape.window or 0, softmax_scale=0, isa=isa, threads=0,
    )  # fmt: skip
    store = library.Store(
        k=_store_side(k_fields, keys, k_kept, stretches),
        v=_store_side(v_fields, values, v_kept, _stretches(None)),
        slots=0, positions=0, query_start=0, rows=0, kept_slots=0, tokens=0, num_slots=cache.num_slots_of(layer), sequences=0,
        num_kv_heads=shape.num_kv_heads, block_size=cache.block_size, isa=isa, threads=0,
    )  # fmt: skip
    return Prepared(attention, store)


IS_BF16 = {torch.bfloat16: True, torch.float32: False}
"""The dtypes that the kernels take."""


def is_bf16(x: Tensor) -> bool:
    """Whether numbers are BF16; else they are FP32.

    Raises:
        TypeError: they are neither.
    """
    found = IS_BF16.get(x.dtype)
    if found is None:
        raise TypeError(f"the kernels take bfloat16 or float32, not {x.dtype}")
    return found


def too_long(cache: PagedKVCache, batch: Batch) -> bool:
    """Whether a sequence may have more positions than stretches are known for; the reference's ops run it then."""
    return batch.block_table.shape[1] * cache.block_size > MOST_POSITIONS


def _stretches(turns: Turns | None) -> library.Stretches:
    if turns is None:
        return library.Stretches(cos=0, sin=0, half=0, count=0)
    count = MOST_POSITIONS // STRETCH
    cos, sin = turns.table(count, torch.device("cpu"))
    return library.Stretches(cos=cos, sin=sin, half=len(turns.inv_freq), count=count)


def stored_weight(weight: Weight) -> library.Weight:
    """A matrix as the kernels take it; contiguous if it is dense. Blocks have to be of a type in `library.BLOCKS`.

    Raises:
        TypeError: as `is_bf16`.
    """
    if isinstance(weight, Blocks):
        assert weight.data.stride(1) == 1
        rows, columns = (0 if scales is None else scales.float() for scales in (weight.row_scales, weight.column_scales))
        return library.Weight(
            data=weight.data, row_scales=rows, column_scales=columns, row_bytes=weight.data.stride(0),
            stored=library.STORED.index(weight.type.name), x_bits=weight.x_bits,
        )  # fmt: skip
    return library.Weight(data=weight, row_scales=0, column_scales=0, row_bytes=0, stored=int(is_bf16(weight)), x_bits=0)


def has_kernel(weight: Weight) -> bool:
    """Whether the kernels multiply with a weight as it is: blocks of other types have to be restored first."""
    return not isinstance(weight, Blocks) or weight.type.name in library.BLOCKS


def _kept(kept: Kept | None) -> library.Kept:
    if kept is None:
        return library.Kept(vectors=0, block_stride=0, tail=0, sink=0, ring=0, block_size=0)
    stride, size = (kept.vectors.stride(0), kept.block_size) if isinstance(kept, KeptBlocks) else (0, 0)
    return library.Kept(
        vectors=kept.vectors, block_stride=stride, tail=kept.tail, sink=kept.sink, ring=kept.ring, block_size=size
    )  # fmt: skip


class _Stored(NamedTuple):
    """The fields of a side as the kernels see them.

    Attributes:
        bytes: of a vector's codes.
        codes_stride: from a block to the next, in bytes; scales_stride in scales.
    """

    codes: Tensor
    scales: Tensor | int
    codes_stride: int
    scales_stride: int
    bytes: int
    cell: Cell
    first_plane: int
    second_plane: int


def _stored(fields: dict[str, Tensor], of: Layout) -> _Stored:
    if of.columns is not None:
        cell = Cell.MIXED
    elif of.planes:
        cell = Cell.NIBBLE if sum(of.planes) <= 4 else Cell.BYTE
    else:
        cell = Cell.BF16 if is_bf16(fields["data"]) else Cell.FP32
    codes, scales, widths = fields.get("codes", fields.get("data")), fields.get("scale"), (*of.planes, 0, 0)
    assert codes is not None, "a format has levels or plain numbers"
    return _Stored(
        codes, _or_null(scales), codes.stride(0) * codes.itemsize, 0 if scales is None else scales.stride(0),
        codes.itemsize * codes.shape[3], cell, widths[0], widths[1],
    )  # fmt: skip


def _side(fields: dict[str, Tensor], of: Layout, kept: library.Kept) -> library.SideArgs:
    return library.SideArgs(
        **_stored(fields, of)._asdict(), centroids=_sixteen(of.centroids), levels=of.levels, unit=of.unit,
        integers=_sixteen(of.integers), mean=_or_null(of.mean), columns=_or_null(of.columns), kept=kept,
    )  # fmt: skip


def _or_null(table: Tensor | None) -> Tensor | int:
    return 0 if table is None else table


def _sixteen(table: Tensor | None) -> Tensor | int:
    """With zeros after the last where there are fewer: registers of 16 are loaded. None is no table."""
    return 0 if table is None else torch.nn.functional.pad(table, (0, max(0, 16 - len(table))))


def _store_side(
    fields: dict[str, Tensor], of: Layout, kept: library.Kept, stretches: library.Stretches
) -> library.StoreSide:  # fmt: skip
    stored = _stored(fields, of)
    quantizer = library.Quantizer(
        matrix=_matrix(of.matrix, of.levels), boundaries=_or_null(of.boundaries), centroids=_sixteen(of.centroids),
        mean=_or_null(of.mean), weights=_or_null(of.weights), gains=_or_null(of.gains), columns=_or_null(of.columns),
        tries=0 if of.gains is None else len(of.gains), along=of.along, first_plane=stored.first_plane,
        second_plane=stored.second_plane, bytes=stored.bytes, cell=stored.cell,
    )  # fmt: skip
    return library.StoreSide(
        x=0, codes=stored.codes, scales=stored.scales, codes_stride=stored.codes_stride, scales_stride=stored.scales_stride,
        quantizer=quantizer, stretches=stretches, kept=kept, bf16=0,
    )  # fmt: skip


def _matrix(matrix: Tensor | None, head_dim: int, pairs: Tensor | None = None) -> library.Matrix:
    """[H, inputs, outputs]; one for all KV heads where H is 1. None changes nothing and has no numbers."""
    if matrix is None:
        return library.Matrix(numbers=0, pairs=0, head_stride=0, inputs=head_dim, outputs=head_dim, bf16=0)
    heads, inputs, outputs = matrix.shape
    return library.Matrix(
        numbers=matrix, pairs=_or_null(pairs), head_stride=matrix.stride(0) if heads > 1 else 0, inputs=inputs,
        outputs=outputs, bf16=is_bf16(matrix),
    )  # fmt: skip
