"""PyPTO programs: a whole decoder layer, for prefill and decode alike, and the head.

Loops must stand in the jit body; one iteration is in the helpers above it. What depends on the formats of K and V is in their
`CacheSide`s.
"""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.attention import BLOCK, StepPlace, WindowSides, attend_step, attend_window, keep, softmaxes
from haarkv.tq_ops.npu.kernels.learned import LearnedKeys
from haarkv.tq_ops.npu.kernels.linear import (
    Tiles,
    gated_mlp,
    head_norm,
    head_rope,
    heads_per_tile,
    hidden_norm,
    norm_update,
    residual,
)
from haarkv.tq_ops.npu.kernels.side import DTYPES, Domain, Plain
from haarkv.tq_ops.npu.kernels.tq4 import Packed, SeedBytes
from haarkv.tq_ops.npu.sides import BF16, PUBLISHED, TQ4

_KERNELS = {TQ4.name: Packed, PUBLISHED.name: SeedBytes, BF16.name: Plain}


def side_kernel(side):
    """The class of a `Side`'s `CacheSide`."""
    return LearnedKeys if side.layout else _KERNELS[side.name]


def parameter(field):
    """The type of a program's parameter that is a `StoredField`."""
    return pypto.Tensor([pypto.DYNAMIC, field.width], DTYPES[field.dtype])


def _project_qkv(x, weights, cos, sin, outputs, query, layer, tiles):
    """Scope 1 behind the norm: projections, head norms, RoPE. Fills q [rows, Hq, D], by `query`, and k, v [rows, Hkv, D] FP32.

    Rounding points: q to BF16, as the reference.
    """
    projections, biases, norms = weights
    rows, mixer, head_dim = layer.rows, layer.declared.attention, layer.attention.head_dim
    heads, kv_heads, half = layer.attention.num_heads, layer.attention.num_kv_heads, head_dim // 2
    projected = [tiles.project(x, weight) for weight in projections]
    pypto.set_vec_tile_shapes(16, 1, half)
    cos = pypto.reshape(cos, [rows, 1, half])
    sin = pypto.reshape(sin, [rows, 1, half])

    def by_heads(side, count):
        # A bias is added head by head: were it added to rows of a tile, PyPTO would reshape those beyond the tile's end.
        y = pypto.reshape(projected[side], [rows, count, head_dim])
        if mixer.bias:
            pypto.set_vec_tile_shapes(4, heads_per_tile(count), head_dim)
            y = y + pypto.cast(biases[side], pypto.DT_FP32)
        return y

    for side, out, count, is_q in ((0, outputs[0], heads, True), (1, outputs[1], kv_heads, False)):
        by_head, norm = by_heads(side, count), norms[side]
        if mixer.head_norms:
            by_head = head_norm(by_head, norm, count, head_dim, layer.declared.norm.eps)
        for place, values in enumerate(head_rope(by_head, cos, sin, rows, count, head_dim)):
            # K goes on in FP32: only what the format stores is rounded.
            values = query(pypto.cast(values, pypto.DT_BF16)) if is_q else values
            pypto.assemble(values, [0, 0, place * half], out)
    pypto.set_vec_tile_shapes(4, kv_heads, head_dim)
    outputs[2][:] = pypto.clone(by_heads(2, kv_heads))


def _quantize(x, stored, new, back, layer):
    """Scope 2a for K or V: x [rows, Hkv, D] FP32 fills `new` with what its side stores."""
    kv_heads = layer.attention.num_kv_heads
    pypto.set_vec_tile_shapes(4, kv_heads, layer.attention.head_dim)
    stored.store(x, layer.rows, kv_heads, new, back)


def _ready(q, stored_k, q_ready, attended, layer):
    """Bring every query into the domain of K's tiles, once, and clear `attended`, whose padding no unit writes."""
    rows, heads, head_dim = layer.rows, layer.attention.num_heads, layer.attention.head_dim
    by_head = (4, heads_per_tile(heads), head_dim)
    pypto.set_vec_tile_shapes(*by_head)
    stored_k.ready(q, rows, layer.attention, q_ready)
    pypto.set_vec_tile_shapes(*by_head)
    attended[:] = pypto.cast(pypto.full([rows, heads, head_dim], 0.0, pypto.DT_FP32), pypto.DT_BF16)


def _queries(q_ready, width, first_row, first_head, shape):
    """Queries [unit * group, width] of one unit, token by token, for each head of the iteration."""
    pypto.set_vec_tile_shapes(16, shape.group, width)
    queries = []
    for head in range(shape.heads_at_once):
        begin = [first_row, (first_head + head) * shape.group, 0]
        part = pypto.clone(pypto.view(q_ready, [shape.unit_tokens, shape.group, width], begin))
        queries.append(pypto.reshape(part, [shape.queries, width]))
    return queries


