"""The op table of `tq_ops.reference` on a GPU, or, with tensors on the CPU, in Triton's interpreter.

Signatures, shapes, dtypes and errors are the reference's. Rounding points that differ, all within `validation.bounds`: in a
BF16 model the rotated queries, the centroids and the probabilities (in units of the largest V scale of the split) are rounded
to FP16, products accumulate in FP32, and the probabilities are summed before they are rounded.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import attention, choices, decode, elementwise, merge, prologue, quantize
from haarkv.tq_ops.cuda.arguments import ROWS, quantized_by, strides_of, tiles_of
from haarkv.tq_ops.cuda.available import capability
from haarkv.tq_ops.cuda.kept import kept_in, seen_in_bf16, storing
from haarkv.tq_ops.cuda.kept_attention import attend_kept
from haarkv.tq_ops.cuda.layout import NO_FAULT, Layout, Rotated, layout_of, unset_queries
from haarkv.tq_ops.cuda.rotate import rotate_kernel
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.fused import Heads
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache

LOG2_E = 1.4426950408889634
_WIDTH = 32
"""Columns of a small product: so few that even a decode step fills a GPU."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `tq_ops.reference.rms_norm`, one launch."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    size = triton.next_power_of_2(width)
    elementwise.rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, width, eps, SIZE=size, num_warps=choices.row_warps(size), **choices.COMPILED
    )
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `tq_ops.reference.linear`: cuBLAS, products and sums in FP32, an FP32 result."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return reference.linear(x, weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `tq_ops.reference.rope`, one launch."""
    x = x.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty_like(x)
    elementwise.rope_kernel[(tokens,)](
        x, cos.contiguous(), sin.contiguous(), out, HEADS=heads, D=head_dim, SIZE=triton.next_power_of_2(heads),
        **choices.COMPILED,
    )  # fmt: skip
    return out


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """As `tq_ops.reference.silu_mul`, one launch; both may be views of one wider tensor."""
    if gate.stride(-1) != 1 or gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    tokens, width = gate.shape
    out = torch.empty(tokens, width, dtype=dtype, device=gate.device)
    grid = (tokens, triton.cdiv(width, 1024))
    elementwise.silu_mul_kernel[grid](gate, up, out, width, gate.stride(0), SIZE=1024, **choices.COMPILED)
    return out


