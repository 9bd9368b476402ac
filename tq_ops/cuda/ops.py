"""The op table of `tq_ops.reference` on a GPU, or, with tensors on the CPU, in Triton's interpreter.

Signatures, shapes, dtypes and errors are the reference's. Rounding points that differ, all within `validation.bounds`: in a
BF16 model the rotated queries, the centroids and the probabilities (in units of the largest V scale of the split) are rounded
to FP16, products accumulate in FP32, and the probabilities are summed before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import arguments, attention, choices, decode, delta, prologue, quantize
from haarkv.tq_ops.cuda.available import capability, launch
from haarkv.tq_ops.cuda.block_planes import placed
from haarkv.tq_ops.cuda.block_products import product
from haarkv.tq_ops.cuda.elementwise import add_norm, gelu_mul, rms_norm, silu_mul
from haarkv.tq_ops.cuda.elementwise import rope as rope
from haarkv.tq_ops.cuda.elementwise import sigmoid_mul as sigmoid_mul
from haarkv.tq_ops.cuda.experts import run_experts
from haarkv.tq_ops.cuda.in_bf16 import attend_windows
from haarkv.tq_ops.cuda.layout import NO_FAULT, Layout, Rotated, fault_place, stretch_room, to_layout, unset_queries
from haarkv.tq_ops.cuda.rotate import rotate_kernel
from haarkv.tq_ops.cuda.schedule import merge_kernel
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.layer import NonFiniteTokenError
from haarkv.tq_ops.kv.recurrent import UNSEEN
from haarkv.tq_ops.table import Heads
from haarkv.tq_ops.weight import Blocks, Weight

LOG2_E = 1.4426950408889634
_WIDTH = 32
"""Columns of a small product: so few that even a decode step fills a GPU."""


def linear(x: Tensor, weight: Weight) -> Tensor:
    """As `tq_ops.reference.linear`: cuBLAS, products and sums in FP32, an FP32 result; blocks as by `product`."""
    weight = placed(weight, x.device)
    if isinstance(weight, Blocks):
        return product(x, weight)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return reference.linear(x, weight)


def gated_delta(x: Tensor, a: Tensor, b: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, at: LayerView) -> Tensor:
    """As `tq_ops.reference.gated_delta`: it waits to know that every state is there, then two launches."""
    at.state.require(at.batch)
    return delta.advance(x, a, b, conv, a_log, dt_bias, at, new_fault(x.device))


def new_fault(device: torch.device) -> Tensor:
    """[1] int64 in which `append` leaves where the first vector that it refuses is, and `delta.advance` a state not there."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


def raise_fault(fault: Tensor, cache: PagedKVCache, batch: Batch) -> None:
    """Wait for the device, and clear the fault.

    Raises:
        NonFiniteError, ValueError: there is one, of K and V or of a state; in the reference's words.
    """
    if (key := int(fault)) == NO_FAULT:
        return
    fault.fill_(NO_FAULT)
    layer, side, token, head = fault_place(key)
    if side == "state":
        raise ValueError(UNSEEN)
    at = cache.view(layer, batch)
    kv_format = at.kv.formats["KV".index(side)]
    raise NonFiniteTokenError(layer, side, token, int(at.batch.slot_mapping[token]), head, kv_format.name)


def _layouts(at: LayerView, device: torch.device) -> tuple[Layout, Layout]:
    k, v = (to_layout(kv_format, at.layer, at.kv.shape.head_dim, device) for kv_format in at.kv.formats)
    return k, v


