"""The calls of the C interface that a cache and a layer decide, filled in once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.layout import READS, Layout, Tables, layout, tables
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
    k_tables, v_tables = (tables(kv_format, layer, shape.head_dim) for kv_format in pair)
    store = library.Store(
        k=_store_side(k_fields, k_tables, k_kept, shape.head_dim, stretches),
        v=_store_side(v_fields, v_tables, v_kept, shape.head_dim, _stretches(None)),
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


def _side(fields: dict[str, Tensor], of: Layout, kept: library.Kept) -> library.SideArgs:
    stored, widths = _stored(fields, of.planes, of.columns is not None), (*of.planes, 0, 0)
    return library.SideArgs(
        codes=stored.codes, scales=_or_null(stored.scale), centroids=_sixteen(of.centroids),
        codes_stride=_block_bytes(stored.codes), scales_stride=stored.scales_stride, levels=of.levels, bytes=stored.bytes,
        cell=stored.cell, first_plane=widths[0], second_plane=widths[1], unit=of.unit, integers=_sixteen(of.integers),
        mean=_or_null(of.mean), columns=_or_null(of.columns), kept=kept,
    )  # fmt: skip


class _Stored(NamedTuple):
    """The fields of a side as the kernels see them."""

    codes: Tensor
    scale: Tensor | None
    cell: Cell

    @property
    def bytes(self) -> int:
        """Of a vector's codes."""
        return self.codes.itemsize * self.codes.shape[3]

    @property
    def scales_stride(self) -> int:
        """From a block to the next."""
        return 0 if self.scale is None else self.scale.stride(0)


def _stored(fields: dict[str, Tensor], widths: tuple[int, ...], mixed: bool) -> _Stored:
    """
    Args:
        widths: of a level's planes; () of plain numbers.
        mixed: whether levels differ in width.
    """
    if mixed:
        return _Stored(fields["codes"], fields["scale"], Cell.MIXED)
    if widths:
        return _Stored(fields["codes"], fields["scale"], Cell.NIBBLE if sum(widths) <= 4 else Cell.BYTE)
    return _Stored(fields["data"], None, Cell.BF16 if is_bf16(fields["data"]) else Cell.FP32)


def _or_null(table: Tensor | None) -> Tensor | int:
    return 0 if table is None else table


def _block_bytes(field: Tensor) -> int:
    """From a block to the next."""
    return field.stride(0) * field.itemsize


def _sixteen(table: Tensor | None) -> Tensor | int:
    """With zeros after the last where there are fewer: registers of 16 are loaded. None is no table."""
    return 0 if table is None else torch.nn.functional.pad(table, (0, max(0, 16 - len(table))))


def _store_side(
    fields: dict[str, Tensor], by: Tables, kept: library.Kept, head_dim: int, stretches: library.Stretches
) -> library.StoreSide:
    widths, stored = (*by.planes, 0, 0), _stored(fields, by.planes, by.gains is not None)
    quantizer = library.Quantizer(
        matrix=_matrix(by.matrix, head_dim), boundaries=_or_null(by.boundaries), centroids=_sixteen(by.centroids),
        mean=_or_null(by.mean), weights=_or_null(by.weights), gains=_or_null(by.gains), columns=_or_null(by.columns),
        tries=0 if by.gains is None else len(by.gains), along=by.along, first_plane=widths[0], second_plane=widths[1],
        bytes=stored.bytes, cell=stored.cell,
    )  # fmt: skip
    return library.StoreSide(
        x=0, codes=stored.codes, scales=_or_null(stored.scale), codes_stride=_block_bytes(stored.codes),
        scales_stride=stored.scales_stride, quantizer=quantizer, stretches=stretches, kept=kept, bf16=0,
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
