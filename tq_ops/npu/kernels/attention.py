"""Attention over a paged cache, as PyPTO helpers (scope 2b); each side of the cache reads its own format.

A unit is a few consecutive query tokens of one sequence: one in decode, more in prefill. Its rows for a KV head are those
tokens times the query heads of the head's group; the cube pads them to 16. Keys come `step` tokens at a time through the
block table, and several KV heads at a time, for one copy then brings the scales of all of them.

Tokens in BF16 are copied beside what is packed, and met in one last step. K or V of a layer is [rows * Hkv * window, D] BF16:
the places of one head of a sequence, its sinks first, lie together.
"""

from dataclasses import dataclass

import pypto

from haarkv.tq_ops.npu.program import square_tile

BLOCK = 128


@dataclass(frozen=True)
class StepPlace:
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
        last_value = weigh(p)
        return self.value * shrink / total, last_value / total

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


_TILE = 128 * 128  # numbers of a vector tile that is copied


@dataclass(frozen=True)
class WindowSides:
    """What stays in BF16 in one iteration of attention.

    Attributes:
        shape: a `tq_ops.npu.sides.KeptShape`.
        k, v: arguments of the program.
        packed: K's `CacheSide`, whose logits these must go with.
        queries: one [M, D] BF16 a head of the iteration, in the model's own domain.
        head: the first KV head of the iteration.
        row: of the sequence's first place in that head.
        seen: [M, span] FP32, added to the logits.
    """

    shape: object
    k: object
    v: object
    packed: object
    queries: object
    head: object
    row: object
    seen: object


def keep(new, buffer, token, row, kv_heads, window):
    """Copy one token's vectors of every KV head, rounded to BF16.

    Args:
        new: vectors [rows, Hkv, D] FP32 of a tile.
        buffer: K or V in BF16, an argument of the program.
        token: its row in the tile.
        row: its place in the first head of its sequence, among all places.
    """
    head_dim = new.shape[2]
    for head in range(kv_heads):
        pypto.set_vec_tile_shapes(1, 1, head_dim)
        values = pypto.cast(pypto.view(new, [1, 1, head_dim], [token, head, 0]), pypto.DT_BF16)
        pypto.set_vec_tile_shapes(16, head_dim)
        pypto.assemble(pypto.reshape(values, [1, head_dim]), [row + head * window, 0], buffer)


def _places(buffer, row, shape, head_dim, name):
    """The places of one head, [span, D] BF16. Behind the last the first ones come again, to be masked: all are numbers."""
    out = pypto.tensor([shape.span, head_dim], pypto.DT_BF16, name)
    pypto.set_vec_tile_shapes(_TILE // head_dim, head_dim)
    for begin in range(0, shape.span, shape.window):
        count = min(shape.window, shape.span - begin)
        pypto.assemble(pypto.view(buffer, [count, head_dim], [row, 0]), [begin, 0], out)
    return out


def attend_window(softmax, window, head, shape):
    """The last step of a unit: keys in BF16.

    Args:
        softmax: the `OnlineSoftmax` of that head of the iteration, after every step of packed keys.
        window: `WindowSides`.
    Returns:
        what the queries attended to among packed and among kept values, each [M, D] FP32.
    Rounding points: probabilities to BF16.
    """
    row = window.row + head * window.shape.window
    head_dim = shape.head_dim
    keys = _places(window.k, row, window.shape, head_dim, f"kept_k{head}")
    values = _places(window.v, row, window.shape, head_dim, f"kept_v{head}")
    rows, tile = [shape.cube_rows] * 2, [window.shape.tile] * 2
    pypto.set_cube_tile_shapes(rows, [64, head_dim], tile)
    raw = pypto.matmul(window.queries[head], keys, pypto.DT_FP32, b_trans=True)
    lacking = window.packed.left_out(window.queries[head], window.head + head, shape.num_kv_heads)
    pypto.set_vec_tile_shapes(16, window.shape.span)
    score = (raw if lacking is None else raw - lacking) * shape.softmax_scale + window.seen

    def weigh(p):
        weights = pypto.cast(p, pypto.DT_BF16)
        pypto.set_cube_tile_shapes(rows, tile, square_tile(head_dim))
        out = pypto.matmul(weights, values, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(16, head_dim)
        return out

    return softmax.end(score, weigh)