def append(
    k: Tensor,
    v: Tensor,
    at: LayerView,
    fault: Tensor,
    *,
    write: bool = True,
    stand_in: bool = False,
) -> None:
    """Quantize K and V and store them, and in BF16 what stays in it, in one launch and without waiting for the device.

    Args:
        k, v: [T, Hkv, D] fp32; K after RoPE.
        at: where they go; a negative slot is skipped.
        fault: from `new_fault`; a vector that is not finite, or too large for its format, is left out and noted there.
        write: whether to store anything, or to look for faults only.
        stand_in: store a vector that is not finite all the same, with zeros for its numbers that are not; not where tokens
            stay in BF16.
    """
    windows, shape, batch = arguments.layer_windows(at.kv), at.kv.shape, at.batch
    assert not (windows and stand_in)
    k, v, tokens = k.contiguous(), v.contiguous(), k.shape[0]
    layouts = _layouts(at, k.device)
    launch(quantize.quantize_kernel, (max(arguments.num_tiles(tokens, shape.num_kv_heads, layout) for layout in layouts), 2))(
        k, v, keeping=arguments.keeping(windows, batch), sequences=batch.seq_lens.shape[0],
        positions=batch.positions if layouts[0].learned else None, slots=batch.slot_mapping, tokens=tokens, fault=fault,
        layer=at.layer, HEADS=shape.num_kv_heads, D=shape.head_dim, BLOCK=at.kv.block_size, ROWS=arguments.ROWS, WRITE=write,
        STAND_IN=stand_in, **choices.OPTIONS,
        **arguments.both_writes(at.kv.fields, layouts, windows, k, shape.head_dim),
    )  # fmt: skip


def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
    """As `tq_ops.reference.store_kv`: one launch looks for faults, and if there are none, another writes."""
    at.require_slots()
    at.require_room()
    fault = new_fault(k.device)
    append(k, v, at, fault, write=False)
    raise_fault(fault, at.cache, at.batch)
    append(k, v, at, fault)


