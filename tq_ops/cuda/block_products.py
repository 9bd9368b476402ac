"""Launches for weights in planes (`block_planes`): products, and rows as embeddings are looked up.

A block's levels are small integers, which BF16 and FP32 hold exactly. So a block is multiplied as integers, its 32 products
are added in FP32, and the sum is multiplied with its scale once: nothing of the weight is rounded. In a BF16 model a product
is that of the restored FP32 weight, but for the order of FP32 sums.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.block_kernels import product_kernel, rows_kernel
from haarkv.tq_ops.cuda.block_planes import BLOCK, PlaneBlocks
from haarkv.tq_ops.cuda.launching import launch


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
