"""Decode attention alone, as one PyPTO program, three ways: to verify the scope and to compare designs in the cost model."""
# mypy: ignore-errors

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.attention import (
    BLOCK,
    Place,
    attend_step,
    bf16_as_fp16,
    rotate_queries,
    softmaxes,
    unrotate,
)
from haarkv.tq_ops.npu.kernels.side import Plain
from haarkv.tq_ops.npu.kernels.tq4 import Packed
from haarkv.tq_ops.npu.program import HEAD_DIM
from haarkv.tq_ops.npu.sides import BF16, TQ4

_UNROTATE_CUBE = [128, 128], [128, 128], [128, 128]


class Published(Packed):
    """The same codes, every tile of K and V un-rotated before it is used, as the published kernels do."""

    def __init__(self, codes, scale, rotation):
        super().__init__(TQ4, codes, scale, None)
        self.rotation = rotation

    def tiles(self, place, shape, scope):
        """[step, 128] FP16 of each head, in the model's own domain and without their scale."""
        out = []
        for tile in super().tiles(place, shape, scope):
            pypto.set_cube_tile_shapes(*_UNROTATE_CUBE)
            out.append(pypto.matmul(tile, self.rotation, pypto.DT_FP16, b_trans=True))
        return out


def _sides(variant, k_codes, k_scale, v_codes, v_scale, rotation):
    if variant == "bf16":
        return Plain(BF16, k_codes, k_scale, None), Plain(BF16, v_codes, v_scale, None)
    if variant == "published":
        return Published(k_codes, k_scale, rotation), Published(v_codes, v_scale, rotation)
    return Packed(TQ4, k_codes, k_scale, None), Packed(TQ4, v_codes, v_scale, None)


def _prepare(q, rotation, q_ready, rotation_fp16, variant, rows):
    """Queries as the variant's cube takes them, and the rotation in FP16."""
    pypto.set_vec_tile_shapes(64, HEAD_DIM)
    rotation_fp16[:] = bf16_as_fp16(rotation)
    if variant == "tq4":
        half = bf16_as_fp16(q)
        q_ready[:] = rotate_queries(half, bf16_as_fp16(rotation), rows)
    else:
        q_ready[:] = bf16_as_fp16(q)


def _queries(q, row, shape):
    return [pypto.view(q, [shape.queries, HEAD_DIM], [row + head * shape.queries, 0]) for head in range(shape.heads_at_once)]


def _finish(softmax, rotation_fp16, out, row, variant, shape):
    """Divide, un-rotate where needed, and put every head's rows in their place."""
    for head in range(shape.heads_at_once):
        pypto.set_vec_tile_shapes(16, HEAD_DIM)
        value = softmax[head].result()
        place = [row + head * shape.queries, 0]
        if variant == "tq4":
            pypto.assemble(unrotate(pypto.cast(value, pypto.DT_FP16), rotation_fp16), place, out)
        else:
            pypto.assemble(pypto.cast(value, pypto.DT_BF16), place, out)


def build(program: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated kernel of an `AttentionProgram`."""
    shape, variant, rows = program.shape, program.variant, program.rows
    heads, step, at_once = shape.num_heads, shape.step_tokens, shape.heads_at_once
    width, cache_dtype = (HEAD_DIM, pypto.DT_BF16) if variant == "bf16" else (HEAD_DIM // 2, pypto.DT_INT8)
    converted = variant != "bf16"

    @pypto.frontend.jit(**options)
    def attention(
        q: pypto.Tensor([rows * heads, HEAD_DIM], pypto.DT_BF16),
        k_codes: pypto.Tensor([pypto.DYNAMIC, width], cache_dtype),
        k_scale: pypto.Tensor([pypto.DYNAMIC, BLOCK], pypto.DT_FP16),
        v_codes: pypto.Tensor([pypto.DYNAMIC, width], cache_dtype),
        v_scale: pypto.Tensor([pypto.DYNAMIC, BLOCK], pypto.DT_FP16),
        rotation: pypto.Tensor([HEAD_DIM, HEAD_DIM], pypto.DT_BF16),
        mask: pypto.Tensor([shape.queries, 2 * step + 1], pypto.DT_FP32),
        block_table: pypto.Tensor([pypto.DYNAMIC, pypto.DYNAMIC], pypto.DT_INT32),
        seq_lens: pypto.Tensor([pypto.DYNAMIC], pypto.DT_INT32),
        out: pypto.Tensor([rows * heads, HEAD_DIM], pypto.DT_BF16),
    ):
        q_ready = pypto.tensor([rows * heads, HEAD_DIM], pypto.DT_FP16, "q_ready")
        rotation_fp16 = pypto.tensor([HEAD_DIM, HEAD_DIM], pypto.DT_FP16, "rotation_fp16")
        if converted:
            for _ in pypto.loop(1, name="ROTATE", idx_name="i1"):
                _prepare(q, rotation, q_ready, rotation_fp16, variant, rows * heads)
        for b in pypto.loop(seq_lens.shape[0], name="SEQUENCE", idx_name="b"):
            keys = seq_lens[b]
            for g in pypto.loop(shape.num_kv_heads // at_once, name="HEADS", idx_name="g"):
                softmax = softmaxes(shape)
                row = b * heads + g * at_once * shape.queries
                for t in pypto.loop((keys + step - 1) // step, name="KEYS", idx_name="t"):
                    place = Place(block_table, b, t * (step // BLOCK), g * at_once)
                    hidden_keys = pypto.view(mask, [shape.queries, step], [0, step - (keys - 1 - t * step).min(step)])
                    sides = _sides(variant, k_codes, k_scale, v_codes, v_scale, rotation_fp16)
                    queries = _queries(q_ready if converted else q, row, shape)
                    if pypto.is_loop_begin(t):
                        attend_step(softmax, queries, sides[0], sides[1], place, (hidden_keys,), shape, first=True)
                    else:
                        attend_step(softmax, queries, sides[0], sides[1], place, (hidden_keys,), shape, first=False)
                    if pypto.is_loop_end(t):
                        _finish(softmax, rotation_fp16, out, row, variant, shape)

    return attention
