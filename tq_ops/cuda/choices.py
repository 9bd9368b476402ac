"""What a launch has to choose: operand types, the lookup, tile sizes, and how many parts a context is cut into."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import processors
from haarkv.tq_ops.cuda.layout import Layout

OPTIONS = {"enable_fp_fusion": True}
"""Options of every launch: products and sums become one instruction, which Triton does by itself up to 3.9 alone."""
PROGRAMS_A_PROCESSOR = 3
_HOPPER = 90  # capability
_WIDE_FROM = 64  # columns of a sequence
_NARROW = 4  # bits of a level whose centroids are looked up in registers
_PARTS_AT_ONCE = 16
_STRETCHES_AT_ONCE = 16
MOST_AHEAD = 128 * 2**20
"""Bytes of rotated queries that there are at a time, for every stretch of learned keys that a block table has room for."""
WINDOW_COLUMNS = 32
"""Columns of the rotated sums of `in_bf16.window_kernel` that are made at once."""
_MATRIX_TILE = 16384  # numbers of the rotation that a program holds at once


@dataclass(frozen=True)
class AttentionTile:
    """Sizes of one attention launch.

    Attributes:
        columns: queries times heads of a group. From 16 on the product runs on whole warp groups, operands in registers.
        tokens: stored tokens a step.
        wide: whether columns are the rows of the products, and so many that each code is looked up once for 64.
        warps, stages: of a program.
    """

    columns: int
    tokens: int
    wide: bool = False
    warps: int = 4
    stages: int = 2


def attention_tile(
    most: int, group: int, width: int, operand: tl.dtype, capability: int, bits: int, learned_keys: bool
) -> AttentionTile:
    """Sizes for a launch, with which no loop of a BF16 model spills on sm_80 and sm_90. FP32, for comparing, may spill.

    Args:
        most: new tokens of a sequence, on average; 1 is decode.
        group: query heads of a KV head.
        width: of a vector, head_dim.
        capability: from `available.capability`.
        bits: from `widest_level`.
        learned_keys: whether keys are, whose queries change with each stretch.
    """
    one_each, columns = most == 1, max(16, 1 << (group - 1).bit_length()) if most == 1 else 16
    if operand == tl.float32:
        return AttentionTile(columns, 16 if width > 128 else 32)
    if bits > _NARROW:  # more bytes a token, and centroids by loads
        return AttentionTile(columns, 32)
    if width > 128:
        return AttentionTile(columns, 64)
    if most * group >= _WIDE_FROM:
        # So that three programs of 128 threads share a processor: while one looks up, others multiply.
        return AttentionTile(32 if (width < 128 or learned_keys) and capability < _HOPPER else 64, 32, True)
    if not one_each:
        return AttentionTile(32, 64)
    # A wider tile of queries shares the lookup of a tile of codes. Decode has no more queries than a group.
    # With three stages, the codes of two tiles are on their way while a third is worked on.
    return AttentionTile(columns, 128, stages=3)


def widest_level(k_layout: Layout, v_layout: Layout) -> int:
    """Bits of a level of K or V, the wider; learned keys, whose centroids need no loads, are no wider than 4."""
    return max(min(layout.bits, _NARROW) if layout.learned else layout.bits for layout in (k_layout, v_layout))


def window_tile(most: int, group: int, head_dim: int, operand: tl.dtype) -> AttentionTile:
    """Sizes for attention over tokens in BF16, which are few: their loads are on their way before the first is worked on."""
    columns = max(16, 1 << (group - 1).bit_length()) if most == 1 else 16
    if operand == tl.float32 or head_dim > 128:
        return AttentionTile(columns, 16 if operand == tl.float32 else 32, warps=8)
    if most * group >= _WIDE_FROM:
        return AttentionTile(64, 32, stages=3)
    return AttentionTile(columns, 32, stages=3)


def merge_tile(whole: bool, head_dim: int) -> dict[str, int]:
    """Constants of `schedule.merge_kernel`: of few vectors in many parts a program takes one, of many in one part each 16."""
    if whole:
        return {"ROWS": 16, "AT_ONCE": 1, "WIDTH": 32, "PIECES": 1, "num_warps": 4}
    width = min(head_dim, _MATRIX_TILE // head_dim)
    return {"ROWS": 1, "AT_ONCE": _PARTS_AT_ONCE, "WIDTH": width, "PIECES": head_dim // width, "num_warps": 8}


def most_visible(capacity: int, window: int | None, new: int, tokens: int) -> int:
    """Stored tokens that a sequence's new ones walk through at most, in whole tiles but for the last.

    Args:
        capacity: that the block table has room for.
        new: tokens of a sequence at most.
        tokens: of a tile.
    """
    return capacity if window is None else min(capacity, window + new - 1 + tokens - 1)


def count_programs(heads: int, most_tiles: int, device: torch.device) -> int:
    """Programs of a KV head that share all work, so that about `PROGRAMS_A_PROCESSOR` run on each processor at once.

    It is one number for any lengths, which stay on the device, so that a graph can hold the launch.

    Args:
        heads: KV heads.
        most_tiles: that there can be, of stored tokens by column tiles; more programs would have nothing to do.
    """
    return max(1, min(PROGRAMS_A_PROCESSOR * processors(device) // heads, most_tiles))


def attention_operand(q: Tensor) -> tl.dtype:
    """Operand type of attention's two products: FP16 for a BF16 model (three bits finer, and wide enough), else FP32."""
    return tl.float16 if q.dtype == torch.bfloat16 else tl.float32


