"""`gated_delta` on a GPU, or in Triton's interpreter: versions are chosen on the device, so that a graph can hold a step."""

from __future__ import annotations

from typing import cast

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices, delta_kernels
from haarkv.tq_ops.cuda.arguments import sequence_bits
from haarkv.tq_ops.cuda.launching import launch
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.recurrent import Recurrent


def advance(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    cache: PagedKVCache,
    layer: int,
    batch: Batch,
    fault: Tensor,
) -> Tensor:
    """`gated_delta` in two launches, without waiting for the device.

    A sequence that pads the batch reads and keeps nothing; its numbers are 0. One whose state no version has seen keeps
    nothing either; its numbers are NaN, and it is noted.

    Args:
        x, a, b, conv, a_log, dt_bias, cache, layer, batch: as of `tq_ops.reference.gated_delta`.
        fault: from `ops.new_fault`, where a state that is not there is noted.
    Returns:
        [T, Hv, dv] fp32.
    Rounding points: none; all is FP32. Sums are in one order, whatever the batch and however a prompt is cut.
    """
    state = cast(Recurrent, cache.states[layer])
    windows, memories = state.tensors["conv"], state.tensors["delta"]
    _, versions, value_heads, key_dim, value_dim = memories.shape
    (tokens, channels), taps, sequences = x.shape, conv.shape[2], len(batch.rows)
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    x, a, b, conv, a_log, dt_bias = (tensor.float().contiguous() for tensor in (x, a, b, conv, a_log, dt_bias))
    mixed, gates, out = (
        torch.empty(tokens, *size, device=x.device) for size in ((channels,), (value_heads, 2), (value_heads, value_dim))
    )
    turns = torch.empty(sequences, versions, dtype=torch.int32, device=x.device)
    shape = {
        "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
        "VERSIONS": versions, "VERSIONS_SIZE": triton.next_power_of_2(versions),
    }  # fmt: skip
    key_size = triton.next_power_of_2(key_dim)
    launch(delta_kernels.delta_inputs_kernel, (tokens, 2 * key_heads + value_heads))(
        x, a, b, conv, a_log, dt_bias, windows, state.seen, batch.positions, batch.slot_mapping, batch.rows,
        batch.query_start_loc, sequences, fault, layer, mixed, gates, turns, TAPS=taps, SEQUENCE_BITS=sequence_bits(batch),
        SIZE=max(key_size, triton.next_power_of_2(value_dim)), num_warps=1, **shape, **choices.COMPILED,
    )  # fmt: skip
    columns = choices.delta_columns(key_size)
    launch(delta_kernels.delta_rule_kernel, (sequences * value_heads, triton.cdiv(value_dim, columns)))(
        mixed, gates, turns, memories, state.seen, batch.positions, batch.rows, batch.query_start_loc, out,
        KEY_SIZE=key_size, COLUMNS=columns, num_warps=1, **shape, **choices.COMPILED,
    )  # fmt: skip
    return out
