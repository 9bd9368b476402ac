"""From weights and batches to the arguments of the programs: everything that stays outside of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from haarkv.models.base import DecoderModel
from haarkv.models.qwen3_14b.npu.programs import BLOCK, HeadProgram, LayerProgram
from haarkv.tq_ops.formats.stretches import RopeShift
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sides import HIDDEN, READS, Keeping, WindowShape, keeping, layer_sides, turns_of_tokens, zero_shift_rows
from haarkv.tq_ops.weight import dense


@dataclass(frozen=True)
class Tiling:
    """A ragged batch laid out in tiles of rows.

    A tile holds tokens of one sequence in prefill; in decode, one token of each of several sequences. Rows behind a tile's
    tokens are padding: they are computed and go nowhere.

    Attributes:
        row: [T] int64, each token's row.
        rows: in all, a multiple of the program's.
        tile_tokens: [tiles] int32.
        tokens: name -> [rows] int32 and so on: what the program wants to know of each token.
        block_table: [B, n] int32, -1 pads, n a multiple of a step's blocks.
        batch: that was laid out.
    """

    row: Tensor
    rows: int
    tile_tokens: Tensor
    tokens: dict[str, Tensor]
    block_table: Tensor
    batch: Batch
    _window_arguments: dict[WindowShape, dict[str, Tensor]] = field(default_factory=dict, init=False)
    _undo_rows: dict[RopeShift, Tensor] = field(default_factory=dict, init=False)

    def spread(self, values: Tensor) -> Tensor:
        """[T, …] -> [rows, …], zeros in the padding."""
        out = values.new_zeros(self.rows, *values.shape[1:])
        out[self.row] = values
        return out


def tile(batch: Batch, program: LayerProgram, rope: tuple[Tensor, Tensor]) -> Tiling:
    """Lay a batch out for a program.

    Args:
        batch: with the slots and the block table of its layer, `PagedKVCache.placed`.
        rope: cos and sin [T, D/2] fp32 of the batch's positions.
    """
    starts = batch.query_start_loc.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    # Where units are single tokens, a tile's rows may belong to different sequences.
    runs = lengths if program.attention.unit_tokens > 1 else [sum(lengths)]
    rows, counts, base = [], [], 0
    for run in runs:
        for begin in range(0, run, program.rows):
            count = min(program.rows, run - begin)
            rows.append(torch.arange(base, base + count))
            counts.append(count)
            base += program.rows
    device = batch.positions.device
    row = torch.cat(rows).to(device)
    per_token = {
        "slot": batch.slot_mapping.int(),
        "position": batch.positions.int(),
        "sequence": torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)).to(device),
        "cos": rope[0],
        "sin": rope[1],
    }
    blocks = program.attention.step_tokens // BLOCK
    table = pad(batch.block_table, (0, -batch.block_table.shape[1] % blocks), value=-1).contiguous()
    tiling = Tiling(row, base, torch.tensor(counts, dtype=torch.int32, device=device), {}, table, batch)
    tiling.tokens.update({name: tiling.spread(values) for name, values in per_token.items()})
    return tiling


def layer_constants(model: DecoderModel, index: int) -> dict[str, Tensor]:
    """A layer's arguments that never change: weights and rotation, on the model's device. What it lacks is zeros that nobody
    reads."""
    weights, head_dim = model.weights.layers[index], model.config.heads.head_dim
    fields, like = set(weights), weights["input_norm"]
    rotation = READS.built_in(head_dim).transform.matrix(index, head_dim).to(like.device).contiguous()

    def row(name: str, size: int) -> Tensor:
        if name in fields:
            return weights[name].view(1, -1)
        return torch.zeros(1, size, dtype=weights["q_proj"].dtype if name.endswith("bias") else like.dtype, device=like.device)

    return {
        "input_norm": weights["input_norm"].view(1, -1),
        "q_proj": weights["q_proj"],
        "k_proj": weights["k_proj"],
        "v_proj": weights["v_proj"],
        **{f"{x}_bias": row(f"{x}_bias", weights[f"{x}_proj"].shape[0]).view(1, -1, head_dim) for x in "qkv"},
        **{f"{x}_norm": row(f"{x}_norm", head_dim).unsqueeze(0) for x in "qk"},
        "o_proj": weights["o_proj"],
        **{name: row(name, model.config.hidden_size) for name in ("mixer_out_norm", "post_norm", "mlp_out_norm")},
        "gate_proj": weights["gate_proj"],
        "up_proj": weights["up_proj"],
        "down_proj": weights["down_proj"],
        "rotation": rotation,
        "rotation_fp16": rotation.to(torch.float16),
    }


def head_constants(model: DecoderModel, program: HeadProgram) -> list[dict[str, Tensor]]:
    """The head's arguments that never change, for each slice of the vocabulary; the last is padded with rows of zeros."""
    norm = model.weights.final_norm.view(1, -1)
    slices = torch.split(dense(model.weights.lm_head), program.vocab_size)
    missing = program.vocab_size - slices[-1].shape[0]
    padded = [*slices[:-1], pad(slices[-1], (0, 0, 0, missing)) if missing else slices[-1]]
    return [{"final_norm": norm, "lm_head": part} for part in padded]


def cache_arguments(cache: PagedKVCache, layer: int) -> dict[str, Tensor]:
    """A layer's cache as its program sees it, the very bytes."""
    k, v = layer_sides(cache.plan, layer, cache.kv[layer].shape.head_dim)
    return {**k.tensors("k", cache.kv[layer].k.fields), **v.tensors("v", cache.kv[layer].v.fields)}


