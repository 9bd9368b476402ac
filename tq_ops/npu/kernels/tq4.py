"""The format `tq4` on the device: quantize, append to the paged cache, and read codes back as centroids (scope 2a).

The cache is the host's own, byte for byte: codes [blocks * Hkv * 128, 64], which a program sees as INT8 (the same bits;
PyPTO's interpreter reads UINT8 as signed), and FP16 scales [blocks * Hkv, 128], so that one row lies along the logits.
Byte j holds level j in its low half and level j + 64 in its high half.
"""

import pypto
import torch

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.side import RotatedSide, ScaledSide
from haarkv.tq_ops.npu.reads import HEAD_DIM, READS

CENTROIDS = READS.built_in(HEAD_DIM).centroids
BOUNDARIES = READS.built_in(HEAD_DIM).boundaries
LEAST_NORM = 1e-30
LARGEST_FP16 = 65504.0
STEEP = 2.0**100
STEPS = tuple(STEEP * below for below in torch.tensor(BOUNDARIES).nextafter(torch.tensor(-torch.inf)).tolist())
# Beyond 16,384 FP16 counts in sixteens.
_SIXTEENS = 24576.0
# With x = _STEP * distance, rounded to FP16 like every step, x**9 + a x**7 + b x**5 + c x**3 + d x is the FP16 of each of the
# 16 centroids. Found by trial; tests/tq_ops/npu/test_npu_look_up.py tries every byte.
_STEP = 0.09613037109375
_POLYNOMIAL = (-0.50732421875, 0.1917724609375, 0.08740234375, 0.2359619140625)


class Packed(RotatedSide, ScaledSide):
    """One side of a `tq4` cache: codes [blocks * Hkv * 128, 64] INT8, scale [blocks * Hkv, 128] FP16."""

    def quantize(self, x, count):
        return quantize(x, self.domain.rotation, count)

    def tiles(self, place, shape):
        """Centroids [step, 128] FP16 of each head of the iteration, rotated and without their scale."""
        heads = range(shape.heads_at_once)
        return [centroids(self.gather(place, head, shape, "packed"), BLOCK, HEAD_DIM) for head in heads]


def quantize(x, rotation, vectors):
    """Rotate vectors and pick levels, the renormalisation folded into the scale, as `tq_ops.formats.rotated` does.

    Args:
        x: [vectors, 128] FP32.
        rotation: [128, 128] BF16.
    Returns:
        codes [vectors, 64] INT8 and scale [vectors, 1] FP16.
    Rounding points: x / norm to BF16; scale to FP16. A vector of zeros gets scale 0.
    """
    rows = min(vectors, 32)
    pypto.set_vec_tile_shapes(rows, HEAD_DIM)
    norm = pypto.sqrt(pypto.sum(x * x, dim=-1, keepdim=True))
    divisor = pypto.maximum(norm, pypto.full([vectors, 1], LEAST_NORM, pypto.DT_FP32))
    level = rotated_levels(x / divisor, rotation, vectors)
    scale = norm / pypto.sqrt(pypto.sum(_squared_centroid(level), dim=-1, keepdim=True))
    scale = pypto.minimum(scale, pypto.full([vectors, 1], LARGEST_FP16, pypto.DT_FP32))
    half = HEAD_DIM // 2
    low = pypto.view(level, [vectors, half], [0, 0])
    high = pypto.view(level, [vectors, half], [0, half])
    pypto.set_vec_tile_shapes(rows, half)
    # The byte as a signed number: high levels from 8 on set the sign bit. `where` takes scalars alone: given a view into a
    # wider tile, the device's headers would read it with the width of the result.
    signed = high - pypto.where(pypto.ge(high, 8.0), 16.0, 0.0)
    return pypto.cast(pypto.cast(signed * 16.0 + low, pypto.DT_FP16), pypto.DT_INT8), pypto.cast(scale, pypto.DT_FP16)


def rotated_levels(unit, rotation, vectors):
    """Vectors of norm 1, [vectors, 128] FP32 -> `level = #{b : bf16(unit) @ rotation >= b}`, FP32 too."""
    cube = min(vectors, 128)
    pypto.set_cube_tile_shapes([cube, cube], [HEAD_DIM, HEAD_DIM], [HEAD_DIM, HEAD_DIM])
    return levels_of(pypto.matmul(pypto.cast(unit, pypto.DT_BF16), rotation, pypto.DT_FP32))


def levels_of(x):
    """`#{b : x >= b}`, FP32. Arithmetic, for a select costs the device a dozen instructions a row.

    The difference from the number before a boundary, times `STEEP`, is 1 or more from the boundary on, and 0 or less below it.
    """
    steep = x * STEEP
    level = pypto.clip(steep - STEPS[0], 0.0, 1.0)
    for step in STEPS[1:]:
        level = level + pypto.clip(steep - step, 0.0, 1.0)
    return level


def _squared_centroid(level):
    """c[level]**2 in FP32; the book is odd about level 7.5, so |level - 7.5| chooses."""
    distance = pypto.abs(level - 7.5)
    first = CENTROIDS[9] ** 2 - CENTROIDS[8] ** 2
    value = pypto.clip(distance - 0.5, 0.0, 1.0) * first + CENTROIDS[8] ** 2
    for step in range(2, 8):
        gain = CENTROIDS[8 + step] ** 2 - CENTROIDS[7 + step] ** 2
        value = value + pypto.clip(distance - (step - 0.5), 0.0, 1.0) * gain
    return value


def centroids(codes, rows, width):
    """Codes [n, width / 2] INT8 -> centroids [n, width] FP16, rotated and without their scale; `rows` to a vector tile.

    Arithmetic alone, because a select costs the device a dozen instructions a row. A byte read as signed is 16 h + l, where h
    is the upper level, less 16 if it is 8 or more. Adding 24,576, where FP16 counts in sixteens, rounds byte - 7.5 to 16 h
    (never a tie). 16 h + 8 clipped to -8 … 8 then says which h were shifted. Both levels end as a distance from 7.5.
    """
    pypto.set_vec_tile_shapes(rows, width // 2)
    byte = pypto.cast(codes, pypto.DT_FP16) - 7.5
    upper = (byte + _SIXTEENS) - _SIXTEENS
    shifted = upper + 8.0
    side = pypto.clip(shifted, -8.0, 8.0)
    distance = pypto.concat([byte - upper, shifted * 0.0625 - side], 1)
    pypto.set_vec_tile_shapes(rows, width)
    x = distance * _STEP
    square = x * x
    value = square + _POLYNOMIAL[0]
    for coefficient in _POLYNOMIAL[1:]:
        value = value * square + coefficient
    return value * x
