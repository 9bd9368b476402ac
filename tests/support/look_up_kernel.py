"""What restores centroids of learned keys, and what chooses levels, alone: as PyPTO programs."""

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import restored
from haarkv.tq_ops.npu.kernels.tq4 import book, levels_of
from haarkv.tq_ops.npu.reads import HEAD_DIM


def build_levels(program, options):
    rows = program.rows

    @pypto.frontend.jit(**options)
    def levels(x: pypto.Tensor([rows, 128], pypto.DT_FP32), out: pypto.Tensor([rows, 128], pypto.DT_FP32)):
        for _ in pypto.loop(1, name="LEVELS", idx_name="i"):
            pypto.set_vec_tile_shapes(16, 128)
            out[:] = levels_of(x, book(HEAD_DIM).steps)

    return levels


def _restore(codes, out, layout):
    pypto.set_pass_options(sg_set_scope=1)
    restored(codes, layout, HEAD_DIM, lambda values, row: pypto.assemble(values, [row, 0], out))
    pypto.set_pass_options(sg_set_scope=-1)


def build_restored(program, options):
    layout = program.layout
    nbytes, width = layout.nbytes(HEAD_DIM), layout.width(HEAD_DIM)

    @pypto.frontend.jit(**options)
    def restore(codes: pypto.Tensor([BLOCK, nbytes], pypto.DT_INT8), out: pypto.Tensor([width, BLOCK], pypto.DT_FP16)):
        for _ in pypto.loop(1, name="RESTORE", idx_name="i"):
            _restore(codes, out, layout)

    return restore
