"""The formats `tq4` and `tq4_seed` on the device: quantize, and restore centroids (scope 2a).

`tq4`: codes [blocks * Hkv * 128, D/2], seen as INT8 (PyPTO's interpreter reads UINT8 as signed), byte j holding level j in its
low half and level j + D/2 in its high half; FP16 scales [blocks * Hkv, 128], one row along the logits. `tq4_seed`: a byte a
level, 0 to 15, and an FP32 norm a vector.
"""

from functools import cache
from typing import NamedTuple

import pypto
import torch

from haarkv.tq_ops.formats import SEED_EPS
from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.side import RotatedSide, ScaledSide
from haarkv.tq_ops.npu.program import square_tile
from haarkv.tq_ops.npu.sides import READS

LEAST_NORM = 1e-30
LARGEST_FP16 = 65504.0
STEEP = 2.0**100
LINE = 128  # FP16 numbers that the vector core takes at once
# Beyond 16,384 FP16 counts in sixteens.
_SIXTEENS = 24576.0
# With x = _STEP * distance, rounded to FP16 like every step, x**9 + a x**7 + b x**5 + c x**3 + d x is the FP16 of each of the
# 16 centroids of a head_dim of 128. Found by trial; tests/tq_ops/npu/test_npu_kernels.py tries every byte.
_STEP = 0.09613037109375
_FITTED_HEAD_DIM = 128
_POLYNOMIAL = (-0.50732421875, 0.1917724609375, 0.08740234375, 0.2359619140625)


class Book(NamedTuple):
    """The tables of a head_dim: 16 centroids, and 15 boundaries as `STEEP` times the FP32 number before each."""

    centroids: list[float]
    steps: list[float]


@cache
def book(head_dim):
    """The `Book` of a head_dim."""
    description = READS.built_in(head_dim)
    below = torch.tensor(description.boundaries).nextafter(torch.tensor(-torch.inf))
    return Book(list(description.centroids), [STEEP * number for number in below.tolist()])


