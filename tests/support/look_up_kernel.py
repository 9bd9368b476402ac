"""What restores centroids, and what chooses levels, alone: as PyPTO programs."""

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import restored
from haarkv.tq_ops.npu.kernels.tq4 import book, levels_of, restore
from haarkv.tq_ops.npu.program import HEAD_DIM


def build_levels(program, options):
    rows = program.rows

    @pypto.frontend.jit(**options)
    def levels(x: pypto.Tensor([rows, 128], pypto.DT_FP32), out: pypto.Tensor([rows, 128], pypto.DT_FP32)):
        for _ in pypto.loop(1, name="LEVELS", idx_name="i"):
            pypto.set_vec_tile_shapes(16, 128)
            out[:] = levels_of(x, book(HEAD_DIM).steps)

    return levels


def build_look_up(program, options):
    rows, width = program.rows, program.width

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


def _restored(codes, out, layout):
    pypto.set_pass_options(sg_set_scope=1)
    restored(codes, layout, HEAD_DIM, lambda values, row: pypto.assemble(values, [row, 0], out))
    pypto.set_pass_options(sg_set_scope=-1)


def build_restored(program, options):
    layout = program.layout
    nbytes, width = layout.nbytes(HEAD_DIM), layout.width(HEAD_DIM)

    @pypto.frontend.jit(**options)
    def restored_keys(codes: pypto.Tensor([BLOCK, nbytes], pypto.DT_INT8), out: pypto.Tensor([width, BLOCK], pypto.DT_FP16)):
        for _ in pypto.loop(1, name="RESTORE", idx_name="i"):
            _restored(codes, out, layout)

    return restored_keys
