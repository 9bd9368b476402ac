"""One layer's K and V in pages: all of a block together, in memory that may be another's.

A page is one block of one layer: K's fields, then V's, each [Hkv, block_size / G, *field.shape], so that codes and scales lie
apart inside it and a block can be copied, shared or freed as one piece of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import Field


def page_bytes(formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes of one page: of block_size tokens, K and V, all heads.

    Args:
        formats: K's and V's.
    """
    *_, (_, _, _, end) = _places(formats, num_kv_heads, head_dim, block_size)
    return -(-end // _alignment(formats, head_dim)) * _alignment(formats, head_dim)


def fields_in(
    pages: Tensor, formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """K's and V's fields as views of pages.

    Args:
        pages: [num_blocks, page_bytes] uint8, each page in one piece; pages may lie apart.
        formats: K's and V's.
    Returns:
        K's fields and V's, each [num_blocks, Hkv, block_size / G, *field.shape]; a block in one piece.
    Raises:
        InputError: the pages have another size, or lie where a field's numbers cannot.
    """
    needed, alignment = page_bytes(formats, num_kv_heads, head_dim, block_size), _alignment(formats, head_dim)
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != needed or pages.stride(1) != 1:
        raise InputError(
            f"pages of {block_size} tokens in {formats[0].name} and {formats[1].name} are uint8 [num_blocks, {needed}], "
            f"each in one piece, not {pages.dtype} {list(pages.shape)}"
        )
    if pages.data_ptr() % alignment or pages.stride(0) % alignment:
        raise InputError(f"pages must begin at multiples of {alignment} bytes")
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for side, (name, field), begin, end in _places(formats, num_kv_heads, head_dim, block_size):
        groups = block_size // formats[side].group_tokens
        sides[side][name] = pages[:, begin:end].view(field.dtype).view(-1, num_kv_heads, groups, *field.shape)
    return sides


def _places(
    formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int
) -> Iterator[tuple[int, tuple[str, Field], int, int]]:
    """Side (0 K, 1 V), field, first byte and the byte behind the last, in order."""
    end = 0
    for side, kv_format in enumerate(formats):
        for name, field in kv_format.fields(head_dim).items():
            begin = math.ceil(end / field.dtype.itemsize) * field.dtype.itemsize
            end = begin + num_kv_heads * (block_size // kv_format.group_tokens) * field.nbytes
            yield side, (name, field), begin, end


def _alignment(formats: tuple[KVFormat, KVFormat], head_dim: int) -> int:
    return max(field.dtype.itemsize for kv_format in formats for field in kv_format.fields(head_dim).values())
