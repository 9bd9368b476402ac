"""What restores centroids, chooses levels, or stores K and V, alone: as PyPTO programs."""

from dataclasses import dataclass

import pypto

from haarkv.models.qwen3_14b.npu.layer_kernel import parameter, side_kernel
from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import restore_centroids
from haarkv.tq_ops.npu.kernels.side import Domain
from haarkv.tq_ops.npu.kernels.tq4 import book, count_levels, restore
from haarkv.tq_ops.npu.learned import Layout
from haarkv.tq_ops.npu.program import HEAD_DIM, Argument


@dataclass(frozen=True)
class Levels:
    """Numbers [rows, 128] FP32 to their levels, FP32."""

    rows: int = 16
    name: str = "levels"
    arguments: tuple = (Argument("x"), Argument("out", output=True))

    def build(self, **options):
        rows = self.rows

        @pypto.frontend.jit(**options)
        def levels(x: pypto.Tensor([rows, 128], pypto.DT_FP32), out: pypto.Tensor([rows, 128], pypto.DT_FP32)):
            for _ in pypto.loop(1, name="LEVELS", idx_name="i"):
                pypto.set_vec_tile_shapes(16, 128)
                out[:] = count_levels(x, book(HEAD_DIM).steps)

        return levels


@dataclass(frozen=True)
class LookUp:
    """Codes of `tq4`, [rows, width / 2] INT8, to the centroids they stand for, [rows, width] FP16."""

    rows: int
    width: int = HEAD_DIM
    name: str = "look_up"
    arguments: tuple = (Argument("codes"), Argument("out", output=True))

    def build(self, **options):
        rows, width = self.rows, self.width

        @pypto.frontend.jit(**options)
        def look_up(codes: pypto.Tensor([rows, width // 2], pypto.DT_INT8), out: pypto.Tensor([rows, width], pypto.DT_FP16)):
            for _ in pypto.loop(1, name="LOOK_UP", idx_name="i"):
                _look_up(codes, out, rows, width)

        return look_up


def _look_up(codes, out, rows, width):
    pypto.set_pass_options(sg_set_scope=1)
    blocks = [pypto.view(codes, [BLOCK, width // 2], [row, 0]) for row in range(0, rows, BLOCK)]
    restore(blocks, lambda values, column: pypto.assemble(values, [0, column], out))
    pypto.set_pass_options(sg_set_scope=-1)


@dataclass(frozen=True)
class RestoreProgram:
    """Codes [128, bytes] INT8 of learned keys to centroids by coordinate, [width, 128] FP16."""

    layout: Layout
    name: str = "restored"
    arguments: tuple = (Argument("codes"), Argument("out", output=True))

    def build(self, **options):
        layout = self.layout
        nbytes, width = layout.nbytes(HEAD_DIM), layout.width(HEAD_DIM)

        @pypto.frontend.jit(**options)
        def keys(codes: pypto.Tensor([BLOCK, nbytes], pypto.DT_INT8), out: pypto.Tensor([width, BLOCK], pypto.DT_FP16)):
            for _ in pypto.loop(1, name="RESTORE", idx_name="i"):
                _restore_codes(codes, out, layout)

        return keys


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
