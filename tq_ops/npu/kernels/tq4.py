"""The format `tq4` on the device: quantize, append to the paged cache, and read codes back as centroids (scope 2a).

The cache is the host's own, byte for byte: codes [blocks * Hkv * 128, 64], which a program sees as INT8 (the same bits;
PyPTO's interpreter reads UINT8 as signed), and FP16 scales [blocks * Hkv, 128], so that one row lies along the logits.
Byte j holds level j in its low half and level j + 64 in its high half.
"""

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.side import RotatedSide
from haarkv.tq_ops.npu.reads import HEAD_DIM, READS
from haarkv.tq_ops.npu.sides import TQ4

HALF = 64
CENTROIDS = READS.built_in(HEAD_DIM).centroids
BOUNDARIES = READS.built_in(HEAD_DIM).boundaries
_LEAST_NORM = 1e-30
_LARGEST_FP16 = 65504.0


class Packed(RotatedSide):
    """One side of a `tq4` cache: codes [blocks * Hkv * 128, 64] INT8, scale [blocks * Hkv, 128] FP16."""

    side = TQ4

    def quantize(self, x, rotation, count):
        return quantize(x, rotation, count)

    def tiles(self, place, shape):
        """Centroids [step, 128] FP16 of each head of the iteration, rotated and without their scale."""
        return [centroids(self.gather(place, head, shape, "packed"), BLOCK) for head in range(shape.heads_at_once)]

    def scales(self, place, shape):
        """[heads_at_once, step] FP16: one copy a block brings those of all heads."""
        out = pypto.tensor([shape.heads_at_once, shape.step_tokens], pypto.DT_FP16, "scales")
        pypto.set_vec_tile_shapes(shape.heads_at_once, BLOCK)
        for index in range(shape.step_tokens // BLOCK):
            tile = place.tile(index, shape)
            pypto.assemble(pypto.view(self.stored_scales, [shape.heads_at_once, BLOCK], [tile, 0]), [0, index * BLOCK], out)
        return out


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
    divisor = pypto.maximum(norm, pypto.full([vectors, 1], _LEAST_NORM, pypto.DT_FP32))
    level = rotated_levels(x / divisor, rotation, vectors)
    scale = norm / pypto.sqrt(pypto.sum(_squared_centroid(level), dim=-1, keepdim=True))
    scale = pypto.minimum(scale, pypto.full([vectors, 1], _LARGEST_FP16, pypto.DT_FP32))
    low = pypto.view(level, [vectors, HALF], [0, 0])
    high = pypto.view(level, [vectors, HALF], [0, HALF])
    pypto.set_vec_tile_shapes(rows, HALF)
    # The byte as a signed number: high levels from 8 on set the sign bit. `where` takes scalars alone: given a view into a
    # wider tile, the device's headers would read it with the width of the result.
    signed = high - pypto.where(pypto.ge(high, 8.0), 16.0, 0.0)
    return pypto.cast(pypto.cast(signed * 16.0 + low, pypto.DT_FP16), pypto.DT_INT8), pypto.cast(scale, pypto.DT_FP16)


def rotated_levels(unit, rotation, vectors):
    """Vectors of norm 1, [vectors, 128] FP32 -> `level = #{b : bf16(unit) @ rotation >= b}`, FP32 too."""
    cube = min(vectors, 128)
    pypto.set_cube_tile_shapes([cube, cube], [HEAD_DIM, HEAD_DIM], [HEAD_DIM, HEAD_DIM])
    rotated = pypto.matmul(pypto.cast(unit, pypto.DT_BF16), rotation, pypto.DT_FP32)
    level = pypto.where(pypto.ge(rotated, BOUNDARIES[0]), 1.0, 0.0)
    for boundary in BOUNDARIES[1:]:
        level = level + pypto.where(pypto.ge(rotated, boundary), 1.0, 0.0)
    return level


def _squared_centroid(level):
    """c[level]**2 in FP32; the book is odd about level 7.5, so |level - 7.5| chooses."""
    distance = pypto.abs(level - 7.5)
    value = pypto.where(pypto.ge(distance, 1.0), CENTROIDS[9] ** 2, CENTROIDS[8] ** 2)
    for step in range(2, 8):
        gain = CENTROIDS[8 + step] ** 2 - CENTROIDS[7 + step] ** 2
        value = value + pypto.where(pypto.ge(distance, float(step)), gain, 0.0)
    return value


def centroids(codes, rows):
    """Codes [n, 64] INT8 -> centroids [n, 128] FP16, still rotated and without their scale; `rows` to a vector tile.

    A byte read as signed, plus 128 with the sign flipped, is 16 h + l of its levels. Rounding (byte - 7.5) / 16 gives h - 8
    (never a tie), from where both levels follow, less 7.5. The book is odd about there: seven selects by the distance, then
    the sign.
    """
    pypto.set_vec_tile_shapes(rows, HALF)
    byte = pypto.cast(codes, pypto.DT_FP16)
    shifted = pypto.where(pypto.ge(byte, 0.0), byte - 135.5, byte + 120.5)
    nibble = pypto.cast(shifted * 0.0625, pypto.DT_INT8, pypto.CastMode.CAST_RINT)
    high = pypto.cast(nibble, pypto.DT_FP16)
    level = pypto.concat([shifted - high * 16.0, high + 0.5], 1)
    pypto.set_vec_tile_shapes(rows, HEAD_DIM)
    distance = pypto.abs(level)
    # Begun from the distance itself, all of which is overwritten: there is no FP16 constant to begin from.
    value = pypto.where(pypto.ge(distance, 1.0), distance, CENTROIDS[8])
    for step in range(1, 8):
        value = pypto.where(pypto.ge(distance, float(step)), CENTROIDS[8 + step], value)
    return pypto.where(pypto.ge(level, 0.0), value, value * -1.0)
