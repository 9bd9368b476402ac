"""The format `tq4_seed` on the device: the published layout, one byte a level and an FP32 norm a vector.

A program sees a level's byte as INT8: it is 0 to 15, so that the sign says nothing.
"""

import pypto

from haarkv.tq_ops.formats import SEED_EPS
from haarkv.tq_ops.npu.kernels.side import RotatedSide
from haarkv.tq_ops.npu.kernels.tq4 import book, rotated_levels, vectors_per_tile

_TILE = 64 * 128  # numbers of a vector tile of FP32


class SeedBytes(RotatedSide):
    """One side of a `tq4_seed` cache: codes [blocks * Hkv * 128, D] INT8, norms [blocks * Hkv * 128, 1] FP32.

    The tiles carry their scale, as published, and stay in the rotated domain, which is not: the published kernels rotate
    every tile back.
    """

    def quantize(self, x, count):
        """As `tq_ops.formats.turboquant.TurboQuant4Seed`.

        Args:
            x: [count, D] FP32.
        Returns:
            codes [count, D] INT8 and norm [count, 1] FP32.
        Rounding points: x / norm to BF16.
        """
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
            norm = self.gather_scales(place, head, shape, "norm")
            value = _centroids(codes, book(self.head_dim).centroids)
            scale = pypto.rsqrt(pypto.sum(value * value, dim=-1, keepdim=True) + SEED_EPS) * norm
            rounded = pypto.cast(value * scale, pypto.DT_BF16)
            out.append(pypto.cast(pypto.cast(rounded, pypto.DT_FP32), pypto.DT_FP16))
        return out


def _centroids(codes, centroids):
    """Codes [n, D] INT8 -> centroids [n, D] FP32. The book is odd about 7.5: selects by the distance, then the sign."""
    level = pypto.cast(pypto.cast(codes, pypto.DT_FP16), pypto.DT_FP32) - 7.5
    distance = pypto.abs(level)
    value = pypto.where(pypto.ge(distance, 1.0), centroids[9], centroids[8])
    for step in range(2, 8):
        value = pypto.where(pypto.ge(distance, float(step)), centroids[8 + step], value)
    return pypto.where(pypto.ge(level, 0.0), value, value * -1.0)
