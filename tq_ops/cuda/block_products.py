"""Weights in planes (`block_planes`), restored in registers: products, and rows as embeddings are looked up.

A block's levels are small integers, which BF16 and FP32 hold exactly. So a block is multiplied as integers, its 32 products
are added in FP32, and the sum is multiplied with its scale once: nothing of the weight is rounded. In a BF16 model a product
is that of the restored FP32 weight, but for the order of FP32 sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.block_planes import BLOCK, PlaneBlocks
from haarkv.tq_ops.cuda.rotate import dot, rounded

_HALF = tl.constexpr(BLOCK // 2)


@triton.jit
def levels_of(row, high, block, upper: tl.constexpr, number, LOW: tl.constexpr, HIGH: tl.constexpr, SHIFT: tl.constexpr):
    """Half a block's levels, int32 [ROWS, 16]: the first, or with `upper` the second.

    Args:
        row: [ROWS, 1] where each row begins.
        high: where in a row its upper bits begin.
        number: [1, 16] 0 to 15.
    """
    if LOW == 8:
        return tl.load((row + block * (2 * _HALF) + upper * _HALF + number).to(tl.pointer_type(tl.int8))).to(tl.int32)
    codes = tl.load(row + block * _HALF + number).to(tl.int32)
    level = codes >> 4 if upper else codes & 15
    if HIGH > 0:
        each: tl.constexpr = 8 // HIGH  # levels of a byte
        stored = tl.load(row + high + block * (4 * HIGH) + upper * (2 * HIGH) + number // each).to(tl.int32)
        level += (stored >> number % each * HIGH & 2**HIGH - 1) << 4
    return level - SHIFT


@triton.jit
def scale_of(row, scales, d, block, upper: tl.constexpr, SCALES: tl.constexpr, TOGETHER: tl.constexpr):
    """What half a block's levels are multiplied with, fp32 [ROWS]; `row` is [ROWS]."""
    scale = tl.load((row + d + block // TOGETHER * 2).to(tl.pointer_type(tl.float16))).to(tl.float32)
    if SCALES == 1:
        scale *= tl.load(row + scales + block).to(tl.float32)
    if SCALES == 2:
        scale *= tl.load((row + scales + block * 2 + upper).to(tl.pointer_type(tl.int8))).to(tl.float32)
    return scale


@triton.jit
def least_of(row, minima, m, block, SCALES: tl.constexpr, TOGETHER: tl.constexpr):
    """What is added to a block's numbers, fp32 [ROWS]; `row` is [ROWS]."""
    least = tl.load((row + m + block // TOGETHER * 2).to(tl.pointer_type(tl.float16))).to(tl.float32)
    if SCALES > 0:
        least *= -tl.load(row + minima + block).to(tl.float32)
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
    row, x, column_scales, read, inputs, high, scales, minima, d, m,
    LOW: tl.constexpr, HIGH: tl.constexpr, SHIFT: tl.constexpr, SCALES: tl.constexpr, MINIMUM: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rows of a weight in planes times rows of x: [ROWS, COLUMNS] fp32.

    Args:
        row: [ROWS] where each row of the weight begins; `high` to `m` are `Planes.places`.
        x: [..., inputs] bf16 or fp32, of which rows `read` [COLUMNS] are multiplied with.
        column_scales: [inputs], or None.
        TYPE: of operands.
    """
    number = tl.arange(0, _HALF)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, inputs // (2 * _HALF)):
        low = levels_of(row[:, None], high, block, False, number[None, :], LOW, HIGH, SHIFT).to(tl.float32)
        up = levels_of(row[:, None], high, block, True, number[None, :], LOW, HIGH, SHIFT).to(tl.float32)
        x_low = half_of_x(x, column_scales, read, number, inputs, block * (2 * _HALF))
        x_up = half_of_x(x, column_scales, read, number, inputs, block * (2 * _HALF) + _HALF)
        none = tl.zeros([ROWS, COLUMNS], tl.float32)
        scale = scale_of(row, scales, d, block, False, SCALES, TOGETHER)[:, None]
        if SCALES == 2:
            second = scale_of(row, scales, d, block, True, SCALES, TOGETHER)[:, None]
            total += scale * dot(low, x_low, none, TYPE)
            total += second * dot(up, x_up, none, TYPE)
        else:
            total += scale * dot(up, x_up, dot(low, x_low, none, TYPE), TYPE)
        if MINIMUM:
            sums = tl.sum(x_low.to(tl.float32), 0) + tl.sum(x_up.to(tl.float32), 0)
            total += least_of(row, minima, m, block, SCALES, TOGETHER)[:, None] * sums[None, :]
    return total


@triton.jit
def product_kernel(
    x, weight, row_scales, column_scales, out, tokens, outputs, inputs, row_bytes, high, scales, minima, d, m, out_stride,
    LOW: tl.constexpr, HIGH: tl.constexpr, SHIFT: tl.constexpr, SCALES: tl.constexpr, MINIMUM: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] fp32 = x @ weight.T. Grid: [outputs / ROWS, tokens / COLUMNS].

    Args:
        x: [tokens, inputs] bf16 or fp32.
        weight: [outputs, row_bytes] uint8, in planes; `high` to `m` are `Planes.places`.
        row_scales, column_scales: [outputs] and [inputs], or None.
        out_stride: between tokens.
        TYPE: of operands.
    """
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, asked = output < outputs, token < tokens
    # For rows and tokens that are not there the last ones stand.
    row = weight + tl.minimum(output, outputs - 1).to(tl.int64) * row_bytes
    total = block_sums(
        row, x, column_scales, tl.minimum(token, tokens - 1), inputs, high, scales, minima, d, m,
        LOW, HIGH, SHIFT, SCALES, MINIMUM, TOGETHER, ROWS, COLUMNS, TYPE,
    )  # fmt: skip
    if row_scales is not None:
        total *= tl.load(row_scales + output, here, 0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(out + at, total, here[:, None] & asked[None, :])


@triton.jit
def rows_kernel(
    index, weight, row_scales, column_scales, out, inputs, row_bytes, high, scales, minima, d, m,
    LOW: tl.constexpr, HIGH: tl.constexpr, SHIFT: tl.constexpr, SCALES: tl.constexpr, MINIMUM: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out [R, inputs] = rows of the weight by their numbers `index` [R] int64, rounded once. Grid: [R, blocks / BLOCKS]."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    wanted = tl.load(index + program)
    row = weight + wanted * row_bytes + tl.zeros([BLOCKS], tl.int64)
    last = inputs // (2 * _HALF) - 1
    inside, read, number = block <= last, tl.minimum(block, last), tl.arange(0, _HALF)
    of_row = tl.load(row_scales + wanted).to(tl.float32) if row_scales is not None else 1.0
    for upper in tl.static_range(2):
        level = levels_of(row[:, None], high, read[:, None], upper == 1, number[None, :], LOW, HIGH, SHIFT).to(tl.float32)
        made = level * scale_of(row, scales, d, read, upper == 1, SCALES, TOGETHER)[:, None]
        if MINIMUM:
            made += least_of(row, minima, m, read, SCALES, TOGETHER)[:, None]
        column = block[:, None] * (2 * _HALF) + upper * _HALF + number[None, :]
        # Powers of two, which change nothing that rounding sees.
        made *= of_row
        if column_scales is not None:
            made *= tl.load(column_scales + column, inside[:, None], 0.0).to(tl.float32)
        tl.store(out + program * inputs + column, rounded(made, out.dtype.element_ty), inside[:, None])


def _planes_of(weight: PlaneBlocks) -> dict[str, object]:
    """The arguments that describe a weight to either kernel."""
    planes, names = weight.planes, ("high", "scales", "minima", "d", "m")
    return {
        "weight": weight.data, "row_scales": weight.row_scales, "column_scales": weight.column_scales,
        "inputs": weight.shape[1], "row_bytes": weight.data.shape[1],
        **dict(zip(names, planes.places(weight.shape[1] // BLOCK), strict=True)),
        "LOW": planes.low, "HIGH": planes.high, "SHIFT": planes.shift, "SCALES": planes.scales,
        "MINIMUM": planes.minimum, "TOGETHER": planes.together,
    }  # fmt: skip


def product(x: Tensor, weight: PlaneBlocks) -> Tensor:
    """`x @ weight.T` in one launch.

    Args:
        x: [T, in] bf16 or fp32.
        weight: [out, in], on the device of x.
    Returns:
        [T, out] fp32.
    Rounding points: none but those of FP32 sums: 32 products, 16 in Q6_K, then blocks in order.
    """
    x = x.contiguous()
    tokens, outputs = x.shape[0], len(weight)
    out = torch.empty(tokens, outputs, device=x.device)
    tile = choices.block_tile(tokens, x.dtype)
    launch(product_kernel, (triton.cdiv(outputs, tile.rows), triton.cdiv(tokens, tile.columns)))(
        x, tokens=tokens, outputs=outputs, out=out, out_stride=outputs, **_planes_of(weight), ROWS=tile.rows,
        COLUMNS=tile.columns, TYPE=choices.rotation_operand(x, x.dtype == torch.bfloat16), num_warps=tile.warps,
        num_stages=tile.stages, **choices.COMPILED,
    )  # fmt: skip
    return out


def rows_of(weight: PlaneBlocks, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [R, in] of `dtype` by their numbers [R] int64, one launch; the bits that `Blocks.rows` restores."""
    index, blocks = index.contiguous(), weight.shape[1] // BLOCK
    out = torch.empty(len(index), weight.shape[1], dtype=dtype, device=weight.device)
    launch(rows_kernel, (len(index), triton.cdiv(blocks, 8)))(
        index, out=out, **_planes_of(weight), BLOCKS=8, **choices.COMPILED
    )
    return out
