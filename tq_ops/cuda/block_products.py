"""Weights in planes (`block_planes`), restored in registers: products, and rows of embeddings.

A block is multiplied as small integers, which BF16 and FP32 hold exactly, and its sum with its scale once: nothing of the
weight is rounded. A product is that of the restored FP32 weight, but for the order of FP32 sums.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.block_planes import BLOCK, PlaneBlocks
from haarkv.tq_ops.cuda.rotate import dot, rotation_operand, round_to
from haarkv.tq_ops.weight import Weight

_HALF = tl.constexpr(BLOCK // 2)

WeightArguments = namedtuple(
    "WeightArguments",
    "weight row_scales column_scales row_bytes high scales minima d m LOW HIGH SHIFT SCALES MINIMUM TOGETHER",
)
"""A weight [outputs, inputs] as kernels read it: bf16 or fp32, LOW 0; or bytes of `Planes`, whose fields are in capitals.

`row_scales`, `column_scales`: [outputs] and [inputs], or None. `row_bytes` of a row, and from `high` on `Planes.places`.
"""


def weight_args(weight: Weight) -> WeightArguments:
    """A dense weight, or one in planes."""
    if isinstance(weight, Tensor):
        return WeightArguments(weight, None, None, *(0,) * 6, *map(tl.constexpr, (0, 0, 0, 0, False, 1)))
    assert isinstance(weight, PlaneBlocks)
    planes = weight.planes
    return WeightArguments(
        weight.data, weight.row_scales, weight.column_scales, weight.data.shape[1],
        *planes.places(weight.shape[1] // BLOCK),
        *map(tl.constexpr, (planes.low, planes.high, planes.shift, planes.scales, planes.minimum, planes.together)),
    )  # fmt: skip


@triton.jit
def half_block_levels(row, weight, block, upper: tl.constexpr, number):
    """Levels, int32 [ROWS, 16], of a block's first half, or with `upper` its second; `row` [ROWS, 1] points to rows."""
    if weight.LOW == 8:
        return tl.load((row + block * (2 * _HALF) + upper * _HALF + number).to(tl.pointer_type(tl.int8))).to(tl.int32)
    codes = tl.load(row + block * _HALF + number).to(tl.int32)
    level = codes >> 4 if upper else codes & 15
    if weight.HIGH > 0:
        each: tl.constexpr = 8 // weight.HIGH  # levels of a byte
        above = tl.load(row + weight.high + block * (4 * weight.HIGH) + upper * (2 * weight.HIGH) + number // each).to(
            tl.int32
        )
        level += (above >> number % each * weight.HIGH & 2**weight.HIGH - 1) << 4
    return level - weight.SHIFT


