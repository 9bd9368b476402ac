"""K or V of a paged cache in a program: what all formats share; each format's own part is in a module of its own.

A field is a matrix over the host's own memory. The vectors of one KV head in one block are 128 rows that lie together, its
tile; the tiles of a block's heads follow one another.
"""

from dataclasses import dataclass

import pypto
import torch

from haarkv.tq_ops.npu.kernels.attention import BLOCK, bf16_as_fp16, rotate_queries, scaled_by, unrotate

_LINE = 32
DTYPES = {
    torch.int8: pypto.DT_INT8,
    torch.float16: pypto.DT_FP16,
    torch.bfloat16: pypto.DT_BF16,
    torch.float32: pypto.DT_FP32,
}


@dataclass(frozen=True)
class Domain:
    """Arguments that lead into the domain of a side's tiles and out of it; each side reads its own.

    Attributes:
        rotation, rotation_fp16: [D, D] BF16 and FP16.
        forward, numbers, places, rows: of learned keys, `tq_ops.npu.learned.domain_tensors`.
        turns: of learned keys, `tq_ops.npu.sides.turn_table`.
    """

    rotation: object
    rotation_fp16: object = None
    forward: object = None
    numbers: object = None
    places: object = None
    rows: object = None
    turns: object = None


def whole_lines(count):
    """So many bytes in whole lines of the unified buffer."""
    return -(-count // _LINE) * _LINE


class CacheSide:
    """K or V in a program: the base of every format. Unless overridden, tiles are BF16 and not rotated.

    `vectors`, `scales` are its arguments of the program; with `keeps` queries stay in BF16 until they are ready.

    Attributes:
        by_token: whether tiles are [step, D]; else [width, step], of K alone.
        buffer_dtype: of queries until all of a tile's keys are stored.
        query_dtype: of queries as the cube takes them.
    """

    buffer_dtype = query_dtype = pypto.DT_BF16
    by_token = True

    def __init__(self, side, vectors, scales, domain, keeps=False):
        self.keeps, self.head_dim = keeps, side.head_dim
        self.side, self.stored_vectors, self.stored_scales, self.domain = side, vectors, scales, domain

    @property
    def query_width(self):
        """Numbers of a query as `scores` takes it."""
        return self.side.width

    # -- Storing -------------------------------------------------------------------------------------------------------
    def room(self, count, name):
        """Tensors for what is stored of `count` vectors: [count, width], and [count, 1] where there are scales."""
        vectors, scales = self.side.vectors, self.side.scales
        room = [pypto.tensor([count, vectors.width], DTYPES[vectors.dtype], f"{name}_{vectors.field}")]
        if scales:
            room.append(pypto.tensor([count, 1], DTYPES[scales.dtype], f"{name}_{scales.field}"))
        return room

    def store(self, x, tokens, kv_heads, new, cos_sin):
        """Fill `new`, of `room`, from x [tokens, Hkv, D] FP32; `cos_sin` [tokens, D] FP32 turns learned keys back."""
        count = tokens * kv_heads
        for field, values in zip(new, self.quantize(pypto.reshape(x, [count, self.head_dim]), count), strict=True):
            field[:] = values

    def quantize(self, x, count):
        """What is stored of x [count, D] FP32, one tensor for each of `room`."""
        raise NotImplementedError

    def vector_row(self, token, head, tokens, kv_heads):
        """Row of `new` that holds a token's vector of a head."""
        return token * kv_heads + head

    def append(self, row, slot, new, kv_heads):
        """Store the vectors of one token, `row` of its tile, at a slot: block * 128 + offset."""
        vectors, scales = self.side.vectors, self.side.scales
        pypto.set_vec_tile_shapes(16, whole_lines(vectors.width))
        block = slot // BLOCK
        offset = slot % BLOCK
        for head in range(kv_heads):
            vector = self.vector_row(row, head, new[0].shape[0] // kv_heads, kv_heads)
            tile = block * kv_heads + head
            values = pypto.view(new[0], [1, vectors.width], [vector, 0])
            pypto.assemble(pypto.clone(values), [tile * BLOCK + offset, 0], self.stored_vectors)
            if scales:
                at = [tile, offset] if scales.width == BLOCK else [tile * BLOCK + offset, 0]
                pypto.assemble(pypto.clone(pypto.view(new[1], [1, 1], [vector, 0])), at, self.stored_scales)

    # -- Reading -------------------------------------------------------------------------------------------------------
    def gather(self, place, head, shape, name, scales=False):
        """Stored vectors [step, width] of one head of the iteration, block after block; or scales that are a row each."""
        buffer, field = (self.stored_scales, self.side.scales) if scales else (self.stored_vectors, self.side.vectors)
        rows = pypto.tensor([shape.step_tokens, field.width], DTYPES[field.dtype], f"{name}{head}")
        for index in range(shape.blocks):
            row = (place.tile(index, shape) + head) * BLOCK
            pypto.assemble(pypto.view(buffer, [BLOCK, field.width], [row, 0]), [index * BLOCK, 0], rows)
        return rows

    def tiles(self, place, shape, scope):
        """One tile a head, [step, D] or as `by_token` says; `scope` numbers its tasks that must not be cut."""
        raise NotImplementedError

    def scales(self, place, shape):
        """[heads_at_once, step] FP16 that belong to the tiles; None if the tiles are complete."""

    def scale_row(self, scales, place, head, shape, factor):
        """A head's products are multiplied by it, `factor` included: [1, step] FP32, a number, or None for 1."""
        return None if factor == 1.0 else factor

    def scores(self, queries, tile, scales, place, head, shape):
        """Logits [M, step] FP32 of a step of keys, before masks: queries [M, query_width] by the tile of a head."""
        pypto.set_cube_tile_shapes(*shape.score_cube(self.side.width))
        raw = pypto.matmul(queries, tile, pypto.DT_FP32, b_trans=self.by_token)
        pypto.set_vec_tile_shapes(16, shape.step_tokens)
        return scaled_by(raw, self.scale_row(scales, place, head, shape, shape.softmax_scale))

    def probabilities(self, p):
        """FP32 -> as the cube takes them beside the tiles."""
        return pypto.cast(p, self.query_dtype)

    # -- Queries in, values out ------------------------------------------------------------------------------------------
    def query(self, values):
        """Queries BF16 -> `buffer_dtype`."""
        return values

    def room_for_queries(self, q, rows, heads):
        """A tensor [rows, heads, query_width] for queries as `scores` takes them; q itself where they stay as they are."""
        return pypto.tensor([rows, heads, self.side.width], self.query_dtype, "q_ready")

    def ready(self, q, rows, shape, out):
        """Fill `out`, of `room_for_queries`, from q [rows, heads, D]; once a query. The vector tile is for that shape."""
        heads = shape.num_heads
        ready = self.query_rows(pypto.reshape(q, [rows * heads, self.head_dim]), rows * heads)
        out[:] = pypto.clone(pypto.reshape(ready, [rows, heads, self.head_dim]))

    def query_rows(self, query, rows):
        """Queries [rows, D] -> as the cube takes them."""
        return query

    def finish(self, value, window_value=None):
        """Weighted values [rows, D] FP32 in the tiles' domain, and those of a window, not rotated -> their sum, BF16."""
        return pypto.cast(value if window_value is None else value + window_value, pypto.DT_BF16)


class ScaledSide(CacheSide):
    """A side whose tiles are FP16 without their scales, which lie along the logits: [blocks * Hkv, 128] FP16."""

    query_dtype = pypto.DT_FP16

    def scales(self, place, shape):
        out = pypto.tensor([shape.heads_at_once, shape.step_tokens], pypto.DT_FP16, "scales")
        pypto.set_vec_tile_shapes(shape.heads_at_once, BLOCK)
        for index in range(shape.blocks):  # one copy a block brings those of all heads
            tile = place.tile(index, shape)
            pypto.assemble(pypto.view(self.stored_scales, [shape.heads_at_once, BLOCK], [tile, 0]), [0, index * BLOCK], out)
        return out

    def scale_row(self, scales, place, head, shape, factor):
        row = pypto.cast(pypto.view(scales, [1, shape.step_tokens], [head, 0]), pypto.DT_FP32)
        return row if factor == 1.0 else row * factor


class RotatedSide(CacheSide):
    """A side whose tiles are FP16 in the rotated domain."""

    query_dtype = pypto.DT_FP16

    @property
    def buffer_dtype(self):
        return pypto.DT_BF16 if self.keeps else pypto.DT_FP16

    def query(self, values):
        return values if self.keeps else bf16_as_fp16(values)

    def ready(self, q, rows, shape, out):
        super().ready(bf16_as_fp16(q) if self.keeps else q, rows, shape, out)

    def query_rows(self, query, rows):
        return rotate_queries(query, self.domain.rotation_fp16, rows)

    def finish(self, value, window_value=None):
        half = pypto.cast(value, pypto.DT_FP16)
        if window_value is None:
            return unrotate(half, self.domain.rotation_fp16)
        plain = unrotate(half, self.domain.rotation_fp16, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(16, self.head_dim)
        return pypto.cast(plain + window_value, pypto.DT_BF16)


class Plain(CacheSide):
    """One side of a `bf16` cache: values [blocks * Hkv * 128, D] BF16, no scales, nothing rotated."""

    def quantize(self, x, count):
        pypto.set_vec_tile_shapes(min(count, 32), self.head_dim)
        return [pypto.cast(x, pypto.DT_BF16)]

    def tiles(self, place, shape, scope):
        return [self.gather(place, head, shape, "tile") for head in range(shape.heads_at_once)]