def vectors_per_tile(count, head_dim):
    """Vectors of one FP32 tile, `count` at most."""
    return min(count, 32 * 128 // max(head_dim, 128))


class Packed(RotatedSide, ScaledSide):
    """One side of a `tq4` cache: codes [blocks * Hkv * 128, D/2] INT8, scale [blocks * Hkv, 128] FP16."""

    def quantize(self, x, count):
        return quantize(x, self.domain.rotation, count, self.head_dim)

    def tiles(self, place, shape, scope):
        """Rotated centroids [step, D] FP16 of each head of the iteration, without scale, as large as those of head_dim 128."""
        return [self._tile(place, head, shape, scope + head * shape.blocks) for head in range(shape.heads_at_once)]

    def _tile(self, place, head, shape, scope):
        half, at_once = self.side.vectors.width, min(blocks_at_once(self.head_dim), shape.blocks)
        out = pypto.tensor([shape.step_tokens, self.head_dim], pypto.DT_FP16, f"centroids{scope}")
        for first in range(0, shape.blocks, at_once):
            rows = [(place.tile(first + index, shape) + head) * BLOCK for index in range(at_once)]
            # One task: cut where tiles are joined, they would go through memory.
            pypto.set_pass_options(sg_set_scope=scope + first)

            def put(values, column, at=first):
                pypto.assemble(values, [at * BLOCK, column], out)

            restore([pypto.view(self.stored_vectors, [BLOCK, half], [row, 0]) for row in rows], put)
            pypto.set_pass_options(sg_set_scope=-1)
        return out

    def scale_row(self, scales, place, head, shape, factor):
        # Books differ by 1/sqrt(D) alone.
        return super().scale_row(scales, place, head, shape, factor * (_FITTED_HEAD_DIM / self.head_dim) ** 0.5)


def quantize(x, rotation, vectors, head_dim):
    """x [vectors, D] FP32, rotated by [D, D] BF16 -> codes [vectors, D/2] INT8 and scale [vectors, 1] FP16, as
    `tq_ops.formats.rotated`.

    Rounding points: x / norm to BF16; scale to FP16. A vector of zeros gets scale 0.
    """
    rows, tables = vectors_per_tile(vectors, head_dim), book(head_dim)
    pypto.set_vec_tile_shapes(rows, head_dim)
    norm = pypto.sqrt(pypto.sum(x * x, dim=-1, keepdim=True))
    divisor = pypto.maximum(norm, pypto.full([vectors, 1], LEAST_NORM, pypto.DT_FP32))
    level = rotated_levels(x / divisor, rotation, vectors, head_dim)
    scale = norm / pypto.sqrt(pypto.sum(_squared_centroid(level, tables.centroids), dim=-1, keepdim=True))
    scale = pypto.minimum(scale, pypto.full([vectors, 1], LARGEST_FP16, pypto.DT_FP32))
    half = head_dim // 2
    low = pypto.view(level, [vectors, half], [0, 0])
    high = pypto.view(level, [vectors, half], [0, half])
    pypto.set_vec_tile_shapes(rows, half)
    # The byte as a signed number: high levels from 8 on set the sign bit. `where` takes scalars alone: given a view into a
    # wider tile, the device's headers would read it with the width of the result.
    signed_high = high - pypto.where(pypto.ge(high, 8.0), 16.0, 0.0)
    return pypto.cast(pypto.cast(signed_high * 16.0 + low, pypto.DT_FP16), pypto.DT_INT8), pypto.cast(scale, pypto.DT_FP16)


def rotated_levels(unit, rotation, vectors, head_dim):
    """Vectors of norm 1, [vectors, D] FP32 -> `level = #{b : bf16(unit) @ rotation >= b}`, FP32 too."""
    cube = min(vectors, 128)
    pypto.set_cube_tile_shapes([cube, cube], square_tile(head_dim), square_tile(head_dim))
    return count_levels(pypto.matmul(pypto.cast(unit, pypto.DT_BF16), rotation, pypto.DT_FP32), book(head_dim).steps)


def count_levels(x, steps):
    """`#{b : x >= b}`, FP32, by arithmetic, as a select costs the device a dozen instructions a row.

    x less the number before a boundary, times `STEEP`, is 1 or more from the boundary on, and 0 or less below it.
    """
    steep = x * STEEP
    level = pypto.clip(steep - steps[0], 0.0, 1.0)
    for step in steps[1:]:
        level = level + pypto.clip(steep - step, 0.0, 1.0)
    return level


def _squared_centroid(level, centroids):
    """c[level]**2, FP32. The book is odd about level 7.5, so |level - 7.5| chooses."""
    distance = pypto.abs(level - 7.5)
    first = centroids[9] ** 2 - centroids[8] ** 2
    value = pypto.clip(distance - 0.5, 0.0, 1.0) * first + centroids[8] ** 2
    for step in range(2, 8):
        gain = centroids[8 + step] ** 2 - centroids[7 + step] ** 2
        value = value + pypto.clip(distance - (step - 0.5), 0.0, 1.0) * gain
    return value


def blocks_at_once(head_dim):
    """Blocks that are restored together: one half of their levels, in FP16, fills a tile of 128 x 128."""
    return max(1, 2 * LINE // head_dim)


def restore(blocks, put):
    """Codes of n blocks, each [128, D/2] INT8 -> rotated centroids [128 n, D] FP16, without their scale, on whole lines.

    `put(values, column)` takes each half and its first column. A byte read as signed is 16 h + l, h the upper level, less 16
    if it is 8 or more. Adding 24,576, where FP16 counts in sixteens, rounds byte - 7.5 to 16 h (never a tie); 16 h + 8 clipped
    to -8 … 8 says which h were shifted. Both end as a distance from 7.5.
    """
    tokens, half = blocks[0].shape
    lines = tokens * half // LINE
    values = []
    for codes in blocks:
        pypto.set_vec_tile_shapes(tokens, half)
        packed = codes if half == LINE else pypto.reshape(codes, [lines, LINE])
        pypto.set_vec_tile_shapes(lines, LINE)
        values.append(pypto.cast(packed, pypto.DT_FP16))
    count = len(blocks)
    pypto.set_vec_tile_shapes(count * lines, LINE)
    byte = (pypto.concat(values, 0) if count > 1 else values[0]) - 7.5
    upper = (byte + _SIXTEENS) - _SIXTEENS
    offset_upper = upper + 8.0
    side = pypto.clip(offset_upper, -8.0, 8.0)
    for column, distance in ((0, byte - upper), (half, offset_upper * 0.0625 - side)):
        pypto.set_vec_tile_shapes(count * lines, LINE)
        centroid = _centroid(distance)
        whole = centroid if half == LINE else pypto.reshape(centroid, [count * tokens, half])
        pypto.set_vec_tile_shapes(count * tokens, half)
        put(whole, column)


def _centroid(distance):
    """The FP16 centroid of a level at this distance from 7.5."""
    x = distance * _STEP
    square = x * x
    value = square + _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        value = value * square + coefficient
    return value * x


_TILE = 64 * 128  # numbers of a vector tile of FP32


class SeedBytes(RotatedSide):
    """One side of a `tq4_seed` cache: codes [blocks * Hkv * 128, D] INT8, norms [blocks * Hkv * 128, 1] FP32.

    Tiles carry their scale, as published, and stay rotated; the published kernels rotate every tile back.
    """

    def quantize(self, x, count):
        """As `tq_ops.formats.rotated.TurboQuant4Seed`: x / norm is rounded to BF16."""
        pypto.set_vec_tile_shapes(vectors_per_tile(count, self.head_dim), self.head_dim)
        norm = pypto.sqrt(pypto.sum(x * x, dim=-1, keepdim=True) + SEED_EPS)
        level = rotated_levels(x / norm, self.domain.rotation, count, self.head_dim)
        return [pypto.cast(pypto.cast(level, pypto.DT_FP16), pypto.DT_INT8), pypto.clone(norm)]

    def tiles(self, place, shape, scope):
        """[step, D] FP16 of each head: `bf16(c[level] * rsqrt(sum(c[level]**2) + 1e-6) * norm)`, rotated."""
        out = []
        for head in range(shape.heads_at_once):
            codes = self.gather(place, head, shape, "codes")
            pypto.set_vec_tile_shapes(_TILE // self.head_dim, self.head_dim)
            norm = self.gather(place, head, shape, "norm", scales=True)
            value = _centroids(codes, book(self.head_dim).centroids)
            scale = pypto.rsqrt(pypto.sum(value * value, dim=-1, keepdim=True) + SEED_EPS) * norm
            bf16_values = pypto.cast(value * scale, pypto.DT_BF16)
            out.append(pypto.cast(pypto.cast(bf16_values, pypto.DT_FP32), pypto.DT_FP16))
        return out


def _centroids(codes, centroids):
    """Codes [n, D] INT8 -> centroids [n, D] FP32, selected by the distance from 7.5, then the sign."""
    level = pypto.cast(pypto.cast(codes, pypto.DT_FP16), pypto.DT_FP32) - 7.5
    distance = pypto.abs(level)
    value = pypto.where(pypto.ge(distance, 1.0), centroids[9], centroids[8])
    for step in range(2, 8):
        value = pypto.where(pypto.ge(distance, float(step)), centroids[8 + step], value)
    return pypto.where(pypto.ge(level, 0.0), value, value * -1.0)
