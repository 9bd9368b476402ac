"""One launch before attention: bias, norms of Q and K, RoPE; queries are rotated, K and V are quantized and stored.

The same kernel does a part of it: `append` stores K and V as they are, `rotate` rotates queries.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.in_bf16 import layer_windows
from haarkv.tq_ops.cuda.layout import both_layouts, stretch_room
from haarkv.tq_ops.cuda.quantize import append_and_keep, store_arguments
from haarkv.tq_ops.cuda.rotate import (
    ROWS,
    Rotated,
    num_tiles,
    places,
    rotation_operand,
    round_to,
    store_rotated,
    vector_ids,
)
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.table import Heads

MOST_AHEAD = 128 * 2**20
"""Bytes of rotated queries that there are at a time, for every stretch of learned keys that a block table has room for."""
_STRETCHES_AT_ONCE = 16  # programs that share the stretches of a tile of queries
_WIDTH = 32  # columns of a rotated query a program, so few that even a decode step fills a GPU

Inputs = namedtuple("Inputs", "q k v q_bias k_bias v_bias q_norm k_norm eps cos sin")
"""What becomes queries, keys and values: q, k, v [T, heads, D], ROW numbers from a token to the next; biases [heads * D];
norms [D]; cos and sin [T, D/2] fp32. What there is not is None."""


@triton.jit
def load_halves(x, bias, token, head, live, ROW: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Halves [ROWS, D/2] fp32 of vectors of x, their bias added; of `places`."""
    low_dims, high_dims = places(HALF, D)
    at = x + (token.to(tl.int64) * ROW + head * D)[:, None]
    low = tl.load(at + low_dims[None, :], live[:, None], 0.0).to(tl.float32)
    high = tl.load(at + high_dims[None, :], live[:, None], 0.0).to(tl.float32)
    if bias is not None:
        at = bias + (head * D)[:, None]
        low += tl.load(at + low_dims[None, :], live[:, None], 0.0).to(tl.float32)
        high += tl.load(at + high_dims[None, :], live[:, None], 0.0).to(tl.float32)
    return low, high


