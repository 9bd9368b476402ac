"""Codes of `tq4` to centroids as one PyPTO program, without attention around it: what every number that is read depends on."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.tq4 import restore


def build(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of a `LookUpProgram`: all blocks at once."""
    rows, width = shape.rows, shape.width

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
