"""From weights and batches to the arguments of the programs."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from haarkv.tq_ops.npu.sides import HIDDEN, READS, Keeping, WindowShape, keeping, key_turns, layer_sides, turns_of_tokens
from haarkv.tq_ops.weight import dense


@dataclass(frozen=True)
class Tiling:
    """A ragged batch laid out in tiles of rows; rows behind a tile's tokens are padding.

    A tile holds tokens of one sequence in prefill; in decode, one token of each of several sequences.

    Attributes:
        row: [T] int64, each token's row.
        rows: in all, a multiple of the program's.
        tile_tokens: [tiles] int32.
        tokens: arguments of a program by token, such as `slot` [rows] int32.
        block_table: [B, n] int32, -1 pads, n a multiple of a step's blocks.
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
    """A batch, of its layer's slots and block table, laid out for a program; `rope`: cos and sin [T, D/2] fp32."""
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
    """A layer's weights and rotation, on the model's device."""
    weights, head_dim = model.weights.layers[index], model.config.heads.head_dim
    device = weights["input_norm"].device
    rotation = READS.built_in(head_dim).transform.matrix(index, head_dim).to(device).contiguous()
    views = {f"{x}_bias": (1, -1, head_dim) for x in "qkv"} | {f"{x}_norm": (1, 1, head_dim) for x in "qk"}
    tensors = {name: weight if weight.ndim > 1 else weight.view(views.get(name, (1, -1))) for name, weight in weights.items()}
    return {**tensors, "rotation": rotation, "rotation_fp16": rotation.to(torch.float16)}


def head_constants(model: DecoderModel, program: HeadProgram) -> list[dict[str, Tensor]]:
    """The head's weights for each slice of the vocabulary; the last is padded with rows of zeros."""
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
    """A layer's tokens in BF16, the very memory, and their places, which layers alike share."""
    shape, (k, v) = program.kept, cache.kv[layer].windows
    if shape is None or k is None or v is None:
        return {}
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


def back_argument(tiling: Tiling, plan: KVPlan, layer: int) -> dict[str, Tensor]:
    """By what each row's learned keys are turned back, [rows, D] fp32, once for all layers alike."""
    turns = key_turns(plan.k(layer), layer, tiling.tokens["cos"].shape[1] * 2)
    if turns is None:
        return {}
    if turns not in tiling._undo_rows:
        tiling._undo_rows[turns] = tiling.spread(turns_of_tokens(turns, tiling.batch.positions))
    return {"back": tiling._undo_rows[turns]}


def mask_arguments(program: LayerProgram, device: torch.device | None = None) -> dict[str, Tensor]:
    """What a layer's program adds to logits."""
    shape = program.attention
    masks = {"mask": shape.mask()} | ({} if shape.window is None else {"left_behind": shape.left_behind()})
    return {name: mask.to(device) for name, mask in masks.items()}


def layer_call(
    program: LayerProgram, constants: dict[str, Tensor], hidden: Tensor, tiling: Tiling, cache: PagedKVCache, layer: int
) -> tuple[list[Tensor], Tensor]:
    """A call of a layer on hidden [rows, hidden] bf16, by `layer_constants` and `mask_arguments`: arguments, output."""
    out = torch.zeros_like(hidden)
    tensors = {
        **constants,
        **tiling.tokens,
        **program.k.domain_tensors(cache.plan.k(layer), layer, hidden.device),
        **back_argument(tiling, cache.plan, layer),
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
