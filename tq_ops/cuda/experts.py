"""Mixtures of experts on a GPU, or in Triton's interpreter: chosen on the device, so that a graph can hold a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices, expert_kernels
from haarkv.tq_ops.cuda.arguments import constant
from haarkv.tq_ops.cuda.block_planes import BLOCK, PlaneBlocks
from haarkv.tq_ops.cuda.launching import launch
from haarkv.tq_ops.fused import Stack
from haarkv.tq_ops.weight import Weight

COLUMNS = 16
"""Pairs of a tile, whatever the batch: so many columns the tensor cores take at least."""
_ROWS, _AT_ONCE = 16, 128
"""Pairs that a program puts in order, and that they are compared with at a time."""


class Stacked(NamedTuple):
    """A weight of all experts, as `expert_kernels.sums_of` reads it.

    Attributes:
        weight: [experts * outputs, inputs] bf16 or fp32, or in planes as bytes.
        row_bytes, high, scales, minima, d, m, LOW, HIGH, SHIFT, SCALES, MINIMUM, TOGETHER: of planes, as of
            `block_kernels.block_sums`; LOW is 0 of a dense weight.
        row_scales: [experts * outputs], or None.
    """

    weight: Any
    row_scales: Any
    row_bytes: Any
    high: Any
    scales: Any
    minima: Any
    d: Any
    m: Any
    LOW: Any
    HIGH: Any
    SHIFT: Any
    SCALES: Any
    MINIMUM: Any
    TOGETHER: Any


def _stacked(weight: Weight) -> Stacked:
    if isinstance(weight, Tensor):
        return Stacked(weight, None, *(0,) * 6, *map(constant, (0, 0, 0, 0, False, 1)))
    assert isinstance(weight, PlaneBlocks)
    assert weight.column_scales is None
    planes = weight.planes
    return Stacked(
        weight.data, weight.row_scales, weight.data.shape[1], *planes.places(weight.shape[1] // BLOCK),
        *map(constant, (planes.low, planes.high, planes.shift, planes.scales, planes.minimum, planes.together)),
    )  # fmt: skip


def choose(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The most likely experts of each token, in the experts' order, in one launch.

    Args:
        logits: [T, experts] fp32.
    Returns:
        their numbers, int32, and shares, fp32, both [T, per_token].
    """
    tokens, count = logits.shape
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, per_token, device=logits.device)
    launch(expert_kernels.choose_kernel, (tokens,))(
        logits.contiguous(), chosen, shares, EXPERTS=count, PER_TOKEN=per_token, NORMALIZED=normalized,
        SIZE=triton.next_power_of_2(count), num_warps=1, **choices.COMPILED,
    )  # fmt: skip
    return chosen, shares


def ordered(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs [T * per_token] by expert, and their tiles [slots, 3]; int32, as of `expert_kernels.order_kernel`."""
    pairs = chosen.numel()
    by_pair = pairs <= pairs // COLUMNS + experts
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    slots = pairs if by_pair else pairs // COLUMNS + experts
    tiles = torch.zeros(slots, 3, dtype=torch.int32, device=chosen.device)
    launch(expert_kernels.order_kernel, (triton.cdiv(pairs, _ROWS),))(
        chosen, order, tiles, pairs, EXPERTS=experts, BY_PAIR=by_pair, COLUMNS=COLUMNS, ROWS=_ROWS, AT_ONCE=_AT_ONCE,
        **choices.COMPILED,
    )  # fmt: skip
    return order, tiles


def multiply(
    x: Tensor, order: Tensor, tiles: Tensor, gate: Weight, up: Weight | None, out: Tensor, per_token: int, act: str
) -> None:
    """One launch of `expert_kernels.expert_kernel`, whose arguments these are."""
    tile, (outputs, inputs) = choices.expert_tile(x.dtype), (out.shape[1], x.shape[1])
    launch(expert_kernels.expert_kernel, (triton.cdiv(outputs, tile.rows), len(tiles)))(
        x, order, tiles, _stacked(gate), None if up is None else _stacked(up), out, outputs, inputs, PER_TOKEN=per_token,
        ACT=act, ROWS=tile.rows, COLUMNS=COLUMNS, STEP=tile.step,
        TYPE=choices.rotation_operand(x, x.dtype == torch.bfloat16), num_warps=tile.warps, num_stages=tile.stages,
        **choices.COMPILED,
    )  # fmt: skip


def through(x: Tensor, logits: Tensor, stack: Stack) -> Tensor:
    """As `fused.ExpertOps.experts`, in six launches and without waiting for the device.

    An expert's weights are read once for each 16 tokens that chose it. Between the launches lie T * per_token vectors of the
    experts' width in x's dtype, and as many of x's width in FP32.

    Sums are in one order, whatever the batch and however a prompt is cut.
    """
    x, (tokens, width) = x.contiguous(), x.shape
    chosen, shares = choose(logits, stack.per_token, stack.normalized)
    order, tiles = ordered(chosen, stack.count)
    made = torch.empty(chosen.numel(), len(stack.gate) // stack.count, dtype=x.dtype, device=x.device)
    act = "gelu" if stack.activation == "gelu_tanh" else "silu"
    multiply(x, order, tiles, stack.gate, stack.up, made, stack.per_token, act)
    y = torch.empty(chosen.numel(), width, device=x.device)
    multiply(made, order, tiles, stack.down, None, y, stack.per_token, "")
    out = torch.empty(tokens, width, device=x.device)
    size = min(1024, triton.next_power_of_2(width))
    launch(expert_kernels.share_kernel, (tokens, triton.cdiv(width, size)))(
        y, shares, out, width, PER_TOKEN=stack.per_token, SIZE=size, **choices.COMPILED
    )
    return out
