"""Mixtures of experts: choice, order, products and sum. A launch's size depends on no choice: a graph can hold it.

A *pair* is a token and one of its experts: number `token * PER_TOKEN + place`, its experts in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.block_products import block_sums, weight_args
from haarkv.tq_ops.cuda.elementwise import gated_mul
from haarkv.tq_ops.cuda.rotate import dot, rotation_operand, round_to
from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import Weight


@triton.jit
def choose_kernel(
    logits, expert_ids, shares, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMALIZED: tl.constexpr, SIZE: tl.constexpr
):
    """As `choose`, a token a program; of equal experts the first, of logits that are not finite some, whose shares are NaN.

    SIZE is a power of two, at least EXPERTS.
    """
    token, expert = tl.program_id(0), tl.arange(0, SIZE)
    inside = expert < EXPERTS
    logit = tl.load(logits + token.to(tl.int64) * EXPERTS + expert, inside, -float("inf"))
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    # Numbers that are not negative are ordered as their bits are, and NaN lies above them.
    key = tl.where(inside, share.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    for _ in range(PER_TOKEN):
        first = tl.min(tl.where(key == tl.max(key, 0), expert, SIZE), 0)
        key = tl.where(expert == first, -2, key)
    is_chosen = key == -2
    if NORMALIZED:
        share = share / tl.sum(tl.where(is_chosen, share, 0.0), 0)
    at = token * PER_TOKEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(expert_ids + at, expert, is_chosen)
    tl.store(shares + at, share, is_chosen)


@triton.jit(do_not_specialize=["pairs"])
def order_kernel(
    expert_ids, order, tiles, pairs,
    EXPERTS: tl.constexpr, BY_PAIR: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Pairs by expert, those of one expert in their order, and tiles of them. Grid: [pairs / ROWS].

    Each pair counts those before it, so programs need nothing of each other. A tile's slot follows from two of these counts.

    Args:
        expert_ids: [pairs] int32.
        order: [pairs] int32, the pair at each place.
        tiles: [slots, 3] int32, 0 before: the expert of up to COLUMNS places, the first of these, and their number.
        BY_PAIR: there is a slot for each place; else pairs / COLUMNS + EXPERTS slots, which are fewer where pairs are many.
    """
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = pair < pairs
    mine = tl.load(expert_ids + pair, valid, EXPERTS)
    less, same, earlier = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    for begin in range(0, pairs, AT_ONCE):
        other = begin + tl.arange(0, AT_ONCE)
        theirs = tl.load(expert_ids + other, other < pairs, EXPERTS)
        equal = theirs[None, :] == mine[:, None]
        less += tl.sum((theirs[None, :] < mine[:, None]).to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
        earlier += tl.sum((equal & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    at = less + earlier
    tl.store(order + at, pair, valid)
    slot = at if BY_PAIR else less // COLUMNS + mine + earlier // COLUMNS
    leads = valid & (earlier % COLUMNS == 0)
    tl.store(tiles + 3 * slot, mine, leads)
    tl.store(tiles + 3 * slot + 1, at, leads)
    tl.store(tiles + 3 * slot + 2, tl.minimum(same - earlier, COLUMNS), leads)


@triton.jit
def dense_sums(
    row, x, read, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """As `block_products.block_sums`, of a dense weight."""
    total, x_rows = tl.zeros((ROWS, COLUMNS), tl.float32), x + read.to(tl.int64) * inputs
    for begin in range(0, inputs, STEP):
        number = begin + tl.arange(0, STEP)
        inside = number < inputs
        part = tl.load(row[:, None] + number[None, :], inside[None, :], 0.0)
        total = dot(part, tl.load(x_rows[None, :] + number[:, None], inside[:, None], 0.0), total, TYPE)
    return total


@triton.jit
def expert_sums(
    weight, x, read, expert, output, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Rows `output` [ROWS] of an expert's weight times rows `read` [COLUMNS] of x: [ROWS, COLUMNS] fp32.

    `weight` is `WeightArguments` of all experts, `outputs` rows each, without scales of columns.
    """
    row = expert.to(tl.int64) * outputs + output
    if weight.LOW == 0:
        total = dense_sums(weight.weight + row * inputs, x, read, inputs, ROWS, COLUMNS, STEP, TYPE)
    else:
        total = block_sums(weight.weight + row * weight.row_bytes, x, weight, read, inputs, ROWS, COLUMNS, TYPE)
    if weight.row_scales is not None:
        total *= tl.load(weight.row_scales + row).to(tl.float32)[:, None]
    return total


@triton.jit
def expert_kernel(
    x, order, tiles, gate, up, out, outputs, inputs,
    PER_TOKEN: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """A tile of pairs times ROWS rows of their expert's weight; with ACT, of two weights. Grid: [outputs / ROWS, slots].

    With ACT: out [pairs, outputs] by place = act(x @ gate.T) * (x @ up.T), rounded once, of the pairs' tokens in x.
    Without:  out [pairs, outputs] by pair = x @ gate.T in FP32, of x by place.

    Every tile has the same shape, so a pair's numbers do not depend on the others.

    Args:
        x: [T, inputs] or [pairs, inputs] bf16 or fp32.
        order, tiles: of `order_kernel`.
        gate, up: `WeightArguments`; up is None without ACT.
        ACT: of `elementwise.gated_mul`, or "".
        TYPE: of operands.
    """
    tile = tiles + 3 * tl.program_id(1)
    expert, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        column, output = tl.arange(0, COLUMNS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        # For pairs and rows that are not there the last ones stand.
        at, row = first + tl.minimum(column, count - 1), tl.minimum(output, outputs - 1)
        pair = tl.load(order + at)
        if ACT != "":
            read, to = pair // PER_TOKEN, at
        else:
            read, to = at, pair
        total = expert_sums(gate, x, read, expert, row, outputs, inputs, ROWS, COLUMNS, STEP, TYPE)
        if ACT != "":
            total = gated_mul(total, expert_sums(up, x, read, expert, row, outputs, inputs, ROWS, COLUMNS, STEP, TYPE), ACT)
        valid = (output < outputs)[:, None] & (column < count)[None, :]
        tl.store(out + to.to(tl.int64)[None, :] * outputs + output[:, None], round_to(total, out.dtype.element_ty), valid)


@triton.jit
def share_kernel(y, shares, out, width, PER_TOKEN: tl.constexpr, SIZE: tl.constexpr):
    """out [T, width] fp32 = the sum of y [T, PER_TOKEN, width] times shares, in order. Grid: [T, width / SIZE]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside, total = column < width, tl.zeros((SIZE,), tl.float32)
    for place in range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        total += tl.load(shares + pair) * tl.load(y + pair * width + column, inside, 0.0)
    tl.store(out + token * width + column, total, inside)


COLUMNS = 16  # pairs of a tile: the fewest columns that tensor cores take
_ROWS, _AT_ONCE = 16, 128  # pairs that a program puts in order, and that they are compared with at a time


def choose(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Each token's experts of the largest softmax(logits [T, experts]), in their order: int32 and shares fp32."""
    tokens, count = logits.shape
    expert_ids = torch.empty(tokens, per_token, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, per_token, device=logits.device)
    launch(choose_kernel, (tokens,))(
        logits.contiguous(), expert_ids, shares, EXPERTS=count, PER_TOKEN=per_token, NORMALIZED=normalized,
        SIZE=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return expert_ids, shares


def multiply(
    x: Tensor, order: Tensor, tiles: Tensor, gate: Weight, up: Weight | None, out: Tensor, per_token: int, act: str
) -> None:
    """One launch of `expert_kernel`, whose arguments these are."""
    (outputs, inputs), is_bf16 = (out.shape[1], x.shape[1]), x.dtype == torch.bfloat16
    # For any number of tokens: other sizes would add in another order. Few rows a program, so that all processors read at
    # once; of a dense weight 256 bytes of a row are multiplied at a time.
    step, stages = (128, 4) if is_bf16 else (64, 2)
    launch(expert_kernel, (triton.cdiv(outputs, 32), len(tiles)))(
        x, order, tiles, weight_args(gate), None if up is None else weight_args(up), out, outputs, inputs, PER_TOKEN=per_token,
        ACT=act, ROWS=32, COLUMNS=COLUMNS, STEP=step, TYPE=rotation_operand(x, is_bf16), num_warps=4, num_stages=stages,
    )  # fmt: skip


def run_experts(x: Tensor, logits: Tensor, stack: Stack) -> Tensor:
    """As `table.FusedOps.experts`, in six launches and without waiting for the device.

    An expert's weights are read once for each 16 tokens that chose it. Sums are in one order, whatever the batch and however
    a prompt is cut.
    """
    x, (tokens, width) = x.contiguous(), x.shape
    expert_ids, shares = choose(logits, stack.per_token, stack.normalized)
    pairs, tile_slots = expert_ids.numel(), expert_ids.numel() // COLUMNS + stack.count
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    tiles = torch.zeros(min(pairs, tile_slots), 3, dtype=torch.int32, device=x.device)
    launch(order_kernel, (triton.cdiv(pairs, _ROWS),))(
        expert_ids, order, tiles, pairs, EXPERTS=stack.count, BY_PAIR=pairs <= tile_slots, COLUMNS=COLUMNS, ROWS=_ROWS,
        AT_ONCE=_AT_ONCE,
    )  # fmt: skip
    activations = torch.empty(pairs, len(stack.gate) // stack.count, dtype=x.dtype, device=x.device)
    act = "gelu" if stack.activation == "gelu_tanh" else "silu"
    multiply(x, order, tiles, stack.gate, stack.up, activations, stack.per_token, act)
    y = torch.empty(pairs, width, device=x.device)
    multiply(activations, order, tiles, stack.down, None, y, stack.per_token, "")
    out = torch.empty(tokens, width, device=x.device)
    size = min(1024, triton.next_power_of_2(width))
    launch(share_kernel, (tokens, triton.cdiv(width, size)))(y, shares, out, width, PER_TOKEN=stack.per_token, SIZE=size)
    return out
