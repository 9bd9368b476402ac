"""Attention over a paged cache, as PyPTO helpers (scope 2b); K and V each read their own format.

A unit is a few consecutive query tokens of one sequence: one in decode, more in prefill. Its rows for a KV head are those
tokens times the query heads of the group; the cube pads them to 16. Keys come `step` tokens at a time through the block
table, and several KV heads at a time, because one copy then brings the scales of all of them.

Tokens that stay in BF16 are one last step. K or V of a layer is [rows * Hkv * window, D] BF16, heads of a sequence one after
the other, sinks first.
"""

from dataclasses import dataclass

import pypto

from haarkv.tq_ops.npu.program import square_tile

BLOCK = 128
_TILE = 128 * 128  # numbers of a vector tile that is copied


@dataclass(frozen=True)
class StepPlace:
    """A step's keys: block table [B, n] INT32 (-1 pads), its row, the step's first block in it, and the first KV head."""

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

    def _rescaled(self, score):
        """The new maximum, a step's probabilities, the factor of all before it, and the new sum."""
        higher = pypto.maximum(self.best, pypto.amax(score, dim=-1, keepdim=True))
        p = pypto.exp(score - higher)
        shrink = pypto.exp(self.best - higher)
        return higher, p, shrink, self.total * shrink + pypto.sum(p, dim=-1, keepdim=True)

    def go_on(self, score, weigh):
        """A later step."""
        higher, p, shrink, total = self._rescaled(score)
        self.total[:] = total
        self.best[:] = higher
        self.value[:] = self.value * shrink + weigh(p)

    def end(self, score, weigh):
        """The last step, of values in another domain: results [rows, D] of all before it, and of this one."""
        _, p, shrink, total = self._rescaled(score)
        last_value = weigh(p)
        return self.value * shrink / total, last_value / total

    def result(self):
        """Values [rows, D] FP32."""
        return self.value / self.total


def softmaxes(shape):
    """A new `OnlineSoftmax` for each head of the iteration."""
    return [OnlineSoftmax(shape.queries, shape.head_dim, head) for head in range(shape.heads_at_once)]


def attend_step(softmax, queries, keys, values, place, masks, shape, *, first):
    """One step of keys, for every head of the iteration.

    Rounding points: probability times scale, to what V's tiles are.

    Args:
        queries: one [M, K's `query_width`] a head.
        keys, values: `CacheSide`s.
        masks: each [M, step] or [1, step] FP32, added to the logits.
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
    """Query [rows, D] FP16, rotated. The product comes last: vector tasks behind it would queue behind unpack tasks."""
    cube = 64 if rows % 64 == 0 else 16
    tile = square_tile(rotation.shape[1])
    pypto.set_cube_tile_shapes([cube, cube], tile, tile)
    return pypto.matmul(query, rotation, pypto.DT_FP16)


def unrotate(output, rotation, dtype=pypto.DT_BF16):
    """Output [rows, D] FP16, rotated -> BF16 or FP32, rotated back."""
    tile = square_tile(rotation.shape[1])
    pypto.set_cube_tile_shapes([16, 48], tile, tile)
    return pypto.matmul(output, rotation, dtype, b_trans=True)


def bf16_as_fp16(x):
    """BF16 -> FP16: exact for 2**-14 <= |x| <= 65504. There is no direct cast."""
    return pypto.cast(pypto.cast(x, pypto.DT_FP32), pypto.DT_FP16)


# -- Tokens in BF16 ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WindowSides:
    """What stays in BF16, in one iteration of attention: K and V, arguments of the program, of a `WindowShape`.

    `queries`: one [M, D] BF16 a head, not rotated; `row`: of the sequence's first place in the iteration's first KV head;
    `seen`: [M, span] FP32, added to the logits.
    """

    shape: object
    k: object
    v: object
    queries: object
    row: object
    seen: object


def keep(new, buffer, token, row, kv_heads, window):
    """Copy one token of a tile `new` [rows, Hkv, D] FP32, as BF16, to its place (`row` in the first head) of a window."""
    head_dim = new.shape[2]
    for head in range(kv_heads):
        pypto.set_vec_tile_shapes(1, 1, head_dim)
        values = pypto.cast(pypto.view(new, [1, 1, head_dim], [token, head, 0]), pypto.DT_BF16)
        pypto.set_vec_tile_shapes(16, head_dim)
        pypto.assemble(pypto.reshape(values, [1, head_dim]), [row + head * window, 0], buffer)


def _window_vectors(buffer, row, shape, head_dim, name):
    """One head's places, [span, D] BF16; behind the last the first ones come again, to be masked."""
    out = pypto.tensor([shape.span, head_dim], pypto.DT_BF16, name)
    pypto.set_vec_tile_shapes(_TILE // head_dim, head_dim)
    for begin in range(0, shape.span, shape.window):
        count = min(shape.window, shape.span - begin)
        pypto.assemble(pypto.view(buffer, [count, head_dim], [row, 0]), [begin, 0], out)
    return out


def attend_window(softmax, window, head, shape):
    """A unit's last step, over keys in BF16, for one head: packed values (in V's domain) and these, each [M, D] FP32.

    Rounding points: probabilities to BF16.
    """
    row = window.row + head * window.shape.window
    head_dim = shape.head_dim
    keys = _window_vectors(window.k, row, window.shape, head_dim, f"kept_k{head}")
    values = _window_vectors(window.v, row, window.shape, head_dim, f"kept_v{head}")
    rows, tile = [shape.cube_rows] * 2, [window.shape.tile] * 2
    pypto.set_cube_tile_shapes(rows, [64, head_dim], tile)
    raw = pypto.matmul(window.queries[head], keys, pypto.DT_FP32, b_trans=True)
    pypto.set_vec_tile_shapes(16, window.shape.span)
    score = raw * shape.softmax_scale + window.seen

    def weigh(p):
        weights = pypto.cast(p, pypto.DT_BF16)
        pypto.set_cube_tile_shapes(rows, tile, square_tile(head_dim))
        out = pypto.matmul(weights, values, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(16, head_dim)
        return out

    return softmax.end(score, weigh)