@triton.jit
def norm_and_rope(low, high, weight, inputs, token, live, D: tl.constexpr):
    """x * rsqrt(mean(x**2) + eps) * weight [D], then half-split rotary embedding."""
    dim = tl.arange(0, D // 2)
    if weight is not None:
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + inputs.eps)[:, None]
        low = low * factor * tl.load(weight + dim).to(tl.float32)[None, :]
        high = high * factor * tl.load(weight + D // 2 + dim).to(tl.float32)[None, :]
    if inputs.cos is not None:
        at = token.to(tl.int64)[:, None] * (D // 2) + dim[None, :]
        c, s = tl.load(inputs.cos + at, live[:, None], 0.0), tl.load(inputs.sin + at, live[:, None], 0.0)
        low, high = low * c - high * s, high * c + low * s
    return low, high


@triton.jit
def rotate_queries(
    program, inputs, tokens, queries, out, rotation, learned, positions, shares,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROUNDED: tl.constexpr, TYPE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of ROWS rotated queries: D / WIDTH times `shares` programs have the same tile."""
    tile_programs = shares * (D // WIDTH)
    token, head, matrix = vector_ids(program // tile_programs, tokens, HEADS, MATRICES, ROWS)
    part, live = program % tile_programs, token < tokens
    low, high = load_halves(inputs.q, inputs.q_bias, token, head, live, ROW, D, HALF)
    low, high = norm_and_rope(low, high, inputs.q_norm, inputs, token, live, D)
    if inputs.cos is not None:
        low, high = round_to(low, ROUNDED), round_to(high, ROUNDED)
    if queries is not None:  # noqa: SIM102
        if part == 0:
            at = queries + (token * HEADS + head)[:, None].to(tl.int64) * D + tl.arange(0, D // 2)[None, :]
            tl.store(at, low, live[:, None])
            tl.store(at + D // 2, high, live[:, None])
    if out.queries is not None:
        store_rotated(
            low, high, token, head, matrix, tokens, part % (D // WIDTH) * WIDTH, part // (D // WIDTH), shares, rotation,
            out, learned, positions, HEADS, D, TYPE, ROWS, WIDTH, WINDOW,
        )  # fmt: skip


@triton.jit
def store_side(
    tile, side: tl.constexpr, inputs, tokens, into, learned, keeping, sequences, positions, slots, fault, layer,
    HEADS: tl.constexpr, MATRICES: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr, STAND_IN: tl.constexpr,
):  # fmt: skip
    """A tile of K, `side` 0, or of V, 1, to its slots; K is normed and roped."""
    token, head, matrix = vector_ids(tile, tokens, HEADS, MATRICES, ROWS)
    live = token < tokens
    if side == 0:
        low, high = load_halves(inputs.k, inputs.k_bias, token, head, live, ROW, D, HALF)
        low, high = norm_and_rope(low, high, inputs.k_norm, inputs, token, live, D)
    else:
        low, high = load_halves(inputs.v, inputs.v_bias, token, head, live, ROW, D, HALF)
    append_and_keep(
        low, high, token, head, matrix, live, side, into, learned, keeping, sequences, positions, slots, fault, layer,
        HEADS, HALF, D, BLOCK, ROWS, WRITE, STAND_IN,
    )  # fmt: skip


# Not specialized by their values: Triton would make a constant of layer 1, compile anew for layers that 16 divides, and for
# batches of one token.
@triton.jit(do_not_specialize=["tokens", "layer", "sequences", "shares"])
def prologue_kernel(
    inputs, tokens, queries, rotated, rotation, learned, positions, shares, k, v, keeping, sequences, slots, fault, layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, MATRICES: tl.constexpr, HALF: tl.constexpr, ROW: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUNDED: tl.constexpr, Q_TYPE: tl.constexpr,
    WINDOW: tl.constexpr, WRITE: tl.constexpr, STAND_IN: tl.constexpr,
):  # fmt: skip
    """Rotate queries, and store K and V at slots [tokens] int64, in BF16 as well where `keeping` says so.

    Grid: [tiles of K + tiles of V + tiles of queries * D / WIDTH * shares]. A program of K or V makes a vector's whole row of
    codes, one of Q WIDTH columns.

    Args:
        inputs: `Inputs`, of ROW numbers from a token to the next.
        queries: [tokens, HEADS, D], where queries are stored unrotated as well; or None.
        rotated: `Rotated`; its queries are None where attention rotates them itself.
        positions: [tokens] int64; None without `learned`.
        shares: programs that share the stretches of learned keys, else 1.
        k, v, keeping: `Write` and `Keeping`; None without K and V.
        ROUNDED: the model's dtype, to which queries are rounded before they are rotated.
        Q_TYPE: operand type of their rotation.
    """
    program, stored = tl.program_id(0), 0
    if inputs.k is not None:
        n_v = tl.cdiv(tokens * KV_HEADS, ROWS)
        n_k = MATRICES * tl.cdiv(tokens * KV_HEADS // MATRICES, ROWS)
        stored = n_k + n_v
        if program < n_k:
            store_side(
                program, 0, inputs, tokens, k, learned, keeping, sequences, positions, slots, fault, layer,
                KV_HEADS, MATRICES, HALF, ROW, D, BLOCK, ROWS, WRITE, STAND_IN,
            )  # fmt: skip
        elif program < stored:
            store_side(
                program - n_k, 1, inputs, tokens, v, None, keeping, sequences, positions, slots, fault, layer,
                KV_HEADS, 1, D // 2, ROW, D, BLOCK, ROWS, WRITE, STAND_IN,
            )  # fmt: skip
    if inputs.q is not None:  # noqa: SIM102
        if program >= stored:
            rotate_queries(
                program - stored, inputs, tokens, queries, rotated, rotation, learned, positions, shares,
                HEADS, MATRICES, HALF, ROW, D, ROWS, WIDTH, ROUNDED, Q_TYPE, WINDOW,
            )  # fmt: skip


# -- Launches ----------------------------------------------------------------------------------------------------------
_NO_INPUTS, _NO_QUERIES = Inputs(*(None,) * 8, 0.0, None, None), Rotated(None, None, None)  # type: ignore[arg-type]


def _launch_prologue(
    inputs: Inputs, row: int, at: LayerView, *, fault: Tensor | None = None,
    heads: int = 0, queries: Tensor | None = None, rotated: Rotated = _NO_QUERIES, width: int = _WIDTH,
    dtype: torch.dtype = torch.float32, write: bool = True, stand_in: bool = False,
) -> None:  # fmt: skip
    """One launch of `prologue_kernel`, whose arguments these are; `dtype` is the model's."""
    x, shape, batch = inputs.k if inputs.q is None else inputs.q, at.kv.shape, at.batch
    layouts, tokens, head_dim = both_layouts(at, x.device), len(x), shape.head_dim
    keys, operand = layouts[0], rotation_operand(x, dtype == torch.bfloat16)
    shares = 1 if rotated.gains is None else min(len(rotated.gains), _STRETCHES_AT_ONCE)
    programs = 0 if inputs.q is None else num_tiles(tokens, heads, keys) * (head_dim // width) * shares
    stores: dict[str, object] = {"k": None, "v": None, "keeping": None}
    if inputs.k is not None:
        programs += sum(num_tiles(tokens, shape.num_kv_heads, layout) for layout in layouts)
        stores = store_arguments(at, layouts, x)
    launch(prologue_kernel, (programs,))(
        inputs, tokens, queries, rotated, keys.rotation, keys.learned,
        batch.positions if keys.learned else None, shares, sequences=len(batch.seq_lens), slots=batch.slot_mapping,
        fault=fault, layer=at.layer, HEADS=heads, KV_HEADS=shape.num_kv_heads, MATRICES=keys.matrices,
        HALF=keys.learned.half if keys.learned else head_dim // 2, ROW=row, D=head_dim, BLOCK=at.kv.block_size, ROWS=ROWS,
        WIDTH=width, ROUNDED=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, Q_TYPE=operand,
        WINDOW=shape.window or 0, WRITE=write, STAND_IN=stand_in, **stores,
    )  # fmt: skip


def append(k: Tensor, v: Tensor, at: LayerView, fault: Tensor, *, write: bool = True, stand_in: bool = False) -> None:
    """Quantize K and V [T, Hkv, D] fp32 and store them, in BF16 too what stays in it, in one launch. It does not wait.

    Args:
        at: where they go; a negative slot is skipped.
        fault: from `ops.new_fault`; a vector that is not finite, or too large for its format, is left out and noted there.
        write: store, or look for faults only.
        stand_in: store a vector that is not finite with zeros for such numbers; not where tokens stay in BF16.
    """
    assert not (stand_in and layer_windows(at.kv))
    inputs = _NO_INPUTS._replace(k=k.contiguous(), v=v.contiguous())
    _launch_prologue(inputs, k.shape[1] * k.shape[2], at, fault=fault, write=write, stand_in=stand_in)


def _unset_queries(q: Tensor, at: LayerView) -> Rotated:
    """Memory for q [T, Hq, D] of a model's dtype, rotated; for learned keys once for each stretch."""
    dtype = torch.float16 if q.dtype == torch.bfloat16 else torch.float32
    if not both_layouts(at, q.device)[0].learned:
        return Rotated(torch.empty(q.shape, dtype=dtype, device=q.device), None, None)
    stretches = stretch_room(at.batch, at.kv.block_size)
    gains, lacks = (torch.empty(stretches, *q.shape[:2], device=q.device) for _ in range(2))
    return Rotated(torch.empty(stretches, *q.shape, dtype=dtype, device=q.device), gains, lacks)


def rotate(q: Tensor, at: LayerView) -> Rotated:
    """Queries [T, Hq, D] in the domain of the codes; for learned keys once for each stretch."""
    rotated, inputs = _unset_queries(q, at), _NO_INPUTS._replace(q=q.contiguous())
    _launch_prologue(inputs, q.shape[1] * q.shape[2], at, heads=q.shape[1], rotated=rotated, dtype=q.dtype)
    return rotated


def tokens_at_once(q: Tensor, at: LayerView) -> int:
    """How many tokens' queries may be rotated at a time: for learned keys there are as many as stretches."""
    if not both_layouts(at, q.device)[0].learned:
        return max(1, len(q))
    nbytes = q.element_size() * q.shape[1] * q.shape[2] * stretch_room(at.batch, at.kv.block_size)
    return max(1, MOST_AHEAD // nbytes)


def rotate_and_append(
    qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, fault: Tensor
) -> tuple[Tensor, Rotated | None]:
    """Everything between the packed projections and attention, in one launch; arguments as of `FusedOps.attention`.

    Returns:
        The queries [T, Hq, D], set only where tokens stay in BF16 or the other is None, and those of `rotate`, or None where
        they would take too much memory.
    """
    qkv, (cos, sin) = qkv.contiguous(), (x.contiguous() for x in rope)
    shape, keys = at.kv.shape, both_layouts(at, qkv.device)[0]
    assert keys.learned is None or 2 * keys.learned.half == shape.head_dim, "cos and sin turn all of a head"
    widths = [n * shape.head_dim for n in (heads.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    q_bias, k_bias, v_bias = (None,) * 3 if heads.bias is None else heads.bias.split(widths)
    q, k, v = qkv.split(widths, 1)
    inputs = Inputs(q, k, v, q_bias, k_bias, v_bias, heads.q_norm, heads.k_norm, heads.eps, cos, sin)
    queries = torch.empty(len(qkv), heads.num_heads, shape.head_dim, dtype=heads.dtype, device=qkv.device)
    ahead = len(qkv) <= tokens_at_once(queries, at)
    rotated, width = _unset_queries(queries, at) if ahead else None, shape.head_dim
    if ahead:  # few columns where vectors are few, so that they fill a GPU; few in FP32, too, whose products take registers
        few = len(qkv) == len(at.batch.seq_lens) or rotation_operand(qkv, heads.dtype == torch.bfloat16) == tl.float32
        width = _WIDTH if few else width // 2
    _launch_prologue(
        inputs, qkv.shape[1], at, fault=fault, heads=heads.num_heads,
        queries=queries if layer_windows(at.kv) or not ahead else None, rotated=rotated or _NO_QUERIES, width=width,
        dtype=heads.dtype,
    )  # fmt: skip
    return queries, rotated


def in_parts(q: Tensor, at: LayerView) -> Iterator[tuple[Tensor, Rotated, LayerView]]:
    """Queries and their batch, as many tokens at a time as `tokens_at_once` says."""
    most = tokens_at_once(q, at)
    if len(q) <= most:
        yield q, rotate(q, at), at
        return
    for begin in range(0, len(q), most):
        some, part = q[begin : begin + most], replace(at, batch=batch_part(at.batch, begin, begin + most))
        yield some, rotate(some, part), part


def batch_part(batch: Batch, begin: int, end: int) -> Batch:
    """Tokens begin … end - 1 of a batch, without waiting for the device: those behind them are not there yet.

    Of a batch of one token a sequence these are sequences. Of others all stay, some without a token.
    """
    end, starts = min(end, len(batch.positions)), batch.query_start_loc
    inside = replace(batch, positions=batch.positions[begin:end], slot_mapping=batch.slot_mapping[begin:end])
    if len(batch.positions) == len(batch.seq_lens):
        return replace(
            inside, block_table=batch.block_table[begin:end], seq_lens=batch.seq_lens[begin:end], rows=batch.rows[begin:end],
            query_start_loc=starts[begin : end + 1] - begin,
        )  # fmt: skip
    lengths, starts = batch.seq_lens - (starts[1:] - starts[1:].clamp(max=end)), starts.clamp(begin, end) - begin
    table, rows = batch.block_table, batch.rows
    if end - begin == len(lengths):
        # As many tokens as sequences would pass for one of each: one more sequence, without tokens, tells them apart.
        lengths, rows = (torch.cat([one, torch.zeros_like(one[:1])]) for one in (lengths, rows))
        table, starts = (torch.cat([one, one[-1:]]) for one in (table, starts))
    return replace(inside, query_start_loc=starts, seq_lens=lengths, block_table=table, rows=rows)