def new_fault(device: torch.device) -> Tensor:
    """[1] int64 in which `append` leaves where the first vector that it refuses is."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


def raise_fault(fault: Tensor, cache: PagedKVCache, batch: Batch) -> None:
    """Wait for the device, and clear the fault.

    Raises:
        NonFiniteError: there is one; in the reference's words.
    """
    if (key := int(fault)) == NO_FAULT:
        return
    fault.fill_(NO_FAULT)
    layer, side, token, head = fault_place(key)
    kv_format = cache.v_format(layer) if side == "V" else cache.k_format(layer)
    where = f"layer {layer}: {side} of token {token} of the batch (slot {int(batch.slot_mapping[token])}), KV head {head}"
    raise NonFiniteError(f"{where} is not finite or too large for {kv_format.name}")


def fault_place(key: int) -> tuple[int, str, int, int]:
    """Layer, side ("K" or "V"), token of the batch and KV head of a fault that `append` noted."""
    return key >> 49, "KV"[(key >> 48) & 1], (key >> 16) & 0xFFFFFFFF, key & 0xFFFF


def _layouts(cache: PagedKVCache, layer: int, device: torch.device) -> tuple[Layout, Layout]:
    return (
        layout_of(cache.k_format(layer), layer, cache.shape(layer).head_dim, device),
        layout_of(cache.v_format(layer), layer, cache.shape(layer).head_dim, device),
    )


def append(
    k: Tensor,
    v: Tensor,
    cache: PagedKVCache,
    layer: int,
    batch: Batch,
    fault: Tensor,
    *,
    write: bool = True,
    stand_in: bool = False,
) -> None:
    """Quantize K and V and store them, and in BF16 what stays in it, in one launch and without waiting for the device.

    Args:
        k, v: [T, Hkv, D] fp32; K after RoPE.
        batch: where they go; a negative slot is skipped.
        fault: from `new_fault`; a vector that is not finite, or too large for its format, is left out and noted there.
        write: whether to store anything, or to look for faults only.
        stand_in: store a vector that is not finite all the same, with zeros for its numbers that are not; not where tokens
            stay in BF16.
    """
    kept = kept_in(cache, layer)
    assert not (kept and stand_in)
    k, v = k.contiguous(), v.contiguous()
    (of_k, of_v), head_dim, heads = (
        _layouts(cache, layer, k.device),
        cache.shape(layer).head_dim,
        cache.shape(layer).num_kv_heads,
    )
    k_fields, v_fields = cache.k_fields(layer), cache.v_fields(layer)
    tokens = k.shape[0]
    quantize.quantize_kernel[(max(tiles_of(tokens, heads, of) for of in (of_k, of_v)), 2)](
        k, v, k_fields["codes"], v_fields["codes"], k_fields["scale"], v_fields["scale"], *strides_of(k_fields, v_fields),
        batch.slot_mapping, tokens, fault=fault, layer=layer,
        **quantized_by(of_k, of_v, k, head_dim), **storing(kept, batch), **choices.COMPILED,
        HEADS=heads, D=head_dim, BLOCK=cache.block_size, ROWS=ROWS, WRITE=write, STAND_IN=stand_in,
    )  # fmt: skip


def gelu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """GeGLU's product; arguments, result and rounding points as the reference's."""
    return reference.gelu_mul(gate, up, dtype)


def store_kv(k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
    """As `tq_ops.reference.store_kv`: one launch looks for faults, and if there are none, another writes."""
    slots = batch.slot_mapping
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < cache.num_slots:
        raise IndexError(f"slots must lie in 0 … {cache.num_slots - 1}")
    cache.require_room(batch)
    fault = new_fault(k.device)
    append(k, v, cache, layer, batch, fault, write=False)
    raise_fault(fault, cache, batch)
    append(k, v, cache, layer, batch, fault)


def rotate(q: Tensor, layout: Layout) -> Rotated:
    """Queries [T, Hq, D] in the domain of the codes."""
    (tokens, heads, head_dim), width = q.shape, layout.width
    out, largest = unset_queries(tokens, heads, layout, q.dtype, q.device), layout.learned.largest if layout.learned else None
    exact = layout.rotation.dtype == q.dtype == torch.bfloat16
    rotate_kernel[(tiles_of(tokens, heads, layout), width // _WIDTH)](
        q.contiguous(), *out, layout.rotation, largest, tokens, HEADS=heads, MATRICES=layout.matrices, D=head_dim, W=width,
        LEARNED=largest is not None,
        TYPE=choices.rotation_operand(q, exact), ROWS=ROWS, WIDTH=_WIDTH, **choices.COMPILED,
    )  # fmt: skip
    return out


def attend(
    q: Tensor,
    rotated: Rotated,
    cache: PagedKVCache,
    layer: int,
    batch: Batch,
    softmax_scale: float,
    *,
    rotate_back: bool = True,
    cuda_cpp: bool = True,
) -> Tensor:
    """Attention of rotated queries, in two launches, or in one of `decode`, and without waiting for the device.

    Where tokens stay in BF16, one more launch attends to those.

    Args:
        q: [T, Hq, D], for its dtype and device; where tokens stay in BF16 also for its numbers, in the model's domain.
        rotated: the same, from `rotate`.
        rotate_back: False leaves the result in V's rotated domain, in the kernels' order, for a projection that already
            contains the rotation; learned coordinates of V cannot be left out.
        cuda_cpp: False keeps to the Triton kernels, for comparison, where `decode` would take the launch.
    Returns:
        [T, Hq, D] of q's dtype.
    """
    (of_k, of_v), head_dim, heads = (
        _layouts(cache, layer, q.device),
        cache.shape(layer).head_dim,
        cache.shape(layer).num_kv_heads,
    )
    tokens, group, sequences = q.shape[0], q.shape[1] // heads, batch.seq_lens.shape[0]
    one_each, operand, table = tokens == sequences, choices.attention_operand(q), batch.block_table.contiguous()
    kept, scale = kept_in(cache, layer), softmax_scale * LOG2_E
    in_bf16 = attend_kept(q, kept, cache, layer, batch, scale) if kept else None
    if cuda_cpp and one_each and decode.takes(q, cache, layer, of_k, of_v):
        return decode.attend(q, rotated, cache, layer, batch, of_k, of_v, scale, rotate_back, in_bf16)
    bits, widest = max(of_k.bits, of_v.bits), max(of_k.width, of_v.width)
    gpu, gains = capability(q.device), rotated.gains is not None
    v_words = choices.words_of_v(of_k, of_v, gpu)
    crowded = gains or v_words is not None
    tile = choices.attention_tile(triton.cdiv(tokens, sequences), group, widest, operand, gpu, bits, crowded)
    # Ragged column tiles: a sequence wastes less than one.
    column_tiles = sequences if one_each else triton.cdiv(tokens * group, tile.columns) + sequences
    most_tiles = column_tiles * triton.cdiv(table.shape[1] * cache.block_size, tile.tokens)
    programs = choices.count_programs(heads, most_tiles, q.device)
    # Column tiles enough for all programs are not cut.
    whole = not one_each and tokens * group >= programs * tile.columns
    programs = column_tiles if whole else programs
    shape = (tokens, heads, group) if whole else (programs + column_tiles, heads, tile.columns)
    parts = torch.empty(*shape, of_v.width, dtype=torch.float32, device=q.device)
    maxima, sums = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    k_fields, v_fields = cache.k_fields(layer), cache.v_fields(layer)
    same = {
        "HEADS": heads, "GROUP": group, "COLUMNS": tile.columns, "TOKENS": tile.tokens,
        "SIZE": choices.schedule_size(sequences, gpu), "ONE_EACH": one_each, "WHOLE": whole,
        **seen_in_bf16(kept), **choices.COMPILED,
    }  # fmt: skip
    attention.attend_kernel[(programs, heads)](
        *rotated, parts, maxima, sums, batch.positions, batch.query_start_loc, sequences, batch.seq_lens, table,
        table.shape[1], k_fields["codes"], v_fields["codes"], k_fields["scale"], v_fields["scale"],
        *strides_of(k_fields, v_fields),
        of_k.centroids, of_v.centroids, of_k.words, v_words, scale, programs,
        K_BITS=of_k.bits, V_BITS=of_v.bits, K_N=of_k.levels, V_N=of_v.levels, K_W=of_k.width, V_W=of_v.width,
        GAINS=gains, BLOCK=cache.block_size, WIDE=tile.wide, TYPE=operand,
        K_PERMUTE=choices.permutes(q, of_k.words), V_PERMUTE=choices.permutes(q, of_v.words),
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **same,
    )  # fmt: skip
    out = torch.empty_like(q)
    of_merge = choices.merge_tile(whole, head_dim, of_v.width)
    tiles = tiles_of(tokens, heads * group, of_v) if whole else tokens * heads * group
    across = head_dim // (of_merge.width * of_merge.pieces) if rotate_back else 1
    merge.merge_kernel[(tiles, across)](
        parts, maxima, sums, out, of_v.rotation, of_v.learned.mean if of_v.learned else None, tokens, batch.query_start_loc,
        sequences, batch.seq_lens, programs,
        *((in_bf16.parts, in_bf16.maxima, in_bf16.sums) if in_bf16 else (None, None, None)),
        D=head_dim, W=of_v.width, LEARNED=of_v.learned is not None,
        ROWS=of_merge.rows, AT_ONCE=of_merge.at_once, WIDTH=of_merge.width, PIECES=of_merge.pieces, ROTATES_BACK=rotate_back,
        num_warps=of_merge.warps, **same,
    )  # fmt: skip
    return out


def attend_rotated(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
    """`paged_attention` without the rotation back, for a projection that contains it; the result is in the kernels' order."""
    of_k, _ = _layouts(cache, layer, q.device)
    return attend(q, rotate(q, of_k), cache, layer, batch, softmax_scale, rotate_back=False)


