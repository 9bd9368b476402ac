"""Calls of the C interface, filled in as far as a cache and a layer decide them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.layout import READS, Layout, layout
from haarkv.tq_ops.cpu.library import Cell
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, RopeShift
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kernel_support import unsupported_format, wrong_head_dim
from haarkv.tq_ops.kv.layer import LayerKV
from haarkv.tq_ops.kv.residual_window import ResidualBlocks, ResidualWindow
from haarkv.tq_ops.weight import Blocks, Weight


@dataclass(frozen=True)
class LayerCalls:
    """The calls of a layer and a cache. Each owns the tensors that it points to."""

    attention: library.Structure
    store: library.Structure


def prepare(kv: LayerKV, isa: int) -> LayerCalls | None:
    """The calls of a layer for one instruction set, an index of `library.ISAS`; None where K's or V's format has no kernels,
    or a stretch of keys ends within a block. An InputError of a head_dim without kernels.
    """
    shape, pair, layer = kv.shape, kv.formats, kv.index
    if reason := wrong_head_dim(READS, shape.head_dim):
        raise InputError(reason)
    if any(unsupported_format(READS, kv_format, shape.head_dim) for kv_format in pair):
        return None
    keys, values = (layout(kv_format, layer, shape.head_dim) for kv_format in pair)
    turns = pair[0].rope_shift(layer)
    if turns and STRETCH % kv.block_size:
        return None
    stretches = _stretches(turns)
    k, v = (_side(fields, side, shape.head_dim, window)
            for fields, side, window in zip(kv.fields, (keys, values), kv.windows, strict=True))  # fmt: skip
    attention = library.Attention(
        cache=library.Cache(k=k, v=v, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, block_size=kv.block_size),
        stretches=stretches, rotation=_matrix(keys.rotate, shape.head_dim, keys.rotate_pairs),
        rotation_back=_matrix(values.rotate_back, shape.head_dim, values.rotate_back_pairs), window=shape.window or 0, isa=isa,
    )  # fmt: skip
    store = library.Store(
        k=library.StoreSide(side=k, quantizer=_quantizer(keys, shape.head_dim), stretches=stretches),
        v=library.StoreSide(side=v, quantizer=_quantizer(values, shape.head_dim)),
        num_slots=kv.num_slots, num_kv_heads=shape.num_kv_heads, block_size=kv.block_size, isa=isa,
    )  # fmt: skip
    return LayerCalls(attention, store)


IS_BF16 = {torch.bfloat16: True, torch.float32: False}
"""The kernels' dtypes."""


def is_bf16(x: Tensor) -> bool:
    """Whether numbers are BF16; else they are FP32, or a TypeError."""
    bf16 = IS_BF16.get(x.dtype)
    if bf16 is None:
        raise TypeError(f"the kernels take bfloat16 or float32, not {x.dtype}")
    return bf16


def too_long(batch: Batch, block_size: int) -> bool:
    """Whether a sequence may have more positions than stretches; the reference's ops run it then."""
    return batch.block_table.shape[1] * block_size > MOST_POSITIONS


def _stretches(turns: RopeShift | None) -> library.Structure:
    if turns is None:
        return library.Stretches()
    count = MOST_POSITIONS // STRETCH
    cos, sin = turns.table(count, torch.device("cpu"))
    return library.Stretches(cos=cos, sin=sin, half=len(turns.inv_freq), count=count)


def stored_weight(weight: Weight) -> library.Structure:
    """The structure of a weight: contiguous if dense, or blocks of a type in `library.BLOCKS`."""
    if isinstance(weight, Blocks):
        assert weight.data.stride(1) == 1
        rows, columns = (scales if scales is None else scales.float() for scales in (weight.row_scales, weight.column_scales))
        return library.Weight(
            data=weight.data, row_scales=rows, column_scales=columns, row_bytes=weight.data.stride(0),
            stored=library.WEIGHT_TYPES.index(weight.type.name), x_bits=weight.x_bits,
        )  # fmt: skip
    return library.Weight(data=weight, stored=int(is_bf16(weight)))


def has_kernel(weight: Weight) -> bool:
    """Whether the kernels multiply with a weight as it is, without restoring its blocks."""
    return not isinstance(weight, Blocks) or weight.type.name in library.BLOCKS


def _window_struct(window: ResidualWindow | None) -> library.Structure:
    if window is None:
        return library.ResidualWindow()
    stride, size = (window.vectors.stride(0), window.block_size) if isinstance(window, ResidualBlocks) else (0, 0)
    return library.ResidualWindow(
        vectors=window.vectors, block_stride=stride, tail=window.tail, sink=window.sink, ring=window.ring, block_size=size
    )  # fmt: skip


def _side(fields: dict[str, Tensor], side: Layout, head_dim: int, window: ResidualWindow | None) -> library.Structure:
    """Where K or V lie, with strides from block to block in bytes of codes and in scales, and how."""
    codes, scales = fields.get("codes", fields.get("data")), fields.get("scale")
    assert codes is not None, "a format has levels or plain numbers"
    if side.columns is not None:
        cell = Cell.MIXED
    elif side.planes:
        cell = Cell.NIBBLE if sum(side.planes) <= 4 else Cell.BYTE
    else:
        cell = Cell.BF16 if is_bf16(codes) else Cell.FP32
    return library.Side(
        codes=codes, scales=scales, codes_stride=codes.stride(0) * codes.itemsize,
        scales_stride=0 if scales is None else scales.stride(0), levels=head_dim, bytes=codes.itemsize * codes.shape[3],
        cell=cell, planes=(*side.planes, 0, 0)[:2], unit=side.unit, integers=_sixteen(side.integers), mean=side.mean,
        centroids=_sixteen(side.centroids), columns=side.columns, residual=_window_struct(window),
    )  # fmt: skip


def _sixteen(table: Tensor | None) -> Tensor | None:
    """A table padded with zeros to 16, a register."""
    return None if table is None else torch.nn.functional.pad(table, (0, max(0, 16 - len(table))))


def _quantizer(side: Layout, head_dim: int) -> library.Structure:
    return library.Quantizer(
        matrix=_matrix(side.matrix, head_dim), boundaries=side.boundaries, weights=side.weights, gains=side.gains,
        tries=0 if side.gains is None else len(side.gains), along=side.along,
    )  # fmt: skip


def _matrix(matrix: Tensor | None, head_dim: int, pairs: Tensor | None = None) -> library.Structure:
    """The structure of a matrix [H, D, D], H 1 for one of all KV heads; of None, no numbers."""
    if matrix is None:
        return library.Matrix(size=head_dim)
    return library.Matrix(numbers=matrix, pairs=pairs, head_stride=matrix.stride(0) if len(matrix) > 1 else 0, size=head_dim)
