"""Learned keys on the device: choose levels of every width at once, and restore centroids by their cubic.

What differs by head and layer is data (`tq_ops.npu.learned`); how levels lie in bytes is built in.
"""

from dataclasses import replace

import pypto

from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.stretches import STRETCH
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

    Tiles lie by coordinate, [width, step], so that the levels of an eighth are whole rows. Keys are stored by stretches of
    1,024 positions (`tq_ops.formats.stretches`); a query is turned back by the first position s of each stretch that it
    reads: logit = (R(-s) q) · stored, with stored = scale * centroids @ back + mean.
    """

    query_dtype = pypto.DT_BF16
    by_token = False

    @property
    def query_width(self):
        return self.head_dim

    # -- Storing -------------------------------------------------------------------------------------------------------
    def store(self, x, tokens, kv_heads, new, cos_sin):
        """Head by head: each has its own coordinates."""
        # Tiles are not merged into one task: they are few and long, and run side by side.
        pypto.set_pass_options(vec_nbuffer_setting={-1: 1})
        flat = pypto.reshape(x, [tokens, kv_heads * self.head_dim])
        whole = self.room(tokens * kv_heads, "whole")
        for head in range(kv_heads):
            head_keys = pypto.view(flat, [tokens, self.head_dim], [0, head * self.head_dim])
            head_keys = undo_shift(head_keys, cos_sin, 0, tokens, fitting(tokens, VECTORS))
            for field, values in zip(whole, self._quantize(head_keys, head, tokens, kv_heads), strict=True):
                pypto.assemble(values, [head * tokens, 0], field)
        for field, values in zip(new, whole, strict=True):
            field[:] = values

    def vector_row(self, token, head, tokens, kv_heads):
        return head * tokens + token

    def _quantize(self, x, head, tokens, kv_heads):
        """x [tokens, D] FP32 of one head -> codes [tokens, bytes] INT8 and scale [tokens, 1] FP16, as
        `tq_ops.formats.learned.LearnedFormat`.

        Rounding points: (x - mean) / length to BF16. Boundaries and centroids are FP32 cubics, up to 3e-7 off the
            reference's tables.
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
        """Levels [tokens, width] -> bytes [tokens, bytes] INT8: a product with `byte_places`."""
        nbytes, lanes = self.side.vectors.width, max(self.head_dim // EIGHTHS, _LANES)
        pypto.set_cube_tile_shapes([min(tokens, 128)] * 2, square_tile(self.head_dim), [lanes, lanes])
        places = pypto.view(self.domain.places, [width, nbytes], [0, 0])
        byte = pypto.matmul(levels, places, pypto.DT_FP32)
        pypto.set_vec_tile_shapes(fitting(tokens, 32), whole_lines(nbytes))
        signed_byte = byte - pypto.clip(byte - 127.0, 0.0, 1.0) * 256.0
        return pypto.cast(pypto.cast(signed_byte, pypto.DT_FP16), pypto.DT_INT8)

    # -- Reading -------------------------------------------------------------------------------------------------------
    def tiles(self, place, shape, scope):
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

    def room_for_queries(self, q, rows, heads):
        return q

    def ready(self, q, rows, shape, out):
        """Nothing: a query is turned for each step, in `scores`."""

    def scores(self, queries, tile, scales, place, head, shape):
        """Of queries [M, D] BF16, not rotated. A step longer than a stretch holds whole ones, whose queries share one product.

        Rounding points: queries by rows to FP16.
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
        """Queries [parts * M, width] FP16 for each stretch of a step, and the mean's logits [M, 1] of each."""
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
        width = self.side.width
        lanes = min(width & -width, 128)
        pypto.set_cube_tile_shapes([16, 16], [64, head_dim], [lanes, lanes])
        by_lift = pypto.view(self.domain.rows, [width, head_dim], [kv_head * width, 0])
        products = pypto.matmul(stretch_queries, by_lift, pypto.DT_FP32, b_trans=True)
        pypto.set_vec_tile_shapes(16, width)
        return pypto.cast(products, pypto.DT_FP16), mean_logits


def undo_shift(x, table, row, count, tile):
    """x [n, D] FP32 turned back by `count` rows (1 or n) of a table [.., D] FP32, cos and then sin; `tile` vectors a tile."""
    head_dim = x.shape[1]
    half = head_dim // 2
    pypto.set_vec_tile_shapes(tile, half)
    low, high = (pypto.view(x, [x.shape[0], half], [0, at]) for at in (0, half))
    cos, sin = (pypto.view(table, [count, half], [row, at]) for at in (0, half))
    halves = [low * cos + high * sin, high * cos - low * sin]
    pypto.set_vec_tile_shapes(tile, head_dim)
    return pypto.concat(halves, 1)


# -- Restoring centroids ---------------------------------------------------------------------------------------------------


def restore_centroids(codes, layout, head_dim, put):
    """Codes [tokens, bytes] INT8 of one block -> centroids by coordinate, [width, tokens] FP16, each over its factor.

    `put(values, row)` takes each part of the layout and its first row. A byte read as signed is first brought to the middle of
    its range, in steps of `SPAN / 256`: all that follows is symmetric.
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
        # Of units of two bytes every other row is the byte meant. The upper one is read a row further, so both share a row.
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
    """Split a byte, from the highest bits down, into levels about their middle that span `SPAN`."""
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
    """Levels of values [tokens, tries * D], FP32, and their centroids; `row` gives one of `LEVEL_ROWS`."""
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
    """Of levels [tokens, tries * D] those [tokens, D] of the try nearest to y [tokens, D], and its weighted square."""

    def try_view(values, number):
        return pypto.view(values, [tokens, head_dim], [0, number * head_dim])

    level = try_view(levels, 0)
    squares, fit = _squares_and_fit(try_view(centroids, 0), try_view(weighted_centroids, 0), y)
    for number in range(1, TRIES):
        other, nearer = _squares_and_fit(try_view(centroids, number), try_view(weighted_centroids, number), y)
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
    """The largest power of two up to `most` that divides `count`."""
    size = 1
    while size * 2 <= most and count % (size * 2) == 0:
        size *= 2
    return size


def _length(squares):
    return pypto.sqrt(pypto.sum(squares, dim=-1, keepdim=True))


def _at_least(length, least, tokens):
    return pypto.maximum(length, pypto.full([tokens, 1], least, pypto.DT_FP32))
