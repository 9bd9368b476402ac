"""Learned keys on the device: choose levels of every width at once, and restore centroids by the cubic that they are.

What differs by head and layer comes as data, see `tq_ops.npu.learned`; how levels lie in bytes is built in.
"""

import pypto

from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.npu.kernels.attention import BLOCK
from haarkv.tq_ops.npu.kernels.side import ScaledSide, whole_lines
from haarkv.tq_ops.npu.kernels.tq4 import LARGEST_FP16, LEAST_NORM, STEEP
from haarkv.tq_ops.npu.learned import LEVEL_ROWS, LIFT, MEAN, SHARED, SPAN, TRIES, WEIGHTS, level_cubic, pieces
from haarkv.tq_ops.npu.program import square_tile

VECTORS = 8  # of a vector tile of FP32
# Adding and subtracting it rounds FP32 to whole numbers; FP16 to multiples of a step if it is that many steps.
_WHOLE = 1.5 * 2.0**23
_STEPS = 1.5 * 2.0**10
_LANES = 16  # of the cube, at least


class LearnedKeys(ScaledSide):
    """K in a cache of learned keys: codes [blocks * Hkv * 128, bytes] INT8, scale [blocks * Hkv, 128] FP16.

    Tiles lie by coordinate, [width, step]: the levels of an eighth are rows then, and take what their own lines take.
    """

    by_token = False

    # -- Storing -------------------------------------------------------------------------------------------------------
    def store(self, x, tokens, kv_heads, new, cos_sin):
        """Head by head: each has its own coordinates, and its vectors are rows of one matrix."""
        # Tiles are not merged into one task: they are few and long, and run side by side.
        pypto.set_pass_options(vec_nbuffer_setting={-1: 1})
        flat = pypto.reshape(x, [tokens, kv_heads * self.head_dim])
        whole = self.room(tokens * kv_heads, "whole")
        for head in range(kv_heads):
            head_keys = self.as_stored(pypto.view(flat, [tokens, self.head_dim], [0, head * self.head_dim]), cos_sin, tokens)
            for field, values in zip(whole, self._quantize(head_keys, head, tokens, kv_heads), strict=True):
                pypto.assemble(values, [head * tokens, 0], field)
        for field, values in zip(new, whole, strict=True):
            field[:] = values

    def as_stored(self, x, cos_sin, tokens):
        """Keys [tokens, D] FP32 of one head as their stretch stores them; as they are where nobody knows how they turn."""
        return x

    def vector_row(self, token, head, tokens, kv_heads):
        """The tokens of a head one after the other."""
        return head * tokens + token

    def _quantize(self, x, head, tokens, kv_heads):
        """One head as `tq_ops.formats.learned.LearnedFormat`.

        Args:
            x: [tokens, D] FP32.
        Returns:
            codes [tokens, bytes] INT8 and scale [tokens, 1] FP16.
        Rounding points: (x - mean) / length to BF16; scale to FP16. Boundaries and centroids are FP32 cubics, off by up to
            3e-7 from the reference's tables.
        """
        head_dim = self.head_dim
        rows = fitting(tokens, VECTORS * 128 // max(head_dim, 128))
        all_tries = TRIES * head_dim

        def numbers(kind, width=head_dim):
            return pypto.view(self.domain.numbers, [1, width], [kind * kv_heads + head, 0])

        def level_row(name):
            return pypto.view(self.domain.numbers, [1, all_tries], [SHARED * kv_heads + LEVEL_ROWS.index(name), 0])

        pypto.set_vec_tile_shapes(rows, head_dim)
        centred = x - numbers(MEAN)
        gamma = _length(centred * centred)
        unit = pypto.cast(centred / _at_least(gamma, LEAST_NORM, tokens), pypto.DT_BF16)
        pypto.set_cube_tile_shapes([min(tokens, 128)] * 2, square_tile(head_dim), square_tile(head_dim))
        forward = pypto.view(self.domain.forward, [head_dim, head_dim], [head * head_dim, 0])
        y = pypto.matmul(unit, forward, pypto.DT_FP32)
        # One task from here to the levels: cut elsewhere, each half step would go through memory.
        pypto.set_pass_options(sg_set_scope=head + 1)
        squares = y * y
        gamma = gamma * _length(squares * numbers(WEIGHTS))
        y = y / _at_least(_length(squares * (1.0 / head_dim)), LEAST_NORM, tokens)
        pypto.set_vec_tile_shapes(rows, all_tries)
        value = pypto.concat([y if gain == 1.0 else y * gain for gain in GAINS], 1)
        level, centroids = _choose(value, level_row)
        weighted_centroids = centroids * numbers(WEIGHTS, all_tries)
        pypto.set_vec_tile_shapes(rows, head_dim)
        level, norm_squares = _nearest(level, centroids, weighted_centroids, y, tokens, head_dim)
        parts = [level]
        if split := self.side.layout.lower_pieces:
            upper = level * pypto.view(level_row("upper"), [1, head_dim], [0, 0])
            # Down to a whole number: to the next one, once less than half has been taken away.
            parts.append((upper - (0.5 - 0.5 ** (1 + max(piece.bits for piece in split))) + _WHOLE) - _WHOLE)
        levels = pypto.tensor([tokens, len(parts) * head_dim], pypto.DT_FP16, f"levels{head}")
        for index, values in enumerate(parts):
            pypto.assemble(pypto.cast(values, pypto.DT_FP16), [0, index * head_dim], levels)
        scale = pypto.minimum(gamma / pypto.sqrt(norm_squares), pypto.full([tokens, 1], LARGEST_FP16, pypto.DT_FP32))
        scale = pypto.cast(scale, pypto.DT_FP16)
        pypto.set_pass_options(sg_set_scope=-1)
        return self._bytes(levels, len(parts) * head_dim, tokens), scale

    def _bytes(self, levels, width, tokens):
        """Bytes [tokens, bytes] INT8 of levels [tokens, width] by where each of them goes, which the cube adds up."""
        nbytes, lanes = self.side.vectors.width, max(self.head_dim // EIGHTHS, _LANES)
        pypto.set_cube_tile_shapes([min(tokens, 128)] * 2, square_tile(self.head_dim), [lanes, lanes])
        places = pypto.view(self.domain.places, [width, nbytes], [0, 0])
        byte = pypto.matmul(levels, places, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(fitting(tokens, 32), whole_lines(nbytes))
        signed_byte = byte - pypto.clip(byte - 127.0, 0.0, 1.0) * 256.0
        return pypto.cast(pypto.cast(signed_byte, pypto.DT_FP16), pypto.DT_INT8)

    # -- Reading -------------------------------------------------------------------------------------------------------
    def tiles(self, place, shape, scope):
        """Centroids by coordinate, [width, step] FP16 of each head of the iteration, without scale and factors."""
        return [self._tile(place, head, shape, scope + head * shape.blocks) for head in range(shape.heads_at_once)]

    def _tile(self, place, head, shape, scope):
        nbytes = self.side.vectors.width
        out = pypto.tensor([self.side.width, shape.step_tokens], pypto.DT_FP16, f"keys{head}")
        for index in range(shape.blocks):
            row = (place.tile(index, shape) + head) * BLOCK
            codes = pypto.view(self.stored_vectors, [BLOCK, nbytes], [row, 0])
            # One task a block: cut where tiles change their shape, each eighth would go through memory.
            pypto.set_pass_options(sg_set_scope=scope + index)

            def put(values, row, at=index):
                pypto.assemble(values, [row, at * BLOCK], out)

            restore_centroids(codes, self.side.layout, self.head_dim, put)
            pypto.set_pass_options(sg_set_scope=-1)
        return out

    def scale_row(self, scales, place, head, shape, factor):
        row = super().scale_row(scales, place, head, shape, factor)
        return row * pypto.view(self.domain.numbers, [1, 1], [LIFT * shape.num_kv_heads + place.head + head, 0])

    def left_out(self, queries, head, kv_heads):
        """The product with the head's mean, which codes are stored without."""
        pypto.set_vec_tile_shapes(16, self.head_dim)
        mean = pypto.view(self.domain.numbers, [1, self.head_dim], [MEAN * kv_heads + head, 0])
        return pypto.sum(pypto.cast(queries, pypto.DT_FP32) * mean, dim=-1, keepdim=True)

    def ready(self, q, rows, shape, out):
        group, width, head_dim = shape.group, self.side.width, self.head_dim
        for head in range(shape.num_kv_heads):
            pypto.set_vec_tile_shapes(4, group, head_dim)
            head_queries = pypto.cast(pypto.view(q, [rows, group, head_dim], [0, head * group, 0]), pypto.DT_FP32)
            ready = self.products(pypto.reshape(head_queries, [rows * group, head_dim]), head, _sixteens(rows * group))
            pypto.set_vec_tile_shapes(4, group, width)
            ready = pypto.cast(pypto.reshape(ready, [rows, group, width]), pypto.DT_FP16)
            pypto.assemble(ready, [0, head * group, 0], out)

    def products(self, queries, head, cube_rows):
        """Queries [M, D] FP32 by the rows of one of the KV heads, [M, width] FP32: what meets its tiles, over its lift."""
        width = self.side.width
        lanes = min(width & -width, 128)
        pypto.set_cube_tile_shapes([cube_rows] * 2, [64, self.head_dim], [lanes, lanes])
        rows = pypto.view(self.domain.rows, [width, self.head_dim], [head * width, 0])
        return pypto.matmul(queries, rows, pypto.DT_FP32, b_trans=True)


# -- Restoring centroids ---------------------------------------------------------------------------------------------------


def restore_centroids(codes, layout, head_dim, put):
    """Codes [tokens, bytes] INT8 of one block -> centroids by coordinate, [width, tokens] FP16, each over its factor.

    They come in the parts of the layout: `put` takes one and its first row.

    A byte read as signed is brought to the middle of its range first, in steps of `SPAN / 256`: all that follows is symmetric.
    """
    tokens, nbytes = codes.shape
    units = head_dim // EIGHTHS
    pypto.set_vec_tile_shapes(tokens, whole_lines(nbytes))
    byte = pypto.transpose(pypto.cast(codes, pypto.DT_FP16), 0, 1)
    pypto.set_vec_tile_shapes(nbytes, tokens)
    offset_byte = byte * (SPAN / 256) + (SPAN / 2 + SPAN / 512)
    middle = offset_byte - _round_to(offset_byte, SPAN)
    eighths, first = {}, 0
    for column in layout.columns:
        rows = units * column.nbytes
        pypto.set_vec_tile_shapes(rows, tokens)
        # Of units of two bytes every other row is the byte that is meant. The upper one is read a row further, so that
        # both lie in the same row.
        for byte, byte_pieces in enumerate(pieces(column)):
            _unpack(pypto.view(middle, [rows, tokens], [first + byte, 0]), byte_pieces, eighths)
        first += rows
    first = 0
    for part in layout.parts(head_dim):
        rows = units * sum(layout.strides[eighth] for eighth in part)
        # Each eighth is made where it belongs: nothing is copied.
        pypto.set_vec_tile_shapes(rows, tokens)
        level = pypto.concat([eighths[eighth] for eighth in part], 0) if len(part) > 1 else eighths[part[0]]
        put((level * level + level_cubic(layout.widths[part[0]]).rise) * level, first)
        first += rows


def _unpack(rest, byte_pieces, eighths):
    """Split what a byte holds, from the highest bits down, into levels about their middle that span `SPAN`."""
    for piece in reversed(byte_pieces):
        step = SPAN * 2.0 ** (piece.shift - 8)
        if piece.shift:
            offset_rest = rest + step / 2
            upper = _round_to(offset_rest, step)
            value, rest = upper - step / 2, offset_rest - upper
        else:
            value = rest
        if piece.bits < piece.whole and not piece.shift:
            # The upper part of a level. Its lower part, in the byte before, spans as much as a whole one.
            value = (value * 256.0 + eighths[piece.eighth]) * 2.0**-piece.bits
        elif piece.shift + piece.bits < 8:
            value = value * 2.0 ** (8 - piece.shift - piece.bits)
        eighths[piece.eighth] = value


def _round_to(x, step):
    """FP16 to the next multiple of a power of two."""
    return (x + _STEPS * step) - _STEPS * step


# -- Choosing levels -------------------------------------------------------------------------------------------------------


def _choose(value, row):
    """Levels of values [tokens, tries * D], FP32, and the centroids they stand for; `row` gives one of `LEVEL_ROWS`."""
    shrunk = pypto.clip(value * row("shrink"), -1.0, 1.0)
    square = shrunk * shrunk
    inverse = square * row("inverse3") + row("inverse2")
    inverse = inverse * square + row("inverse1")
    inverse = inverse * square + row("inverse0")
    k = (inverse * shrunk + _WHOLE) - _WHOLE
    boundary = (k * k * row("cubed") + row("linear")) * k
    # 1 or 0: so large a product leaves nothing between.
    k = k + pypto.clip((value - boundary) * STEEP + 1.0, 0.0, 1.0)
    m = k * 2.0 - 1.0
    return k + row("most"), (m * m * row("b") + row("a")) * m


def _nearest(levels, centroids, weighted_centroids, y, tokens, head_dim):
    """Levels [tokens, D] of the try that lies nearest to y [tokens, D], and its `kept` [tokens, 1].

    Args:
        levels: [tokens, tries * D], and so are the next two.
    """

    def try_view(values, number):
        return pypto.view(values, [tokens, head_dim], [0, number * head_dim])

    level = try_view(levels, 0)
    squares, fit = _squares_and_fit(try_view(centroids, 0), try_view(weighted_centroids, 0), y)
    for number in range(1, TRIES):
        other, nearer = _squares_and_fit(try_view(centroids, number), try_view(weighted_centroids, number), y)
        # 1 or 0: so large a product leaves nothing between.
        better = pypto.clip((nearer - fit) * STEEP, 0.0, 1.0)
        fit = pypto.maximum(fit, nearer)
        squares = squares * (1.0 - better) + other * better
        level = level + (try_view(levels, number) - level) * better
    return level, squares


def _squares_and_fit(centroids, weighted_centroids, y):
    inner = pypto.sum(weighted_centroids * y, dim=-1, keepdim=True)
    squares = pypto.sum(weighted_centroids * centroids, dim=-1, keepdim=True)
    return squares, inner * inner / squares


# -- Sizes -----------------------------------------------------------------------------------------------------------------


def fitting(count, most):
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
