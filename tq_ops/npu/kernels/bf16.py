"""The format `bf16` on the device: vectors as they are, the full-precision baseline."""

import pypto

from haarkv.tq_ops.npu.kernels.side import CacheSide


class Plain(CacheSide):
    """One side of a `bf16` cache: values [blocks * Hkv * 128, D] BF16, no scales, nothing rotated."""

    def quantize(self, x, count):
        """x [count, D] FP32 -> BF16."""
        pypto.set_vec_tile_shapes(min(count, 32), self.head_dim)
        return [pypto.cast(x, pypto.DT_BF16)]

    def tiles(self, place, shape, scope):
        return [self.gather(place, head, shape, "tile") for head in range(shape.heads_at_once)]