def rotation_operand(x: Tensor, exact_in_bf16: bool) -> tl.dtype:
    """BF16 where both operands hold BF16 numbers, else FP32. The interpreter gets FP32: its BF16 products are wrong."""
    return tl.bfloat16 if exact_in_bf16 and x.is_cuda else tl.float32


def block_tile(tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants of `block_products.product_kernel`.

    Few tokens: few rows a program, so that all processors read at once. Many: a level is restored once for 64 of them.
    """
    if tokens <= 16:
        return {"ROWS": 32, "COLUMNS": 16, "num_warps": 4, "num_stages": 4}
    if dtype == torch.bfloat16:
        return {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 32, "COLUMNS": 32, "num_warps": 4, "num_stages": 2}


def expert_tile(dtype: torch.dtype) -> dict[str, int]:
    """Constants of `experts.expert_kernel`, for any number of tokens: others would add in another order.

    Few rows a program, as of `block_tile` for few tokens; of a dense weight 256 bytes of a row are multiplied at a time.
    """
    step, stages = (128, 4) if dtype == torch.bfloat16 else (64, 2)
    return {"ROWS": 32, "STEP": step, "num_warps": 4, "num_stages": stages}


def stretch_programs(stretches: int) -> int:
    """Programs that share the stretches for which a tile of queries is rotated: each loads the same part of the matrix."""
    return min(stretches, _STRETCHES_AT_ONCE)


def element(dtype: torch.dtype) -> tl.dtype:
    """A model's dtype, BF16 or FP32, as kernels name it."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def query_columns(one_each: bool, width: int, operand: tl.dtype) -> int:
    """Columns of a rotated query that one program makes: few in decode, whose vectors are few, so that they fill a GPU.

    Few in FP32, too, whose products take registers.
    """
    return 32 if one_each or operand == tl.float32 else width // 2


def store_warps(width: int, operands: Collection[tl.dtype], bits: int, learned_keys: bool) -> int:
    """Warps of a program that quantizes 16 vectors.

    With four it would spill at head_dim 256, with FP32 operands, or wide levels, and take many registers for learned keys.
    """
    return 8 if width > 128 or bits > _NARROW or tl.float32 in operands or learned_keys else 4


def delta_columns(key_size: int) -> int:
    """Columns of a head's memory that one warp holds in registers: 64 numbers a lane, and with them all of a step.

    A row of them is 64 bytes. Qwen3.5-0.8B has 128 such programs a sequence, so that few sequences keep a GPU busy.
    """
    return max(4, min(16, 2048 // key_size))


def row_warps(size: int) -> int:
    """Warps of a program that works on a whole row of `size` numbers, a power of two: 16 numbers a thread, if it can be."""
    return max(1, min(16, size // 512))


def permutes(q: Tensor, layout: Layout) -> bool:
    """Whether centroids come of registers: FP16 ones that fit words, or are learned; not in the interpreter: it has no PTX."""
    return (layout.words is not None or layout.learned is not None) and q.is_cuda and attention_operand(q) == tl.float16