def _finish(softmax, stored_v, kept, attended, first_row, first_head, shape):
    """The inverse of `_queries`: a unit's weighted values, after its step over tokens in BF16 (`kept`), into their rows."""
    head_dim = shape.head_dim
    for head in range(shape.heads_at_once):
        pypto.set_vec_tile_shapes(16, head_dim)
        value, beside = attend_window(softmax[head], kept, head, shape) if kept else (softmax[head].result(), None)
        out = stored_v.finish(value, beside)
        pypto.set_vec_tile_shapes(16, shape.group, head_dim)
        part = pypto.clone(pypto.reshape(out, [shape.unit_tokens, shape.group, head_dim]))
        pypto.assemble(part, [first_row, (first_head + head) * shape.group, 0], attended)


def _rest_of_layer(projected, tiles, hidden, weights, layer):
    """Scope 3 behind the output projection: residual, MLP, residual. BF16."""
    (mixer_out_norm, post_norm, mlp_out_norm), mlp_weights = weights
    declared, sizes = layer.declared, (layer.hidden_size, layer.declared.norm.eps)
    if declared.post_norms:
        projected = norm_update(projected, mixer_out_norm, *sizes)
    middle = residual(projected, hidden, tiles)
    added = gated_mlp(hidden_norm(middle, post_norm, *sizes), mlp_weights, tiles, declared.mlp.activation)
    if declared.post_norms:
        added = norm_update(added, mlp_out_norm, *sizes)
    return residual(added, middle, tiles)


def _masks(tables, seen, gone, also, shape):
    """What is added to a step's logits: views of `mask` at `seen` keys, of `left_behind` at `gone` ones, and `also`."""

    def moved(table, keys):
        begin = shape.step_tokens - keys.min(shape.step_tokens).max(-shape.unit_tokens)
        return pypto.view(table, [shape.queries, shape.step_tokens], [0, begin])

    masks = [moved(tables[0], seen)]
    if shape.window is not None:
        masks.append(moved(tables[1], gone))
    return masks if also is None else [*masks, also]


