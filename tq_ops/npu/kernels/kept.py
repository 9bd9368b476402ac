"""Tokens that stay in BF16 on the device: copied beside what is packed, and one last step of attention over them.

K or V of a layer is [rows * Hkv * window, D] BF16: the places of one head of a sequence, its sinks first, lie together.
"""

from dataclasses import dataclass

import pypto

from haarkv.tq_ops.npu.scopes import square_tile

_TILE = 128 * 128  # numbers of a vector tile that is copied


@dataclass(frozen=True)
class KeptSides:
    """What stays in BF16 in one iteration of attention.

    Attributes:
        shape: a `tq_ops.npu.kept.KeptShape`.
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


def keep(new, stored, token, row, kv_heads, window):
    """Copy one token's vectors of every KV head, rounded to BF16.

    Args:
        new: vectors [rows, Hkv, D] FP32 of a tile.
        stored: K or V in BF16, an argument of the program.
        token: its row in the tile.
        row: its place in the first head of its sequence, among all places.
    """
    head_dim = new.shape[2]
    for head in range(kv_heads):
        pypto.set_vec_tile_shapes(1, 1, head_dim)
        values = pypto.cast(pypto.view(new, [1, 1, head_dim], [token, head, 0]), pypto.DT_BF16)
        pypto.set_vec_tile_shapes(16, head_dim)
        pypto.assemble(pypto.reshape(values, [1, head_dim]), [row + head * window, 0], stored)


def _places(stored, row, shape, head_dim, name):
    """The places of one head, [span, D] BF16. Behind the last the first ones come again, to be masked: all are numbers."""
    out = pypto.tensor([shape.span, head_dim], pypto.DT_BF16, name)
    pypto.set_vec_tile_shapes(_TILE // head_dim, head_dim)
    for begin in range(0, shape.span, shape.window):
        count = min(shape.window, shape.span - begin)
        pypto.assemble(pypto.view(stored, [count, head_dim], [row, 0]), [begin, 0], out)
    return out


def attend_kept(softmax, kept, head, shape):
    """The last step of a unit: keys in BF16.

    Args:
        softmax: the `OnlineSoftmax` of that head of the iteration, after every step of packed keys.
        kept: `KeptSides`.
    Returns:
        what the queries attended to among packed and among kept values, each [M, D] FP32.
    Rounding points: probabilities to BF16.
    """
    row = kept.row + head * kept.shape.window
    head_dim = shape.head_dim
    keys = _places(kept.k, row, kept.shape, head_dim, f"kept_k{head}")
    values = _places(kept.v, row, kept.shape, head_dim, f"kept_v{head}")
    rows, tile = [shape.cube_rows] * 2, [kept.shape.tile] * 2
    pypto.set_cube_tile_shapes(rows, [64, head_dim], tile)
    raw = pypto.matmul(kept.queries[head], keys, pypto.DT_FP32, b_trans=True)
    lacking = kept.packed.left_out(kept.queries[head], kept.head + head, shape.num_kv_heads)
    pypto.set_vec_tile_shapes(16, kept.shape.span)
    score = (raw if lacking is None else raw - lacking) * shape.softmax_scale + kept.seen

    def weigh(p):
        rounded = pypto.cast(p, pypto.DT_BF16)
        pypto.set_cube_tile_shapes(rows, tile, square_tile(head_dim))
        out = pypto.matmul(rounded, values, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(16, head_dim)
        return out

    return softmax.end(score, weigh)
