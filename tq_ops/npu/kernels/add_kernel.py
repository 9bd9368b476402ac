"""The sum of two tensors as one PyPTO program: the smallest that loads, computes and stores."""

from typing import Any

import pypto


def build(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of an `AddProgram`: tiles of `shape.rows` rows."""
    rows, width = shape.rows, shape.width

    @pypto.frontend.jit(**options)
    def add(
        x: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_FP32),
        y: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_FP32),
        out: pypto.Tensor([pypto.DYNAMIC, width], pypto.DT_FP32),
    ):
        for tile in pypto.loop(x.shape[0] // rows, name="TILE", idx_name="tile"):
            pypto.set_vec_tile_shapes(rows, width)
            begin = [tile * rows, 0]
            pypto.assemble(pypto.view(x, [rows, width], begin) + pypto.view(y, [rows, width], begin), begin, out)

    return add
