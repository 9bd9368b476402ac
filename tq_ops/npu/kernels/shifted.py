"""Learned keys by stretches on the device: K is turned back before it is quantized, and queries for each stretch they read.

A stretch is 1,024 positions. Its keys are stored as RoPE would have turned them had it come first, and R(-s) turns a query
back by the stretch's first position s:  logit = (R(-s) q) · stored,  stored = scale * centroids @ back + mean.
"""

from dataclasses import replace

import pypto

from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.learned import VECTORS, LearnedKeys, fitting
from haarkv.tq_ops.npu.learned import MEAN


class ShiftedKeys(LearnedKeys):
    """`LearnedKeys` of stretches. Queries stay as they are until a step of keys says by how much they are turned."""

    query_dtype = pypto.DT_BF16

    @property
    def query_width(self):
        return self.head_dim

    def as_stored(self, x, cos_sin, tokens):
        """In FP32, as the reference turns them: the same bytes follow."""
        return undo_shift(x, cos_sin, 0, tokens, fitting(tokens, VECTORS))

    def room_for_queries(self, q, rows, heads):
        return q

    def ready(self, q, rows, shape, out):
        """Nothing: see `scores`."""

    def left_out(self, queries, head, kv_heads):
        """Nothing: what queries make of the mean is another number in each stretch, so `scores` have it."""
        return

    def scores(self, queries, tile, scales, place, head, shape):
        """Logits of a step; one longer than a stretch holds whole ones, whose queries go through the cube together.

        Args:
            queries: [M, D] BF16 in the model's own domain.
        Rounding points: queries by rows to FP16, as those of `LearnedKeys`.
        """
        parts = max(1, shape.step_tokens // STRETCH)
        part_shape = replace(shape, step_tokens=shape.step_tokens // parts)
        stretch_queries, mean_logits = self._shifted_queries(queries, parts, place, head, shape)
        rows, width, tokens = shape.queries, self.side.width, part_shape.step_tokens
        logits = []
        for part in range(parts):
            part_queries = pypto.view(stretch_queries, [rows, width], [part * rows, 0])
            keys = pypto.view(tile, [width, tokens], [0, part * tokens])
            part_scales = pypto.view(scales, [shape.heads_at_once, tokens], [0, part * tokens])
            logits.append(super().scores(part_queries, keys, part_scales, place, head, part_shape) + mean_logits[part])
        pypto.set_vec_tile_shapes(16, shape.step_tokens)
        return pypto.concat(logits, 1) if parts > 1 else logits[0]

    def _shifted_queries(self, queries, parts, place, head, shape):
        """Queries [parts * M, width] FP16 as the cube takes them beside each stretch of a step, and the mean's logits."""
        rows, kv_head, head_dim = shape.queries, place.head + head, self.head_dim
        first = place.block // (STRETCH // BLOCK)
        stretch_queries = pypto.tensor([parts * rows, head_dim], pypto.DT_FP32, f"turned{head}")
        mean = pypto.view(self.domain.numbers, [1, head_dim], [MEAN * shape.num_kv_heads + kv_head, 0])
        pypto.set_vec_tile_shapes(16, head_dim)
        plain = pypto.cast(queries, pypto.DT_FP32)
        mean_logits = []
        for part in range(parts):
            part_queries = undo_shift(plain, self.domain.turns, first + part, 1, 16)
            mean_logits.append(pypto.sum(part_queries * mean, dim=-1, keepdim=True) * shape.softmax_scale)
            pypto.assemble(part_queries, [part * rows, 0], stretch_queries)
        products = self.products(stretch_queries, kv_head, 16)
        pypto.set_vec_tile_shapes(16, self.side.width)
        return pypto.cast(products, pypto.DT_FP16), mean_logits


def undo_shift(x, table, row, count, tile):
    """x [n, D] FP32 turned back by angles in rows of a table [.., D] FP32, cos and then sin.

    Args:
        row: the first.
        count: one for all, or one for each of x.
        tile: vectors of a tile.
    """
    head_dim = x.shape[1]
    half = head_dim // 2
    pypto.set_vec_tile_shapes(tile, half)
    low, high = (pypto.view(x, [x.shape[0], half], [0, at]) for at in (0, half))
    cos, sin = (pypto.view(table, [count, half], [row, at]) for at in (0, half))
    halves = [low * cos + high * sin, high * cos - low * sin]
    pypto.set_vec_tile_shapes(tile, head_dim)
    return pypto.concat(halves, 1)
