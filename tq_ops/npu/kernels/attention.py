"""Attention over a paged cache, as PyPTO helpers (scope 2b); each side of the cache reads its own format.

A unit is a few consecutive query tokens of one sequence: one in decode, more in prefill. Its rows for a KV head are those
tokens times the query heads of the head's group; the cube pads them to 16. Keys come `step` tokens at a time through the
block table, and several KV heads at a time, for one copy then brings the scales of all of them.
"""

from dataclasses import dataclass

import pypto

from haarkv.tq_ops.npu.scopes import square_tile

BLOCK = 128


@dataclass(frozen=True)
class Place:
    """Where a step's keys lie.

    Attributes:
        block_table: [B, n] INT32, -1 pads.
        sequence: its row.
        block: of the step's first key, in that row.
        head: the first KV head of the iteration.
    """

    block_table: object
    sequence: object
    block: object
    head: object

    def tile(self, index, shape):
        """Row of the first head's tile among the cache's (block, head) tiles; a padded entry reads block 0, to be masked."""
        return self.block_table[self.sequence, self.block + index].max(0) * shape.num_kv_heads + self.head


class OnlineSoftmax:
    """Softmax of one KV head over steps of keys: running maximum, sum and weighted values, FP32."""

    def __init__(self, rows, head_dim, name):
        self.head_dim = head_dim
        self.total = pypto.tensor([rows, 1], pypto.DT_FP32, f"total{name}")
        self.best = pypto.tensor([rows, 1], pypto.DT_FP32, f"best{name}")
        self.value = pypto.tensor([rows, head_dim], pypto.DT_FP32, f"value{name}")

    def begin(self, score, weigh):
        """The first step: logits [rows, step], and a function from probabilities to their sum of values [rows, D]."""
        highest = pypto.amax(score, dim=-1, keepdim=True)
        p = pypto.exp(score - highest)
        self.total[:] = pypto.sum(p, dim=-1, keepdim=True)
        self.best[:] = highest
        self.value[:] = weigh(p)

    def go_on(self, score, weigh):
        """A later step: what came before shrinks if the maximum grows."""
        higher = pypto.maximum(self.best, pypto.amax(score, dim=-1, keepdim=True))
        p = pypto.exp(score - higher)
        shrink = pypto.exp(self.best - higher)
        self.total[:] = self.total * shrink + pypto.sum(p, dim=-1, keepdim=True)
        self.best[:] = higher
        self.value[:] = self.value * shrink + weigh(p)

    def end(self, score, weigh):
        """The last step, of other values than those before: what was attended to among those and among these."""
        higher = pypto.maximum(self.best, pypto.amax(score, dim=-1, keepdim=True))
        p = pypto.exp(score - higher)
        shrink = pypto.exp(self.best - higher)
        total = self.total * shrink + pypto.sum(p, dim=-1, keepdim=True)
        beside = weigh(p)
        return self.value * shrink / total, beside / total

    def result(self):
        """Values [rows, D] FP32."""
        return self.value / self.total


def softmaxes(shape):
    """One `OnlineSoftmax` a head of the iteration; made anew for each unit."""
    return [OnlineSoftmax(shape.queries, shape.head_dim, head) for head in range(shape.heads_at_once)]


def attend_step(softmax, queries, keys, values, place, masks, shape, *, first):
    """One step of keys, for every head of the iteration.

    Args:
        softmax: of `softmaxes`.
        queries: one [M, K's `query_width`] a head, as K's side takes them.
        keys, values: `CacheSide`s.
        masks: each [M, step] or [1, step] FP32, added to the logits one after the other.
        first: whether this is the unit's first step.
    Rounding points: probability times scale to FP16.
    """
    key_tiles, key_scales = keys.tiles(place, shape, 1), keys.scales(place, shape)
    value_tiles = values.tiles(place, shape, 1 + shape.heads_at_once * shape.blocks)
    value_scales = values.scales(place, shape)
    for head in range(shape.heads_at_once):
        score = keys.scores(queries[head], key_tiles[head], key_scales, place, head, shape)
        for mask in masks:
            score = score + mask

        def weigh(p, head=head):
            scaled = values.probabilities(scaled_by(p, values.scale_row(value_scales, place, head, shape, 1.0)))
            pypto.set_cube_tile_shapes(*shape.weigh_cube())
            out = pypto.matmul(scaled, value_tiles[head], pypto.DT_FP32)
            pypto.set_vec_tile_shapes(16, shape.head_dim)
            return out

        if first:
            softmax[head].begin(score, weigh)
        else:
            softmax[head].go_on(score, weigh)


def scaled_by(x, by):
    """x [M, step] FP32 times a number or a row of them, None for 1."""
    return x if by is None else x * by


def rotate_queries(query, rotation, rows):
    """query [rows, D] FP16 -> rotated, FP16. Once a query, whatever the context.

    The product comes last and rounds on its way out of the cube: a vector task behind it would queue behind every unpack task.
    """
    cube = 64 if rows % 64 == 0 else 16
    tile = square_tile(rotation.shape[1])
    pypto.set_cube_tile_shapes([cube, cube], tile, tile)
    return pypto.matmul(query, rotation, pypto.DT_FP16)


def unrotate(output, rotation, dtype=pypto.DT_BF16):
    """output [rows, D] FP16, rotated -> BF16 or FP32 in the model's own domain. Once a query."""
    tile = square_tile(rotation.shape[1])
    pypto.set_cube_tile_shapes([16, 48], tile, tile)
    return pypto.matmul(output, rotation, dtype, b_trans=True)


def bf16_as_fp16(x):
    """BF16 -> FP16: exact for 2**-14 <= |x| <= 65504. There is no direct cast."""
    return pypto.cast(pypto.cast(x, pypto.DT_FP32), pypto.DT_FP16)
