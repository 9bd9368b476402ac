"""Quantize and append alone, as one PyPTO program: scope 2a of a layer, to be verified by itself."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.attention import HEAD_DIM
from haarkv.tq_ops.npu.kernels.sides import kernel_of, parameter


def build(program: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of a `StoreProgram`: tiles of `program.rows` tokens."""
    rows, kv_heads, side = program.rows, program.num_kv_heads, program.side
    cache_side = kernel_of(side)
    count = rows * kv_heads

    @pypto.frontend.jit(**options)
    def store_kv(
        k: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_FP32),
        v: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_FP32),
        rotation: pypto.Tensor([HEAD_DIM, HEAD_DIM], pypto.DT_BF16),
        slot: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        k_vectors: parameter(side.vectors),
        k_scales: parameter(side.scale_row),
        v_vectors: parameter(side.vectors),
        v_scales: parameter(side.scale_row),
    ):
        tokens = slot.shape[0]
        stored_k = cache_side(k_vectors, k_scales)
        stored_v = cache_side(v_vectors, v_scales)
        for tile in pypto.loop((tokens + rows - 1) // rows, name="TILE", idx_name="tile"):
            new_k = stored_k.room(count, "new_k")
            new_v = stored_v.room(count, "new_v")
            base = tile * rows
            for _ in pypto.loop(1, name="QUANTIZE", idx_name="i1"):
                stored_k.store(pypto.view(k, [count, HEAD_DIM], [base * kv_heads, 0]), rotation, count, new_k)
                stored_v.store(pypto.view(v, [count, HEAD_DIM], [base * kv_heads, 0]), rotation, count, new_v)
            for i in pypto.loop((tokens - base).min(rows), name="APPEND", idx_name="i2"):
                stored_k.append(i, slot[base + i], new_k, kv_heads)
                stored_v.append(i, slot[base + i], new_v, kv_heads)

    return store_kv