@triton.jit
def half_block_scale(row, weight, block, upper: tl.constexpr):
    """The scale of half a block, fp32 [ROWS]."""
    scale = tl.load((row + weight.d + block // weight.TOGETHER * 2).to(tl.pointer_type(tl.float16))).to(tl.float32)
    if weight.SCALES == 1:
        scale *= tl.load(row + weight.scales + block).to(tl.float32)
    if weight.SCALES == 2:
        scale *= tl.load((row + weight.scales + block * 2 + upper).to(tl.pointer_type(tl.int8))).to(tl.float32)
    return scale


@triton.jit
def block_minimum(row, weight, block):
    """The summand of a block's numbers, fp32 [ROWS]."""
    least = tl.load((row + weight.m + block // weight.TOGETHER * 2).to(tl.pointer_type(tl.float16))).to(tl.float32)
    if weight.SCALES > 0:
        least *= -tl.load(row + weight.minima + block).to(tl.float32)
    return least


@triton.jit
def half_of_x(x, column_scales, token, number, inputs, first):
    """16 numbers of tokens [16, COLUMNS]."""
    part = tl.load(x + token.to(tl.int64)[None, :] * inputs + (number + first)[:, None])
    if column_scales is not None:
        # Powers of two: exact, also back in BF16. The interpreter multiplies no BF16.
        part = part.to(tl.float32) * tl.load(column_scales + (number + first)).to(tl.float32)[:, None]
    return part


@triton.jit
def block_sums(
    row, x, weight, read, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Rows of a weight in planes, from pointers `row` [ROWS], times rows `read` [COLUMNS] of x: [ROWS, COLUMNS] fp32."""
    number = tl.arange(0, _HALF)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, inputs // (2 * _HALF)):
        low = half_block_levels(row[:, None], weight, block, False, number[None, :]).to(tl.float32)
        up = half_block_levels(row[:, None], weight, block, True, number[None, :]).to(tl.float32)
        x_low = half_of_x(x, weight.column_scales, read, number, inputs, block * (2 * _HALF))
        x_up = half_of_x(x, weight.column_scales, read, number, inputs, block * (2 * _HALF) + _HALF)
        none = tl.zeros([ROWS, COLUMNS], tl.float32)
        scale = half_block_scale(row, weight, block, False)[:, None]
        if weight.SCALES == 2:
            second = half_block_scale(row, weight, block, True)[:, None]
            total += scale * dot(low, x_low, none, TYPE)
            total += second * dot(up, x_up, none, TYPE)
        else:
            total += scale * dot(up, x_up, dot(low, x_low, none, TYPE), TYPE)
        if weight.MINIMUM:
            sums = tl.sum(x_low.to(tl.float32), 0) + tl.sum(x_up.to(tl.float32), 0)
            total += block_minimum(row, weight, block)[:, None] * sums[None, :]
    return total


@triton.jit
def product_kernel(
    x, weight, out, tokens, outputs, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """out [tokens, outputs] fp32 = x [tokens, inputs] @ weight.T, in planes. Grid: [outputs / ROWS, tokens / COLUMNS]."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    output_valid, token_valid = output < outputs, token < tokens
    # For rows and tokens that are not there the last ones stand.
    row = weight.weight + tl.minimum(output, outputs - 1).to(tl.int64) * weight.row_bytes
    total = block_sums(row, x, weight, tl.minimum(token, tokens - 1), inputs, ROWS, COLUMNS, TYPE)
    if weight.row_scales is not None:
        total *= tl.load(weight.row_scales + output, output_valid, 0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out + at, total, output_valid[:, None] & token_valid[None, :])


@triton.jit
def rows_kernel(index, weight, out, inputs, BLOCKS: tl.constexpr):
    """out [R, inputs] = rows of the weight by their numbers `index` [R] int64, rounded once. Grid: [R, blocks / BLOCKS]."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    row_index = tl.load(index + program)
    row = weight.weight + row_index * weight.row_bytes + tl.zeros([BLOCKS], tl.int64)
    last = inputs // (2 * _HALF) - 1
    inside, read, number = block <= last, tl.minimum(block, last), tl.arange(0, _HALF)
    row_scale = tl.load(weight.row_scales + row_index).to(tl.float32) if weight.row_scales is not None else 1.0
    for upper in tl.static_range(2):
        level = half_block_levels(row[:, None], weight, read[:, None], upper == 1, number[None, :]).to(tl.float32)
        numbers = level * half_block_scale(row, weight, read, upper == 1)[:, None]
        if weight.MINIMUM:
            numbers += block_minimum(row, weight, read)[:, None]
        column = block[:, None] * (2 * _HALF) + upper * _HALF + number[None, :]
        # Powers of two, which change nothing that rounding sees.
        numbers *= row_scale
        if weight.column_scales is not None:
            numbers *= tl.load(weight.column_scales + column, inside[:, None], 0.0).to(tl.float32)
        tl.store(out + program * inputs + column, round_to(numbers, out.dtype.element_ty), inside[:, None])


def product(x: Tensor, weight: PlaneBlocks) -> Tensor:
    """`x @ weight.T` [T, out] fp32, of x [T, in] bf16 or fp32, in one launch.

    Rounding points: FP32 sums of 32 products, 16 in Q6_K, then of blocks in order.
    """
    x = x.contiguous()
    tokens, outputs = x.shape[0], len(weight)
    out = torch.empty(tokens, outputs, device=x.device)
    # Few tokens: few rows a program, so that all processors read at once. Many: a level is restored once for 64 of them.
    sizes = (32, 16, 4) if tokens <= 16 else (64, 64, 3) if x.dtype == torch.bfloat16 else (32, 32, 2)
    tile = dict(zip(("ROWS", "COLUMNS", "num_stages"), sizes, strict=True))
    launch(product_kernel, (triton.cdiv(outputs, tile["ROWS"]), triton.cdiv(tokens, tile["COLUMNS"])))(
        x, weight_args(weight), out, tokens, outputs, x.shape[1], **tile,
        TYPE=rotation_operand(x, x.dtype == torch.bfloat16), num_warps=4,
    )  # fmt: skip
    return out


def gather_rows(weight: PlaneBlocks, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [R, in] of `dtype` by their numbers [R] int64, one launch; the bits that `Blocks.rows` restores."""
    index, blocks = index.contiguous(), weight.shape[1] // BLOCK
    out = torch.empty(len(index), weight.shape[1], dtype=dtype, device=weight.device)
    launch(rows_kernel, (len(index), triton.cdiv(blocks, 8)))(index, weight_args(weight), out, weight.shape[1], BLOCKS=8)
    return out
