"""Parameters and `CacheSide` of a `tq_ops.npu.sides.Side`, and the program that quantizes and appends alone (scope 2a)."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.learned import LearnedKeys
from haarkv.tq_ops.npu.kernels.side import DTYPES, Domain, Plain
from haarkv.tq_ops.npu.kernels.tq4 import Packed, SeedBytes
from haarkv.tq_ops.npu.sides import BF16, PUBLISHED, TQ4

_KERNELS = {TQ4.name: Packed, PUBLISHED.name: SeedBytes, BF16.name: Plain}


def side_kernel(side):
    """The class of a `Side`'s `CacheSide`."""
    return LearnedKeys if side.layout else _KERNELS[side.name]


def parameter(field):
    """The type of a program's parameter that is a `Stored` field."""
    return pypto.Tensor([pypto.DYNAMIC, field.width], DTYPES[field.dtype])


def build(program: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of a `StoreProgram`: tiles of `program.rows` tokens."""
    rows, kv_heads, head_dim = program.rows, program.num_kv_heads, program.k.head_dim
    side_k, side_v = program.k, program.v
    kernel_k, kernel_v = side_kernel(side_k), side_kernel(side_v)
    count = rows * kv_heads

    @pypto.frontend.jit(**options)
    def store_kv(
        k: pypto.Tensor([pypto.DYNAMIC, kv_heads, head_dim], pypto.DT_FP32),
        v: pypto.Tensor([pypto.DYNAMIC, kv_heads, head_dim], pypto.DT_FP32),
        rotation: pypto.Tensor([head_dim, head_dim], pypto.DT_BF16),
        slot: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        back: pypto.Tensor([pypto.DYNAMIC, head_dim], pypto.DT_FP32),
        k_forward: parameter(side_k.domain[0]),
        k_numbers: parameter(side_k.domain[1]),
        k_places: parameter(side_k.domain[2]),
        k_rows: parameter(side_k.domain[3]),
        k_turns: parameter(side_k.domain[4]),
        k_vectors: parameter(side_k.vectors),
        k_scales: parameter(side_k.scale_row),
        v_vectors: parameter(side_v.vectors),
        v_scales: parameter(side_v.scale_row),
    ):
        tokens = slot.shape[0]
        domain_k = Domain(rotation, None, k_forward, k_numbers, k_places, k_rows, k_turns)
        stored_k = kernel_k(side_k, k_vectors, k_scales, domain_k)
        stored_v = kernel_v(side_v, v_vectors, v_scales, Domain(rotation))
        for tile in pypto.loop((tokens + rows - 1) // rows, name="TILE", idx_name="tile"):
            new_k = stored_k.room(count, "new_k")
            new_v = stored_v.room(count, "new_v")
            base = tile * rows
            for _ in pypto.loop(1, name="QUANTIZE", idx_name="i1"):
                by = pypto.view(back, [rows, head_dim], [base, 0]) if side_k.layout else None
                pypto.set_vec_tile_shapes(4, kv_heads, head_dim)
                stored_k.store(pypto.view(k, [rows, kv_heads, head_dim], [base, 0, 0]), rows, kv_heads, new_k, by)
                pypto.set_vec_tile_shapes(4, kv_heads, head_dim)
                stored_v.store(pypto.view(v, [rows, kv_heads, head_dim], [base, 0, 0]), rows, kv_heads, new_v, None)
            for i in pypto.loop((tokens - base).min(rows), name="APPEND", idx_name="i2"):
                stored_k.append(i, slot[base + i], new_k, kv_heads)
                stored_v.append(i, slot[base + i], new_v, kv_heads)

    return store_kv