def triton_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
    """`paged_attention` by the Triton kernels alone, for comparison with `decode`."""
    of_k, _ = _layouts(cache, layer, q.device)
    return attend(q, rotate(q, of_k), cache, layer, batch, softmax_scale, cuda_cpp=False)


def paged_attention(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
    """As `tq_ops.reference.paged_attention`, over the packed codes: three launches, no de-quantized K or V in memory.

    It allocates the rotated queries and the partial results, a number of them that does not grow with the context.
    """
    of_k, _ = _layouts(cache, layer, q.device)
    return attend(q, rotate(q, of_k), cache, layer, batch, softmax_scale)


def rotate_and_append(
    qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], cache: PagedKVCache, layer: int, batch: Batch, fault: Tensor
) -> tuple[Tensor, Rotated]:
    """Everything between the packed projections and attention, in one launch; arguments as of `FusedOps.attention`.

    It stores K and V, and notes in `fault` what it leaves out, as `append` does.

    Returns:
        The two that `attend` takes: the queries [T, Hq, D], whose numbers are set only where tokens stay in BF16, and the same
        in the domain of the codes, as `rotate` gives them.
    """
    qkv, (cos, sin) = qkv.contiguous(), (x.contiguous() for x in rope)
    tokens, head_dim, kv_heads = qkv.shape[0], cache.shape(layer).head_dim, cache.shape(layer).num_kv_heads
    of_k, of_v = _layouts(cache, layer, qkv.device)
    k_fields, v_fields = cache.k_fields(layer), cache.v_fields(layer)
    rotated = unset_queries(tokens, heads.num_heads, of_k, heads.dtype, qkv.device)
    queries = torch.empty(tokens, heads.num_heads, head_dim, dtype=heads.dtype, device=qkv.device)
    kept = kept_in(cache, layer)
    q_type = choices.rotation_operand(qkv, of_k.rotation.dtype == heads.dtype == torch.bfloat16)
    width = choices.query_columns(tokens == batch.seq_lens.shape[0], of_k.width, q_type)
    of_q = tiles_of(tokens, heads.num_heads, of_k) * (of_k.width // width)
    prologue.prologue_kernel[(tiles_of(tokens, kv_heads, of_k) + tiles_of(tokens, kv_heads, of_v) + of_q,)](
        qkv, heads.bias, heads.q_norm, heads.k_norm, heads.eps, cos, sin, tokens, queries if kept else None, *rotated,
        k_fields["codes"], v_fields["codes"], k_fields["scale"], v_fields["scale"], *strides_of(k_fields, v_fields),
        batch.slot_mapping, of_k.rotation, of_k.learned.largest if of_k.learned else None, fault=fault, layer=layer,
        **quantized_by(of_k, of_v, qkv, head_dim), **storing(kept, batch), **choices.COMPILED,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, D=head_dim, BLOCK=cache.block_size, ROWS=ROWS, WIDTH=width,
        BIASED=heads.bias is not None, NORMED=heads.q_norm is not None,
        ROUNDED=choices.element(heads.dtype), Q_TYPE=q_type,
    )  # fmt: skip
    return queries, rotated
