"""The op table of `tq_ops.reference` on a GPU, or, with tensors on the CPU, in Triton's interpreter.

Signatures, shapes, dtypes and errors are the reference's. Rounding points that differ, all within `validation.bounds`: in a
BF16 model the rotated queries, the centroids and the probabilities (in units of the largest V scale of the split) are rounded
to FP16, products accumulate in FP32, and the probabilities are summed before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import attention, decode, delta
from haarkv.tq_ops.cuda.block_planes import placed
from haarkv.tq_ops.cuda.block_products import product
from haarkv.tq_ops.cuda.elementwise import add_norm, gelu_mul, rms_norm, silu_mul
from haarkv.tq_ops.cuda.elementwise import rope as rope
from haarkv.tq_ops.cuda.elementwise import sigmoid_mul as sigmoid_mul
from haarkv.tq_ops.cuda.experts import run_experts
from haarkv.tq_ops.cuda.in_bf16 import attend_windows, layer_windows
from haarkv.tq_ops.cuda.layout import NO_FAULT, both_layouts, fault_place
from haarkv.tq_ops.cuda.prologue import append as append
from haarkv.tq_ops.cuda.prologue import in_parts
from haarkv.tq_ops.cuda.prologue import rotate as rotate
from haarkv.tq_ops.cuda.prologue import rotate_and_append as rotate_and_append
from haarkv.tq_ops.cuda.rotate import Rotated
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.layer import NonFiniteTokenError
from haarkv.tq_ops.kv.recurrent import UNSEEN
from haarkv.tq_ops.table import Heads
from haarkv.tq_ops.weight import Blocks, Weight

LOG2_E = 1.4426950408889634


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
    """[1] int64 in which `append` notes the first vector that it refuses, and `delta.advance` a state that is not there."""
    return torch.full((1,), NO_FAULT, dtype=torch.int64, device=device)


def raise_fault(fault: Tensor, cache: PagedKVCache, batch: Batch) -> None:
    """Wait for the device, clear the fault, and raise NonFiniteError, or ValueError of a state, as the reference does."""
    if (key := int(fault)) == NO_FAULT:
        return
    fault.fill_(NO_FAULT)
    layer, side, token, head = fault_place(key)
    if side == "state":
        raise ValueError(UNSEEN)
    at = cache.view(layer, batch)
    kv_format = at.kv.formats["KV".index(side)]
    raise NonFiniteTokenError(layer, side, token, int(at.batch.slot_mapping[token]), head, kv_format.name)


def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
    """As `tq_ops.reference.store_kv`: one launch looks for faults, and if there are none, another writes."""
    at.require_slots()
    at.require_room()
    fault = new_fault(k.device)
    append(k, v, at, fault, write=False)
    raise_fault(fault, at.cache, at.batch)
    append(k, v, at, fault)


def attend(q: Tensor, rotated: Rotated | None, at: LayerView, softmax_scale: float) -> Tensor:
    """Attention of queries [T, Hq, D], without waiting: one launch of `decode` or two of `attention`, one of tokens in BF16.

    `rotated`: the same from `rotate`; None where they would take too much memory: some at a time are rotated here.
    """
    if rotated is None:
        outs = [attend(some, ahead, part, softmax_scale) for some, ahead, part in in_parts(q, at)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
    windows, scale, layouts = layer_windows(at.kv), softmax_scale * LOG2_E, both_layouts(at, q.device)
    in_bf16 = attend_windows(q, windows, at, scale) if windows else None
    takes = len(q) == len(at.batch.seq_lens) and decode.takes(q, at.kv, *layouts)
    run = decode.attend if takes else attention.attend
    return run(q, rotated, at, layouts, scale, in_bf16)


def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
    """As `tq_ops.reference.paged_attention`, over the packed codes, with no de-quantized K or V in memory."""
    return attend(q, None, at, softmax_scale)


@dataclass(frozen=True)
class CudaFusedOps:
    """`tq_ops.table.FusedOps` for one executor; none of them waits for the device.

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
        """As `linear`; of several weights the results side by side."""
        if isinstance(weight, tuple):
            return torch.cat([linear(x, part) for part in weight], dim=1)
        return linear(x, weight)

    def attention(self, qkv: Tensor, heads: Heads, rope: tuple[Tensor, Tensor], at: LayerView, softmax_scale: float) -> Tensor:
        """As `FusedOps.attention`: the launch of `rotate_and_append`, and those of `attend`."""
        q, rotated = rotate_and_append(qkv, heads, rope, at, self.fault)
        return attend(q, rotated, at, softmax_scale).flatten(1)
