"""The look-up of `tq4` alone, as a PyPTO program."""

import pypto

from haarkv.tq_ops.npu.kernels.tq4 import BLOCK, HALF, HEAD_DIM, centroids


def build(rows, options):
    @pypto.frontend.jit(**options)
    def look_up(codes: pypto.Tensor([rows, HALF], pypto.DT_INT8), out: pypto.Tensor([rows, HEAD_DIM], pypto.DT_FP16)):
        for _ in pypto.loop(1, name="LOOK_UP", idx_name="i"):
            out[:] = centroids(codes, BLOCK)

    return look_up
