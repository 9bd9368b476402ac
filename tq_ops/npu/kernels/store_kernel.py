"""Quantize and append alone, as one PyPTO program: scope 2a of a layer, to be verified by itself."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.tq4 import BLOCK, HALF, HEAD_DIM, append, quantize


def build(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of a `StoreProgram`: tiles of `shape.rows` tokens."""
    rows, kv_heads = shape.rows, shape.num_kv_heads
    vectors = rows * kv_heads

    @pypto.frontend.jit(**options)
    def store_kv(
        k: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_FP32),
        v: pypto.Tensor([pypto.DYNAMIC, HEAD_DIM], pypto.DT_FP32),
        rotation: pypto.Tensor([HEAD_DIM, HEAD_DIM], pypto.DT_BF16),
        slot: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        k_codes: pypto.Tensor([pypto.DYNAMIC, HALF], pypto.DT_INT8),
        k_scale: pypto.Tensor([pypto.DYNAMIC, BLOCK], pypto.DT_FP16),
        v_codes: pypto.Tensor([pypto.DYNAMIC, HALF], pypto.DT_INT8),
        v_scale: pypto.Tensor([pypto.DYNAMIC, BLOCK], pypto.DT_FP16),
    ):
        tokens = slot.shape[0]
        for tile in pypto.loop((tokens + rows - 1) // rows, name="TILE", idx_name="tile"):
            new_k_codes = pypto.tensor([vectors, HALF], pypto.DT_INT8, "new_k_codes")
            new_k_scale = pypto.tensor([vectors, 1], pypto.DT_FP16, "new_k_scale")
            new_v_codes = pypto.tensor([vectors, HALF], pypto.DT_INT8, "new_v_codes")
            new_v_scale = pypto.tensor([vectors, 1], pypto.DT_FP16, "new_v_scale")
            base = tile * rows
            for _ in pypto.loop(1, name="QUANTIZE", idx_name="i1"):
                codes, scale = quantize(pypto.view(k, [vectors, HEAD_DIM], [base * kv_heads, 0]), rotation, vectors)
                new_k_codes[:] = codes
                new_k_scale[:] = scale
                codes, scale = quantize(pypto.view(v, [vectors, HEAD_DIM], [base * kv_heads, 0]), rotation, vectors)
                new_v_codes[:] = codes
                new_v_scale[:] = scale
            for i in pypto.loop((tokens - base).min(rows), name="APPEND", idx_name="i2"):
                append(i, slot[base + i], new_k_codes, new_k_scale, k_codes, k_scale, kv_heads)
                append(i, slot[base + i], new_v_codes, new_v_scale, v_codes, v_scale, kv_heads)

    return store_kv
