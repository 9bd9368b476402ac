"""What a launch has to choose: operand types, the lookup, tile sizes, and how many parts a context is cut into."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

PROGRAMS_A_PROCESSOR = 3
MOST_SPLITS = 64
_INTERPRETED_PROCESSORS = 4
_PARTS_AT_ONCE = 16
_MATRIX_TILE = 8192  # numbers of the rotation that a program holds at once


@dataclass(frozen=True)
class AttentionTile:
    """Sizes of one attention launch.

    Attributes:
        columns: queries times heads of a group. From 16 on the product runs on whole warp groups, operands in registers.
        tokens: stored tokens a step.
        warps, stages: of a program.
    """

    columns: int
    tokens: int
    warps: int = 4
    stages: int = 2


def attention_tile(one_each: bool, group: int, head_dim: int, operand: tl.dtype) -> AttentionTile:
    """Sizes for decode (one new token a sequence) or prefill. With none of them does a program spill: a test compiles all."""
    columns = max(16, 1 << (group - 1).bit_length()) if one_each else 16
    if operand == tl.float32:
        return AttentionTile(columns, 16 if head_dim > 128 else 32)
    if head_dim > 128:
        return AttentionTile(columns, 64)
    # A wider tile of queries shares the lookup of a tile of codes. Decode has no more queries than a group.
    return AttentionTile(columns, 128) if one_each else AttentionTile(32, 64)


@dataclass(frozen=True)
class MergeTile:
    """Sizes of the launch that merges the parts of a context.

    Attributes:
        rows: vectors of a program.
        at_once: parts of each that it loads together.
        width, pieces: columns of one product with the rotation, and products of a program.
    """

    rows: int
    at_once: int
    width: int
    pieces: int


def merge_tile(splits: int, head_dim: int) -> MergeTile:
    """A decode step has few vectors in many parts: a program takes one. A prompt has many in one part: a program takes 16."""
    if splits > 1:
        width = min(head_dim, _MATRIX_TILE // head_dim)
        return MergeTile(1, _PARTS_AT_ONCE, width, head_dim // width)
    return MergeTile(16, 1, 32, 1)


@cache
def processors(device: torch.device) -> int:
    """Processors of a GPU."""
    # The interpreter runs programs one after the other; a few are enough to test that splits are merged.
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def count_splits(tiles: int, most_tokens: int, tile_tokens: int, device: torch.device) -> int:
    """How many parts a context is cut into, so that about `PROGRAMS_A_PROCESSOR` programs run on each processor at once.

    The lengths stay on the device, so it goes by the width of the block table.

    Args:
        tiles: column tiles times KV heads.
        most_tokens: room in a row of the block table.
    """
    fill = PROGRAMS_A_PROCESSOR * processors(device) // max(tiles, 1)
    return max(1, min(fill, MOST_SPLITS, -(-most_tokens // tile_tokens)))


def attention_operand(q: Tensor) -> tl.dtype:
    """Operand type of attention's two products: FP16 for a BF16 model (three bits finer, and wide enough), else FP32."""
    return tl.float16 if q.dtype == torch.bfloat16 else tl.float32


def rotation_operand(x: Tensor, exact_in_bf16: bool) -> tl.dtype:
    """BF16 where both operands hold BF16 numbers, else FP32. The interpreter gets FP32: its BF16 products are wrong."""
    return tl.bfloat16 if exact_in_bf16 and x.is_cuda else tl.float32


def element(dtype: torch.dtype) -> tl.dtype:
    """A model's dtype, BF16 or FP32, as kernels name it."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def query_columns(one_each: bool, head_dim: int, operand: tl.dtype) -> int:
    """Columns of a rotated query that one program makes: few in decode, whose vectors are few, so that they fill a GPU.

    Few in FP32, too, whose products take registers.
    """
    return 32 if one_each or operand == tl.float32 else head_dim // 2


def store_warps(head_dim: int, operands: Collection[tl.dtype]) -> int:
    """Warps of a program that quantizes 16 vectors: at head_dim 256, or with FP32 operands, four would spill."""
    return 8 if head_dim > 128 or tl.float32 in operands else 4


def row_warps(size: int) -> int:
    """Warps of a program that works on a whole row of `size` numbers, a power of two: 16 numbers a thread, if it can be."""
    return max(1, min(16, size // 512))


def permutes(q: Tensor, words: Tensor | None) -> bool:
    """Whether centroids are looked up in registers: FP16 ones that fit words, and not in the interpreter, which has no PTX."""
    return words is not None and q.is_cuda and attention_operand(q) == tl.float16
