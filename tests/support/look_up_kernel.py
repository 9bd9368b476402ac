"""The look-up of nibbles alone, as a PyPTO program."""

import pypto

from haarkv.tq_ops.npu.kernels.tq4 import centroids, levels_of


def build(program, options):
    rows, width, tile = program.rows, program.width, program.tile

    @pypto.frontend.jit(**options)
    def look_up(codes: pypto.Tensor([rows, width // 2], pypto.DT_INT8), out: pypto.Tensor([rows, width], pypto.DT_FP16)):
        for _ in pypto.loop(1, name="LOOK_UP", idx_name="i"):
            out[:] = centroids(codes, tile, width)

    return look_up


def build_levels(program, options):
    rows = program.rows

    @pypto.frontend.jit(**options)
    def levels(x: pypto.Tensor([rows, 128], pypto.DT_FP32), out: pypto.Tensor([rows, 128], pypto.DT_FP32)):
        for _ in pypto.loop(1, name="LEVELS", idx_name="i"):
            pypto.set_vec_tile_shapes(16, 128)
            out[:] = levels_of(x)

    return levels
