"""Learned nibbles on the device: quantize stage by stage, and attend by each KV head's own coordinates.

The table of 16 levels is that of `tq4`, and so is the way nibbles lie in bytes: byte j holds nibble j in its low half and
nibble j + N/2 in its high half. What differs by head and layer comes as data, see `tq_ops.npu.learned`.
"""

import pypto

from haarkv.codebooks.learned import refinements
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.npu.kernels.attention import BLOCK, HEAD_DIM
from haarkv.tq_ops.npu.kernels.side import ScaledSide
from haarkv.tq_ops.npu.kernels.tq4 import BOUNDARIES, CENTROIDS, LARGEST_FP16, LEAST_NORM, STEEP, centroids, levels_of
from haarkv.tq_ops.npu.learned import LIFT, MEAN, OWNED, SHARES, TRIES, WEIGHTS

_VECTORS = 8  # of a vector tile of FP32
_ALL_TRIES = TRIES * HEAD_DIM
_TILE = BLOCK * 128  # numbers of a vector tile of centroids


class LearnedNibbles(ScaledSide):
    """One side of a cache of N learned nibbles: codes [blocks * Hkv * 128, N / 2] INT8, scale [blocks * Hkv, 128] FP16."""

    # -- Storing -------------------------------------------------------------------------------------------------------
    def store(self, x, tokens, kv_heads, new):
        """Head by head: each has its own coordinates, and its vectors are rows of one matrix."""
        # Tiles are not merged into one task: they are few and long, and run side by side.
        pypto.set_pass_options(vec_nbuffer_setting={-1: 1})
        flat = pypto.reshape(x, [tokens, kv_heads * HEAD_DIM])
        whole = self.room(tokens * kv_heads, "whole")
        for head in range(kv_heads):
            own = pypto.view(flat, [tokens, HEAD_DIM], [0, head * HEAD_DIM])
            for field, values in zip(whole, self._quantize(own, head, tokens, kv_heads), strict=True):
                pypto.assemble(values, [head * tokens, 0], field)
        for field, values in zip(new, whole, strict=True):
            field[:] = values

    def row_of(self, token, head, tokens, kv_heads):
        """The tokens of a head one after the other."""
        return head * tokens + token

    def _quantize(self, x, head, tokens, kv_heads):
        """One head as `tq_ops.formats.learned.LearnedFormat`.

        Args:
            x: [tokens, 128] FP32.
        Returns:
            codes [tokens, N / 2] INT8 and scale [tokens, 1] FP16.
        Rounding points: (x - mean) / length to BF16; scale to FP16. The centroid of level 7 is
            off by 1e-9, as a sum of the gaps below it.
        """
        rows = _fitting(tokens, _VECTORS)

        def numbers(kind, width=HEAD_DIM):
            return pypto.view(self.domain.numbers, [1, width], [kind * kv_heads + head, 0])

        pypto.set_vec_tile_shapes(rows, HEAD_DIM)
        shifted = x - numbers(MEAN)
        gamma = _length(shifted * shifted)
        unit = pypto.cast(shifted / _at_least(gamma, LEAST_NORM, tokens), pypto.DT_BF16)
        pypto.set_cube_tile_shapes([min(tokens, 128)] * 2, [HEAD_DIM, HEAD_DIM], [HEAD_DIM, HEAD_DIM])
        forward = pypto.view(self.domain.forward, [HEAD_DIM, HEAD_DIM], [head * HEAD_DIM, 0])
        y = pypto.matmul(unit, forward, pypto.DT_FP32)
        # One task from here to the levels: cut elsewhere, each half step would go through memory.
        pypto.set_pass_options(sg_set_scope=head + 1)
        squares = y * y
        gamma = gamma * _length(squares * numbers(WEIGHTS))
        y = y / _at_least(_length(squares * numbers(SHARES)), LEAST_NORM, tokens)
        pypto.set_vec_tile_shapes(rows, _ALL_TRIES)
        left = pypto.concat([y if gain == 1.0 else y * gain for gain in GAINS], 1)
        levels, restored = self._choose(left, lambda stage: numbers(OWNED + stage, _ALL_TRIES))
        weighted = restored * numbers(WEIGHTS, _ALL_TRIES)
        pypto.set_vec_tile_shapes(rows, HEAD_DIM)
        level, kept = _nearest(levels, restored, weighted, y, tokens)
        nibbles = pypto.tensor([tokens, self.side.stages * HEAD_DIM], pypto.DT_FP16, f"nibbles{head}")
        for stage, values in enumerate(level):
            pypto.assemble(pypto.cast(values, pypto.DT_FP16), [0, stage * HEAD_DIM], nibbles)
        scale = pypto.minimum(gamma / pypto.sqrt(kept), pypto.full([tokens, 1], LARGEST_FP16, pypto.DT_FP32))
        scale = pypto.cast(scale, pypto.DT_FP16)
        pypto.set_pass_options(sg_set_scope=-1)
        return self._bytes(nibbles, head, tokens), scale

    def _choose(self, left, owned):
        """Levels of coordinates [tokens, tries * 128], FP32, for each stage, and what they restore."""
        levels, restored = [], None
        for stage, step in enumerate(refinements()[: self.side.stages]):
            level = levels_of(left / step if stage else left)
            levels.append(level)
            centroid = _centroid(level)
            restores = (centroid * step if stage else centroid) * owned(stage)
            restored = restored + restores if stage else restores
            left = left - restores
        return levels, restored

    def _bytes(self, levels, head, tokens):
        """Bytes [tokens, N / 2] INT8 of one head: its levels by where each of them goes, which the cube adds up."""
        width = self.side.stages * HEAD_DIM
        places = pypto.view(self.domain.places, [width, self.width // 2], [head * width, 0])
        pypto.set_cube_tile_shapes([min(tokens, 128)] * 2, [HEAD_DIM, HEAD_DIM], [self.width // 2] * 2)
        byte = pypto.matmul(levels, places, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(_fitting(tokens, 32), self.width // 2)
        signed = byte - pypto.clip(byte - 127.0, 0.0, 1.0) * 256.0
        return pypto.cast(pypto.cast(signed, pypto.DT_FP16), pypto.DT_INT8)

    # -- Reading -------------------------------------------------------------------------------------------------------
    def tiles(self, place, shape):
        """Centroids [step, N] FP16 of each head of the iteration, without their scale; fewer nibbles, more rows to a task."""
        rows = _fitting(shape.step_tokens, _TILE // self.width)
        heads = range(shape.heads_at_once)
        return [centroids(self.gather(place, head, shape, "nibbles"), rows, self.width) for head in heads]

    def scale_row(self, scales, place, head, shape, factor):
        row = super().scale_row(scales, place, head, shape, factor)
        return row * pypto.view(self.domain.numbers, [1, 1], [LIFT * shape.num_kv_heads + place.head + head, 0])

    def ready(self, q, rows, shape, out):
        group = shape.group
        for head in range(shape.num_kv_heads):
            pypto.set_vec_tile_shapes(4, group, HEAD_DIM)
            own = pypto.cast(pypto.view(q, [rows, group, HEAD_DIM], [0, head * group, 0]), pypto.DT_FP32)
            pypto.set_cube_tile_shapes([_sixteens(rows * group)] * 2, [64, HEAD_DIM], [HEAD_DIM, HEAD_DIM])
            ready = pypto.matmul(
                pypto.reshape(own, [rows * group, HEAD_DIM]), self._coordinates(head), pypto.DT_FP32, b_trans=True
            )
            pypto.set_vec_tile_shapes(4, group, self.width)
            ready = pypto.cast(pypto.reshape(ready, [rows, group, self.width]), pypto.DT_FP16)
            pypto.assemble(ready, [0, head * group, 0], out)

    def finish(self, value, head, shape):
        pypto.set_cube_tile_shapes([16, 16], [64, 64], [HEAD_DIM, HEAD_DIM])
        out = pypto.matmul(value, self._coordinates(head), pypto.DT_FP32)
        pypto.set_vec_tile_shapes(16, HEAD_DIM)
        # Probabilities add up to 1, so the mean is added once.
        mean = pypto.view(self.domain.numbers, [1, HEAD_DIM], [MEAN * shape.num_kv_heads + head, 0])
        return pypto.cast(out + mean, pypto.DT_BF16)

    def _coordinates(self, head):
        """[N, 128] FP32 of one head."""
        return pypto.view(self.domain.rows, [self.width, HEAD_DIM], [head * self.width, 0])


def _fitting(count, most):
    """The largest power of two up to `most` that divides a count."""
    size = 1
    while size * 2 <= most and count % (size * 2) == 0:
        size *= 2
    return size


def _sixteens(count):
    """The largest multiple of 16 up to 128 that divides a count, 16 at least: rows of a cube tile."""
    return next((size for size in range(128, 16, -16) if count % size == 0), 16)


def _length(squares):
    return pypto.sqrt(pypto.sum(squares, dim=-1, keepdim=True))


def _at_least(length, least, tokens):
    return pypto.maximum(length, pypto.full([tokens, 1], least, pypto.DT_FP32))


def _nearest(levels, restored, weighted, y, tokens):
    """Levels [tokens, 128] for each stage of the try that lies nearest to y [tokens, 128], and its `kept` [tokens, 1].

    Args:
        levels: for each stage, [tokens, tries * 128], and so are the others.
    """

    def of(values, number):
        return pypto.view(values, [tokens, HEAD_DIM], [0, number * HEAD_DIM])

    level = [of(values, 0) for values in levels]
    kept, fit = _kept_and_fit(of(restored, 0), of(weighted, 0), y)
    for number in range(1, TRIES):
        other, nearer = _kept_and_fit(of(restored, number), of(weighted, number), y)
        # 1 or 0: so large a product leaves nothing between.
        better = pypto.clip((nearer - fit) * STEEP, 0.0, 1.0)
        fit = pypto.maximum(fit, nearer)
        kept = kept * (1.0 - better) + other * better
        level = [one + (of(values, number) - one) * better for one, values in zip(level, levels, strict=True)]
    return level, kept


def _kept_and_fit(restored, weighted, y):
    along = pypto.sum(weighted * y, dim=-1, keepdim=True)
    kept = pypto.sum(weighted * restored, dim=-1, keepdim=True)
    return kept, along * along / kept


def _centroid(level):
    """c[level] in FP32: the least one and the gaps up to the level.

    Of the level alone: if its steps were used here too, all would wait in the unified buffer and spill.
    """
    value = pypto.clip(level, 0.0, 1.0) * (CENTROIDS[1] - CENTROIDS[0]) + CENTROIDS[0]
    for index in range(1, len(BOUNDARIES)):
        value = value + pypto.clip(level - float(index), 0.0, 1.0) * (CENTROIDS[index + 1] - CENTROIDS[index])
    return value
