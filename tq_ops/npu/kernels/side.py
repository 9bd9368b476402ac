"""One side of a paged cache, K or V, in a program: what all formats share. What each one stores is in a module of its own.

A cache is the host's own memory, byte for byte, each field as a matrix (`tq_ops.npu.sides`). The vectors of one KV head in
one block are 128 rows that lie together, its tile; the tiles of a block's heads follow one another.
"""

import pypto
import torch

from haarkv.tq_ops.npu.kernels.attention import BLOCK, bf16_as_fp16, rotate_queries, unrotate

DTYPES = {
    torch.int8: pypto.DT_INT8,
    torch.float16: pypto.DT_FP16,
    torch.bfloat16: pypto.DT_BF16,
    torch.float32: pypto.DT_FP32,
}


class CacheSide:
    """K or V in a program: the base of every format. Unless overridden, tiles are BF16 in the model's own domain.

    Args:
        vectors, scales: the side's two arguments of the program; without scales the second is not read.
    Attributes:
        side: how the format lies before a program.
        query_dtype: of queries as the cube takes them beside the tiles.
    """

    side = None
    query_dtype = pypto.DT_BF16

    def __init__(self, vectors, scales):
        self.stored_vectors, self.stored_scales = vectors, scales

    # -- Storing -------------------------------------------------------------------------------------------------------
    def room(self, count, name):
        """Tensors for what is stored of `count` new vectors: [count, width], and [count, 1] where there are scales."""
        vectors, scales = self.side.vectors, self.side.scales
        room = [pypto.tensor([count, vectors.width], DTYPES[vectors.dtype], f"{name}_{vectors.field}")]
        if scales:
            room.append(pypto.tensor([count, 1], DTYPES[scales.dtype], f"{name}_{scales.field}"))
        return room

    def store(self, x, rotation, count, new):
        """Fill `new`, of `room`, with what is stored of x [count, 128] FP32."""
        for field, values in zip(new, self.quantize(x, rotation, count), strict=True):
            field[:] = values

    def quantize(self, x, rotation, count):
        """What is stored of x [count, 128] FP32, one tensor for each of `room`.

        Args:
            rotation: [128, 128] BF16.
        """
        raise NotImplementedError

    def append(self, row, slot, new, kv_heads):
        """Store one token's vectors of every KV head at its slot.

        Args:
            row: of the token in the batch; its vectors are rows row * kv_heads … of `new`.
            slot: block * 128 + offset.
            new: of `room`, filled.
        """
        vectors, scales = self.side.vectors, self.side.scales
        pypto.set_vec_tile_shapes(16, vectors.width)
        block = slot // BLOCK
        offset = slot % BLOCK
        for head in range(kv_heads):
            vector = row * kv_heads + head
            tile = block * kv_heads + head
            values = pypto.view(new[0], [1, vectors.width], [vector, 0])
            pypto.assemble(pypto.clone(values), [tile * BLOCK + offset, 0], self.stored_vectors)
            if scales:
                at = [tile, offset] if scales.width == BLOCK else [tile * BLOCK + offset, 0]
                pypto.assemble(pypto.clone(pypto.view(new[1], [1, 1], [vector, 0])), at, self.stored_scales)

    # -- Reading -------------------------------------------------------------------------------------------------------
    def gather(self, place, head, shape, name):
        """Stored vectors [step, width] of one head of the iteration: its tiles in the step's blocks, one after the other."""
        return self._rows(self.stored_vectors, self.side.vectors, place, head, shape, name)

    def gather_scales(self, place, head, shape, name):
        """Their scales [step, 1], of a format that stores a row each."""
        return self._rows(self.stored_scales, self.side.scales, place, head, shape, name)

    @staticmethod
    def _rows(stored, field, place, head, shape, name):
        rows = pypto.tensor([shape.step_tokens, field.width], DTYPES[field.dtype], f"{name}{head}")
        for index in range(shape.step_tokens // BLOCK):
            row = (place.tile(index, shape) + head) * BLOCK
            pypto.assemble(pypto.view(stored, [BLOCK, field.width], [row, 0]), [index * BLOCK, 0], rows)
        return rows

    def tiles(self, place, shape):
        """[step, 128] of each head of the iteration, as the cube takes them."""
        raise NotImplementedError

    def scales(self, place, shape):
        """[heads_at_once, step] FP16 that belong to the tiles; None if the tiles are complete."""

    def probabilities(self, p):
        """FP32 -> as the cube takes them beside the tiles."""
        return pypto.cast(p, pypto.DT_BF16)

    # -- Queries in, values out ------------------------------------------------------------------------------------------
    def query(self, values):
        """Queries BF16 -> as they are kept."""
        return values

    def ready(self, query, rotation, rows):
        """Kept queries [rows, 128] -> as the cube takes them; once a query, whatever the context."""
        return query

    def finish(self, value, rotation):
        """What queries attended to, [rows, 128] FP32 -> BF16 in the model's own domain; once a query."""
        return pypto.cast(value, pypto.DT_BF16)


class RotatedSide(CacheSide):
    """A side whose tiles are FP16 in the rotated domain."""

    query_dtype = pypto.DT_FP16

    def probabilities(self, p):
        return pypto.cast(p, pypto.DT_FP16)

    def query(self, values):
        return bf16_as_fp16(values)

    def ready(self, query, rotation, rows):
        return rotate_queries(query, rotation, rows)

    def finish(self, value, rotation):
        return unrotate(pypto.cast(value, pypto.DT_FP16), rotation)