def rotate(q: Tensor, at: LayerView) -> Rotated:
    """Queries [T, Hq, D] in the domain of the codes; for learned keys as those of each stretch meet them."""
    tokens, heads, head_dim = q.shape
    keys, shape = _layouts(at, q.device)[0], at.kv.shape
    stretches = stretch_room(at.batch, at.kv.block_size) if keys.learned else 1
    out = unset_queries(tokens, heads, keys, stretches, q.dtype, q.device)
    operand = choices.rotation_operand(q, q.dtype == torch.bfloat16)
    launch(rotate_kernel, (arguments.num_tiles(tokens, heads, keys), head_dim // _WIDTH, choices.stretch_programs(stretches)))(
        q.contiguous(), *out, keys.rotation, arguments.turning(keys, at.batch, shape.window, operand), tokens, HEADS=heads,
        MATRICES=keys.matrices, D=head_dim, TYPE=operand, ROWS=arguments.ROWS, WIDTH=_WIDTH,
        HALF=keys.learned.half if keys.learned else head_dim // 2, **choices.OPTIONS,
    )  # fmt: skip
    return out


def _at_once(q: Tensor, at: LayerView) -> int:
    """How many tokens' queries may be rotated at a time: for learned keys they are as many as there are stretches."""
    if not _layouts(at, q.device)[0].learned:
        return max(1, len(q))
    nbytes = q.element_size() * q.shape[1] * q.shape[2] * stretch_room(at.batch, at.kv.block_size)
    return max(1, choices.MOST_AHEAD // nbytes)


def batch_part(batch: Batch, begin: int, end: int) -> Batch:
    """Tokens begin … end - 1 of a batch, without waiting for the device: what comes behind them is not there yet.

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


def attend(q: Tensor, rotated: Rotated | None, at: LayerView, softmax_scale: float) -> Tensor:
    """Attention of rotated queries, in two launches, or in one of `decode`, and without waiting for the device.

    Where tokens stay in BF16, one more launch attends to those.

    Args:
        q: [T, Hq, D], for its dtype and device; where tokens stay in BF16, or without `rotated`, also for its numbers, in the
            model's domain.
        rotated: the same, from `rotate`; None where they would take too much memory: they are rotated here, some at a time.
    Returns:
        [T, Hq, D] of q's dtype.
    """
    if rotated is None:
        most, outputs = _at_once(q, at), []
        for begin in range(0, len(q), most):
            some, part = q[begin : begin + most], replace(at, batch=batch_part(at.batch, begin, begin + most))
            outputs.append(attend(some, rotate(some, part), part, softmax_scale))
        return torch.cat(outputs)
    windows, scale, layouts = arguments.layer_windows(at.kv), softmax_scale * LOG2_E, _layouts(at, q.device)
    in_bf16 = attend_windows(q, windows, at, scale) if windows else None
    if len(q) == len(at.batch.seq_lens) and decode.takes(q, at.kv, *layouts):
        return decode.attend(q, rotated, at, *layouts, scale, in_bf16)
    return _attend_in_parts(q, rotated, at, layouts, scale, windows, in_bf16)


def _attend_in_parts(
    q: Tensor, rotated: Rotated, at: LayerView, layouts: tuple[Layout, Layout], scale: float,
    windows: arguments.WindowPair | None, in_bf16: arguments.Part | None,
) -> Tensor:  # fmt: skip
    """The Triton kernels: partial results by `attention`, added up by `merge`."""
    (keys, values), shape, batch = layouts, at.kv.shape, at.batch
    (tokens, q_heads, head_dim), heads, sequences = q.shape, shape.num_kv_heads, batch.seq_lens.shape[0]
    group, one_each, operand = q_heads // heads, tokens == sequences, choices.attention_operand(q)
    table = batch.block_table.contiguous()
    tile = choices.attention_tile(
        triton.cdiv(tokens, sequences),
        group,
        head_dim,
        operand,
        capability(q.device),
        choices.widest_level(keys, values),
        keys.learned is not None,
    )
    # Ragged column tiles: a sequence wastes less than one.
    column_tiles = sequences if one_each else triton.cdiv(tokens * group, tile.columns) + sequences
    visible = choices.most_visible(table.shape[1] * at.kv.block_size, shape.window, tokens - sequences + 1, tile.tokens)
    programs = choices.count_programs(heads, column_tiles * triton.cdiv(visible, tile.tokens), q.device)
    # Column tiles enough for all programs are not cut.
    whole = not one_each and tokens * group >= programs * tile.columns
    programs = column_tiles if whole else programs
    parts_shape = (tokens, heads, group) if whole else (programs + column_tiles, heads, tile.columns)
    parts = torch.empty(*parts_shape, head_dim, dtype=torch.float32, device=q.device)
    maxima, sums = (torch.empty(parts_shape, dtype=torch.float32, device=q.device) for _ in range(2))
    new = arguments.token_arguments(batch, windows, shape.window, triton.next_power_of_2(sequences))
    same = {
        "HEADS": heads, "GROUP": group, "D": head_dim, "COLUMNS": tile.columns, "TOKENS": tile.tokens, "WHOLE": whole,
        **choices.OPTIONS,
    }  # fmt: skip
    launch(attention.attend_kernel, (programs, heads))(
        *rotated, tokens * q_heads, parts, maxima, sums, new, sequences, table, table.shape[1],
        arguments.read(at.kv.k.fields, keys, choices.permutes(q, keys)),
        arguments.read(at.kv.v.fields, values, choices.permutes(q, values)), scale, programs,
        BLOCK=at.kv.block_size, WIDE=tile.wide, TYPE=operand,
        num_warps=tile.warps, num_stages=tile.stages, **same,
    )  # fmt: skip
    out, merging = torch.empty_like(q), choices.merge_tile(whole, head_dim)
    tiles = arguments.num_tiles(tokens, q_heads, values) if whole else tokens * q_heads
    launch(merge_kernel, (tiles, head_dim // (merging["WIDTH"] * merging["PIECES"])))(
        parts, maxima, sums, out, values.rotation, tokens, new, sequences, programs,
        *((in_bf16.parts, in_bf16.maxima, in_bf16.sums) if in_bf16 else (None, None, None)),
        **merging, **same,
    )  # fmt: skip
    return out


def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
    """As `tq_ops.reference.paged_attention`, over the packed codes: three launches, no de-quantized K or V in memory.

    It allocates the rotated queries and the partial results, a number of them that does not grow with the context. Rotated for
    learned keys, queries are as many as a context has stretches, but never more than `choices.MOST_AHEAD` bytes at a time.
    """
    rotated = rotate(q, at) if len(q) <= _at_once(q, at) else None
    return attend(q, rotated, at, softmax_scale)


def rotate_and_append(
    qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, fault: Tensor
) -> tuple[Tensor, Rotated | None]:
    """Everything between the packed projections and attention, in one launch; arguments as of `FusedOps.attention`.

    It stores K and V, and notes in `fault` what it leaves out, as `append` does.

    Returns:
        The two that `attend` takes: the queries [T, Hq, D], whose numbers are set only where tokens stay in BF16 or the other
        is None, and the same in the domain of the codes, as `rotate` gives them.
    """
    qkv, (cos, sin), batch = qkv.contiguous(), (x.contiguous() for x in rope), at.batch
    tokens, shape, windows = qkv.shape[0], at.kv.shape, arguments.layer_windows(at.kv)
    layouts, kv_heads = _layouts(at, qkv.device), shape.num_kv_heads
    keys = layouts[0]
    assert keys.learned is None or 2 * keys.learned.half == shape.head_dim, "cos and sin turn all of a head"
    queries = torch.empty(tokens, heads.num_heads, shape.head_dim, dtype=heads.dtype, device=qkv.device)
    q_type = choices.rotation_operand(qkv, heads.dtype == torch.bfloat16)
    ahead = tokens <= _at_once(queries, at)
    stretches = stretch_room(batch, at.kv.block_size) if keys.learned and ahead else 1
    rotated = unset_queries(tokens, heads.num_heads, keys, stretches, heads.dtype, qkv.device) if ahead else None
    one_each, shares = tokens == batch.seq_lens.shape[0], choices.stretch_programs(stretches)
    width = choices.query_columns(one_each, shape.head_dim, q_type) if ahead else shape.head_dim
    q_programs = arguments.num_tiles(tokens, heads.num_heads, keys) * (shape.head_dim // width) * shares
    launch(prologue.prologue_kernel, (sum(arguments.num_tiles(tokens, kv_heads, layout) for layout in layouts) + q_programs,))(
        qkv, heads.bias, heads.q_norm, heads.k_norm, heads.eps, cos, sin, tokens, queries if windows or not ahead else None,
        *(rotated or (None, None, None)), keys.rotation, arguments.turning(keys, batch, shape.window, q_type), shares,
        keeping=arguments.keeping(windows, batch), sequences=batch.seq_lens.shape[0],
        positions=batch.positions if keys.learned else None, slots=batch.slot_mapping, fault=fault, layer=at.layer,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, D=shape.head_dim, BLOCK=at.kv.block_size, ROWS=arguments.ROWS, WIDTH=width,
        ROUNDED=choices.element(heads.dtype), Q_TYPE=q_type,
        **arguments.both_writes(at.kv.fields, layouts, windows, qkv, shape.head_dim), **choices.OPTIONS,
    )  # fmt: skip
    return queries, rotated


@dataclass(frozen=True)
class CudaFusedOps:
    """`tq_ops.table.FusedOps` for one executor. None of them waits for the device.

    Attributes:
        fault: from `new_fault`; a K or V that is not finite, or too large for its format, is left out and noted there.
    """

    fault: Tensor

    rms_norm = staticmethod(rms_norm)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    add_norm = staticmethod(add_norm)
    experts = staticmethod(run_experts)

    def linear(self, x: Tensor, weight: Weight | tuple[Weight, ...]) -> Tensor:
        """As `linear`; of several weights their results beside each other."""
        if isinstance(weight, tuple):
            return torch.cat([linear(x, part) for part in weight], dim=1)
        return linear(x, weight)

    def attention(self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, softmax_scale: float) -> Tensor:
        """As `FusedOps.attention`: the launch of `rotate_and_append`, and those of `attend`."""
        q, rotated = rotate_and_append(qkv, heads, rope, at, self.fault)
        return attend(q, rotated, at, softmax_scale).flatten(1)