def window_arguments(program: LayerProgram, tiling: Tiling, cache: PagedKVCache, layer: int) -> dict[str, Tensor]:
    """What a layer's program takes of tokens in BF16: the very memory, and places, made once for all layers alike."""
    shape, (k, v) = program.kept, cache.kv[layer].windows
    if shape is None or k is None or v is None:
        return _no_window(program.attention.step_tokens, program.attention.head_dim, tiling.row.device)
    if shape not in tiling._window_arguments:
        tiling._window_arguments[shape] = _places(program, shape, tiling, keeping(k, shape, tiling.batch))
    places = tiling._window_arguments[shape]
    return {f"{name}_kept": side.vectors.view(-1, side.vectors.shape[-1]) for name, side in (("k", k), ("v", v))} | places


def _places(program: LayerProgram, shape: WindowShape, tiling: Tiling, token_places: Keeping) -> dict[str, Tensor]:
    group, rows, device = program.attention.group, program.rows, tiling.row.device
    # Rows of padding see nothing.
    seen_mask = torch.full((tiling.rows, shape.span), HIDDEN, device=device)
    seen_mask[tiling.row] = token_places.seen
    begin = tiling.spread(token_places.begin)
    # Pairs by tile, each tile with room for two a row.
    row = tiling.row[token_places.token]
    tile, by_tile = (row // rows).sort(stable=True)
    count = torch.bincount(tile, minlength=tiling.rows // rows)
    at = 2 * rows * tile + torch.arange(len(tile), device=device) - (count.cumsum(0) - count)[tile]
    token, place = (torch.zeros(2 * tiling.rows, dtype=torch.int32, device=device) for _ in range(2))
    token[at] = (row % rows)[by_tile].int()
    place[at] = (token_places.begin[token_places.token] + token_places.place)[by_tile].int()
    # With a window the first step of a query may be a later one, in which nothing is hidden: the second half.
    sinks = torch.zeros(1, program.attention.step_tokens * (1 if shape.seen is None else 2), device=device)
    sinks[:, : shape.sink] = HIDDEN
    return {
        "kept_begin": begin.int(), "kept_seen": seen_mask.repeat_interleave(group, 0), "tile_keeps": count.int(),
        "keep_token": token, "keep_row": place, "sinks": sinks,
    }  # fmt: skip


@cache
def _no_window(step: int, head_dim: int, device: torch.device) -> dict[str, Tensor]:
    """What stands for those arguments where nothing stays in BF16: nobody reads them."""
    plain = torch.zeros(1, head_dim, dtype=torch.bfloat16, device=device)
    number = torch.zeros(1, dtype=torch.int32, device=device)
    integers = dict.fromkeys(("kept_begin", "tile_keeps", "keep_token", "keep_row"), number)
    floats = {"kept_seen": torch.zeros(1, head_dim, device=device), "sinks": torch.zeros(1, step, device=device)}
    return {"k_kept": plain, "v_kept": plain, **integers, **floats}


def back_argument(tiling: Tiling, plan: KVPlan, layer: int, head_dim: int) -> Tensor:
    """By what each row's keys are turned back, [rows, D] fp32, once for all layers alike; else a row that nobody reads."""
    turns = plan.k(layer).rope_shift(layer)
    if turns is None:
        return zero_shift_rows(tiling.row.device, head_dim)
    if turns not in tiling._undo_rows:
        tiling._undo_rows[turns] = tiling.spread(turns_of_tokens(turns, tiling.batch.positions))
    return tiling._undo_rows[turns]


def domain_arguments(program: LayerProgram, plan: KVPlan, layer: int, device: torch.device) -> dict[str, Tensor]:
    """What a layer's program takes of learned coordinates, on its device; the same tensors each time."""
    return program.k.domain_tensors(plan.k(layer), layer, device)


def mask_arguments(program: LayerProgram, device: torch.device | None = None) -> dict[str, Tensor]:
    """What a layer's program adds to logits: without a window the second is a row that nobody reads."""
    shape = program.attention
    mask = shape.mask().to(device)
    return {
        "mask": mask,
        "left_behind": torch.zeros_like(mask[:1]) if shape.window is None else shape.left_behind().to(device),
    }


def layer_call(
    program: LayerProgram, constants: dict[str, Tensor], hidden: Tensor, tiling: Tiling, cache: PagedKVCache, layer: int
) -> tuple[list[Tensor], Tensor]:
    """One call of a layer's program.

    Args:
        constants: of `layer_constants` and `mask_arguments`.
        hidden: [rows, hidden] bf16, laid out as the tiling says.
    Returns:
        its arguments in order, and the one among them that becomes the layer's output [rows, hidden].
    """
    out = torch.zeros_like(hidden)
    tensors = {
        **constants,
        **tiling.tokens,
        **domain_arguments(program, cache.plan, layer, hidden.device),
        "back": back_argument(tiling, cache.plan, layer, program.k.head_dim),
        **cache_arguments(cache, layer),
        **window_arguments(program, tiling, cache, layer),
        "hidden": hidden,
        "tile_tokens": tiling.tile_tokens,
        "block_table": tiling.block_table,
        "out": out,
    }
    return order_arguments(program, tensors), out


def head_call(program: HeadProgram, constants: dict[str, Tensor], hidden: Tensor) -> tuple[list[Tensor], Tensor]:
    """One call of the head's program on hidden [N, hidden]: its arguments in order, and the logits [rows, vocab] fp32."""
    hidden = pad(hidden, (0, 0, 0, -hidden.shape[0] % program.rows))
    logits = torch.zeros(hidden.shape[0], program.vocab_size, dtype=torch.float32, device=hidden.device)
    return order_arguments(program, {**constants, "hidden": hidden, "logits": logits}), logits
