"""What restores centroids, chooses levels, or stores K and V, alone: as PyPTO programs."""

from collections.abc import Callable
from dataclasses import dataclass

import pypto

from haarkv.models.qwen3_14b.npu.layer_kernel import parameter, side_kernel
from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import restore_centroids
from haarkv.tq_ops.npu.kernels.side import Domain
from haarkv.tq_ops.npu.kernels.tq4 import book, count_levels, restore
from haarkv.tq_ops.npu.program import HEAD_DIM, Argument


@dataclass(frozen=True)
class Step:
    """A step of the kernels, alone.

    Attributes:
        body: takes the tensors x and out, and sizes.
        x, out: their shapes and PyPTO's names of their types.
    """

    name: str
    body: Callable
    sizes: object
    x: tuple
    out: tuple
    arguments: tuple = (Argument("x"), Argument("out", output=True))

    def build(self, **options):
        body, sizes = self.body, self.sizes
        x_type, out_type = (pypto.Tensor(list(shape), getattr(pypto, kind)) for shape, kind in (self.x, self.out))

        @pypto.frontend.jit(**options)
        def step(x: x_type, out: out_type):
            for _ in pypto.loop(1, name="STEP", idx_name="i"):
                body(x, out, sizes)

        return step


def levels():
    """Numbers [16, 128] FP32 to their levels, FP32."""
    return Step("levels", _count_levels, None, ((16, 128), "DT_FP32"), ((16, 128), "DT_FP32"))


def _count_levels(x, out, _):
    pypto.set_vec_tile_shapes(16, 128)
    out[:] = count_levels(x, book(HEAD_DIM).steps)


def look_up(rows, width=HEAD_DIM):
    """Codes of `tq4`, [rows, width / 2] INT8, to the centroids they stand for, [rows, width] FP16."""
    return Step("look_up", _look_up, (rows, width), ((rows, width // 2), "DT_INT8"), ((rows, width), "DT_FP16"))


def _look_up(codes, out, sizes):
    rows, width = sizes
    pypto.set_pass_options(sg_set_scope=1)
    blocks = [pypto.view(codes, [BLOCK, width // 2], [row, 0]) for row in range(0, rows, BLOCK)]
    restore(blocks, lambda values, column: pypto.assemble(values, [0, column], out))
    pypto.set_pass_options(sg_set_scope=-1)


def restore_keys(layout):
    """Codes [128, bytes] INT8 of learned keys to centroids by coordinate, [width, 128] FP16."""
    x, out = (BLOCK, layout.nbytes(HEAD_DIM)), (layout.width(HEAD_DIM), BLOCK)
    return Step("restored", _restore_codes, layout, (x, "DT_INT8"), (out, "DT_FP16"))


def _restore_codes(codes, out, layout):
    pypto.set_pass_options(sg_set_scope=1)
    restore_centroids(codes, layout, HEAD_DIM, lambda values, row: pypto.assemble(values, [row, 0], out))
    pypto.set_pass_options(sg_set_scope=-1)


def build_store(program, options):
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