def _first_step(start, packed, shape):
    """The first step in which a query at position `start` sees a key; 0 without a window."""
    if shape.window is None:
        return 0
    return ((start - shape.window + 1).max(0) // shape.step_tokens).min((packed - 1) // shape.step_tokens)


def _sink_mask(sinks, first, shape):
    """What hides the sinks, [1, step], in a unit's first step, if that is the sequence's first, too."""
    if shape.window is None:
        return sinks
    return pypto.view(sinks, [1, shape.step_tokens], [0, first.min(1) * shape.step_tokens])


def build(layer: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated layer of a `LayerProgram`: tiles of `layer.rows` tokens, and within each attention unit by unit."""
    shape, rows = layer.attention, layer.rows
    hidden_size, intermediate, norm = layer.hidden_size, layer.declared.mlp.width, layer.declared.norm
    heads, kv_heads, at_once, head_dim = shape.num_heads, shape.num_kv_heads, shape.heads_at_once, shape.head_dim
    unit, step, queries = shape.unit_tokens, shape.step_tokens, shape.queries
    vectors = rows * kv_heads
    side_k, side_v = layer.k, layer.v
    kernel_k, kernel_v = side_kernel(side_k), side_kernel(side_v)
    kept = layer.kept
    tail, window, span = (kept.tail, kept.window, kept.span) if kept else (0, 0, head_dim)
    has_sinks = bool(kept and kept.sink)
    newest = shape.window or 0
    sinks_width = step * (1 if kept is None or shape.window is None else 2)
    half, norm_dtype = head_dim // 2, pypto.DT_FP32 if norm.plus_one else pypto.DT_BF16
    tiles = Tiles(rows)

    @pypto.frontend.jit(**options)
    def decoder_layer(
        hidden: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_BF16),
        input_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        q_proj: pypto.Tensor([heads * head_dim, hidden_size], pypto.DT_BF16),
        k_proj: pypto.Tensor([kv_heads * head_dim, hidden_size], pypto.DT_BF16),
        v_proj: pypto.Tensor([kv_heads * head_dim, hidden_size], pypto.DT_BF16),
        q_bias: pypto.Tensor([1, heads, head_dim], pypto.DT_BF16),
        k_bias: pypto.Tensor([1, kv_heads, head_dim], pypto.DT_BF16),
        v_bias: pypto.Tensor([1, kv_heads, head_dim], pypto.DT_BF16),
        q_norm: pypto.Tensor([1, 1, head_dim], norm_dtype),
        k_norm: pypto.Tensor([1, 1, head_dim], norm_dtype),
        o_proj: pypto.Tensor([hidden_size, heads * head_dim], pypto.DT_BF16),
        mixer_out_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        post_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        gate_proj: pypto.Tensor([intermediate, hidden_size], pypto.DT_BF16),
        up_proj: pypto.Tensor([intermediate, hidden_size], pypto.DT_BF16),
        down_proj: pypto.Tensor([hidden_size, intermediate], pypto.DT_BF16),
        mlp_out_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        rotation: pypto.Tensor([head_dim, head_dim], pypto.DT_BF16),
        rotation_fp16: pypto.Tensor([head_dim, head_dim], pypto.DT_FP16),
        mask: pypto.Tensor([queries, 2 * step + unit], pypto.DT_FP32),
        left_behind: pypto.Tensor([pypto.DYNAMIC, 2 * step + unit], pypto.DT_FP32),
        cos: pypto.Tensor([pypto.DYNAMIC, half], pypto.DT_FP32),
        sin: pypto.Tensor([pypto.DYNAMIC, half], pypto.DT_FP32),
        tile_tokens: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        back: pypto.Tensor([pypto.DYNAMIC, head_dim], pypto.DT_FP32),
        slot: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        position: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        sequence: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        block_table: pypto.Tensor([pypto.DYNAMIC, pypto.DYNAMIC], pypto.DT_INT32),
        k_forward: parameter(side_k.domain[0]),
        k_numbers: parameter(side_k.domain[1]),
        k_places: parameter(side_k.domain[2]),
        k_rows: parameter(side_k.domain[3]),
        k_turns: parameter(side_k.domain[4]),
        k_vectors: parameter(side_k.vectors),
        k_scales: parameter(side_k.scale_row),
        v_vectors: parameter(side_v.vectors),
        v_scales: parameter(side_v.scale_row),
        k_kept: pypto.Tensor([pypto.DYNAMIC, head_dim], pypto.DT_BF16),
        v_kept: pypto.Tensor([pypto.DYNAMIC, head_dim], pypto.DT_BF16),
        kept_begin: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        kept_seen: pypto.Tensor([pypto.DYNAMIC, span], pypto.DT_FP32),
        tile_keeps: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        keep_token: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        keep_row: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        sinks: pypto.Tensor([1, sinks_width], pypto.DT_FP32),
        out: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_BF16),
    ):
        domain_k = Domain(rotation, rotation_fp16, k_forward, k_numbers, k_places, k_rows, k_turns)
        stored_k = kernel_k(side_k, k_vectors, k_scales, domain_k, kept is not None)
        stored_v = kernel_v(side_v, v_vectors, v_scales, Domain(rotation, rotation_fp16))
        for tile in pypto.loop(tile_tokens.shape[0], name="TILE", idx_name="tile"):
            base = tile * rows
            tokens = tile_tokens[tile]
            q = pypto.tensor([rows, heads, head_dim], stored_k.buffer_dtype, "q")
            k = pypto.tensor([rows, kv_heads, head_dim], pypto.DT_FP32, "k")
            v = pypto.tensor([rows, kv_heads, head_dim], pypto.DT_FP32, "v")
            q_ready = stored_k.room_for_queries(q, rows, heads)
            new_k = stored_k.room(vectors, "new_k")
            new_v = stored_v.room(vectors, "new_v")
            attended = pypto.tensor([rows, heads, head_dim], pypto.DT_BF16, "attended")
            for _ in pypto.loop(1, name="QKV", idx_name="i1"):
                x = hidden_norm(pypto.view(hidden, [rows, hidden_size], [base, 0]), input_norm, hidden_size, norm.eps)
                c = pypto.view(cos, [rows, half], [base, 0])
                s = pypto.view(sin, [rows, half], [base, 0])
                weights = ((q_proj, k_proj, v_proj), (q_bias, k_bias, v_bias), (q_norm, k_norm))
                _project_qkv(x, weights, c, s, (q, k, v), stored_k.query, layer, tiles)
            for _ in pypto.loop(1, name="QUANTIZE", idx_name="i2"):
                by = pypto.view(back, [rows, head_dim], [base, 0]) if side_k.layout else None
                _quantize(k, stored_k, new_k, by, layer)
                _quantize(v, stored_v, new_v, None, layer)
            for i in pypto.loop(tokens, name="APPEND", idx_name="i3"):
                stored_k.append(i, slot[base + i], new_k, kv_heads)
                stored_v.append(i, slot[base + i], new_v, kv_heads)
            if kept is not None:
                for i in pypto.loop(tile_keeps[tile], name="KEEP", idx_name="i6"):
                    keep(k, k_kept, keep_token[2 * base + i], keep_row[2 * base + i], kv_heads, window)
                    keep(v, v_kept, keep_token[2 * base + i], keep_row[2 * base + i], kv_heads, window)
            for _ in pypto.loop(1, name="ROTATE", idx_name="i4"):
                _ready(q, stored_k, q_ready, attended, layer)
            # A barrier: PyPTO remembers one writer of a cache of dynamic length, so that of all APPENDs only the last would
            # precede the KEYS that read them.
            units = (tokens + unit - 1) // unit
            for u in pypto.loop(units, name="UNIT", idx_name="u", submit_before_loop=True):
                first = base + u * unit
                start = position[first]
                # Of the packed keys a query sees those that it does not see in BF16.
                packed = (start - tail + (tokens - u * unit).min(unit)).max(1)
                first_step = _first_step(start, packed, shape)
                for g in pypto.loop(kv_heads // at_once, name="HEADS", idx_name="g"):
                    softmax = softmaxes(shape)
                    for t in pypto.loop(first_step, (packed + step - 1) // step, name="KEYS", idx_name="t"):
                        place = StepPlace(block_table, sequence[first], t * (step // BLOCK), g * at_once)
                        seen, gone = start - tail - t * step, start - newest - t * step
                        queries_of_unit = _queries(q_ready, stored_k.query_width, u * unit, g * at_once, shape)
                        if pypto.is_loop_begin(t):
                            also = _sink_mask(sinks, first_step, shape) if has_sinks else None
                            masks = _masks((mask, left_behind), seen, gone, also, shape)
                            attend_step(softmax, queries_of_unit, stored_k, stored_v, place, masks, shape, first=True)
                        else:
                            masks = _masks((mask, left_behind), seen, gone, None, shape)
                            attend_step(softmax, queries_of_unit, stored_k, stored_v, place, masks, shape, first=False)
                        if pypto.is_loop_end(t):
                            in_bf16 = None
                            if kept is not None:
                                plain_queries = _queries(q, head_dim, u * unit, g * at_once, shape)
                                seen_kept = pypto.view(kept_seen, [queries, span], [first * shape.group, 0])
                                row = kept_begin[first] + g * at_once * window
                                in_bf16 = WindowSides(kept, k_kept, v_kept, plain_queries, row, seen_kept)
                            _finish(softmax, stored_v, in_bf16, attended, u * unit, g * at_once, shape)
            for _ in pypto.loop(1, name="MLP", idx_name="i5"):
                pypto.set_vec_tile_shapes(64, head_dim)
                projected = tiles.project(pypto.reshape(attended, [rows, heads * head_dim]), o_proj)
                before = pypto.view(hidden, [rows, hidden_size], [base, 0])
                weights = ((mixer_out_norm, post_norm, mlp_out_norm), (gate_proj, up_proj, down_proj))
                pypto.assemble(_rest_of_layer(projected, tiles, before, weights, layer), [base, 0], out)

    return decoder_layer


def build_head(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated head of a `HeadProgram`: tiles of tokens, and within each the vocabulary a piece at a time."""
    hidden_size, eps, vocab, piece, rows = shape.hidden_size, shape.rms_norm_eps, shape.vocab_size, shape.piece, shape.rows
    tiles = Tiles(rows)
    norm_dtype = pypto.DT_FP32 if shape.plus_one else pypto.DT_BF16

    @pypto.frontend.jit(**options)
    def head(
        hidden: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_BF16),
        final_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        lm_head: pypto.Tensor([vocab, hidden_size], pypto.DT_BF16),
        logits: pypto.Tensor([pypto.DYNAMIC, vocab], pypto.DT_FP32),
    ):
        for tile in pypto.loop(hidden.shape[0] // rows, name="TILE", idx_name="tile"):
            normed = pypto.tensor([rows, hidden_size], pypto.DT_BF16, "normed")
            for _ in pypto.loop(1, name="NORM", idx_name="i1"):
                normed[:] = hidden_norm(
                    pypto.view(hidden, [rows, hidden_size], [tile * rows, 0]), final_norm, hidden_size, eps
                )
            for i in pypto.loop((vocab + piece - 1) // piece, name="VOCAB", idx_name="i"):
                # The last piece overlaps the one before it where the vocabulary is no multiple.
                begin = (i * piece).min(vocab - piece)
                part = tiles.project(normed, pypto.view(lm_head, [piece, hidden_size], [begin, 0]))
                tiles.elementwise()
                pypto.assemble(pypto.clone(part), [tile * rows, begin], logits)

    return head
