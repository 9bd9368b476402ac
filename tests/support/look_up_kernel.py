"""What restores centroids, and what chooses levels, alone: as PyPTO programs."""

from dataclasses import dataclass

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import restore_centroids
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
