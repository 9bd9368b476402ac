"""The product of two matrices as one PyPTO program: the smallest that needs a cube core."""

from typing import Any

import pypto


def build(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of a `ProductProgram`."""
    rows, inner, columns = shape.rows, shape.inner, shape.columns

    @pypto.frontend.jit(**options)
    def product(
        x: pypto.Tensor([rows, inner], pypto.DT_FP16),
        y: pypto.Tensor([columns, inner], pypto.DT_FP16),
        out: pypto.Tensor([rows, columns], pypto.DT_FP32),
    ):
        for _ in pypto.loop(1, name="PRODUCT", idx_name="i"):
            pypto.set_cube_tile_shapes([64, 64], [64, 256], [128, 128])
            summed = pypto.matmul(x, y, pypto.DT_FP32, b_trans=True)
            pypto.set_vec_tile_shapes(64, 128)
            pypto.assemble(pypto.clone(summed), [0, 0], out)

    return product
