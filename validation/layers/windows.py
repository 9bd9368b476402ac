"""What attention may read of tokens that lie both packed and in BF16, and how it is made heard that it reads something else.

Each query must read such a token in one of the two. The other is near the right one, and shows little when it is read by
mistake. So it becomes what every query attends to most, with values that are far off (`without_unread`); so does what lies
behind a sequence's end.

Where nothing can be replaced, the likeliest slip is a window that ends a token earlier or later, or packed tokens that do and
leave a gap or a token that counts twice. Rounding moves a layer's
output about as far as that, but in another direction: along the slip's own, an executor with it is off by once what the slip
changes (`edges`), one without it by what rounding can give.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import by_token, vector_lengths
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.table import OpTable
from haarkv.validation.layers.parts import Part, Snapshot, cache_parts, read_as
from haarkv.validation.layers.two_parts import Parts, in_parts

_LONGER, _LONGEST = 64.0, 2.0**15
"""Times which a vector's length is what it was; and the length up to which that is done: an FP16 scale holds 65,504."""
SHORT, LONG = "a window one token short", "a window one token long"
TWICE, NOWHERE = "a token both packed and in BF16", "a token that leaves the window unseen"
SLIDES_SHORT, SLIDES_LONG = "a sliding window one token short", "a sliding window one token long"
SLIPS = (SHORT, LONG, TWICE, NOWHERE, SLIDES_SHORT, SLIDES_LONG)


def without_unread(
    cache: PagedKVCache, layer: int, part_fields: Snapshot, batch: Batch, lengths: Tensor, q: Tensor
) -> Snapshot:
    """A layer's cache in which no query of a batch can miss what it must not read.

    K there points to where the queries of its KV head do and is 64 times as long: a query that reads it attends to nothing
    else. V is opposite, and 64 times as long.

    Args:
        part_fields: a snapshot of the layer.
        batch: the queries.
        lengths: [B], tokens of each sequence that are stored.
        q: [T, Hq, D], the queries, not rotated.
    Returns:
        packed tokens that all queries see in BF16, those in BF16 that none sees there, and the rest of each last block,
        replaced.
    """
    windows = dict(zip("kv", cache.kv[layer].windows, strict=True))
    new_fields = {part: {name: tensor.clone() for name, tensor in fields.items()} for part, fields in part_fields.items()}
    starts, placed_batch = batch.query_start_loc.long(), cache.kv[layer].place(batch)
    for row, length in enumerate(lengths.tolist()):
        queries = slice(int(starts[row]), int(starts[row + 1]))
        toward, token = _toward(q[queries].float(), cache.kv[layer].shape.num_kv_heads), torch.arange(length)
        for part in cache_parts(cache, layer):
            window, direction = windows[part.side], toward if part.side == "k" else None
            if part.packed and (free_slots := _free_slots(cache, layer, part, placed_batch, row)) is not None:
                _drown(part, new_fields[part.name], free_slots[:2], free_slots[2], direction)
            if window is None or part.name.startswith("sink"):
                continue
            unread = _unread(window, batch.positions[queries], token, packed=part.packed)
            if part.packed:
                if (ring := cache.kv[layer].ring) is not None:  # where older tokens lay, newer ones do
                    unread &= token >= int(placed_batch.seq_lens[row]) - ring * cache.block_size
                unit, offset = placed_batch.block_table[row, token // cache.block_size].long(), token % cache.block_size
            else:
                unread &= token >= length - window.ring
                unit, offset = batch.rows[row].expand(length), token % max(window.ring, 1)
            if unread.any():
                _drown(part, new_fields[part.name], (unit[unread], offset[unread]), token[unread], direction)
    return new_fields


def _unread(window: ResidualWindow, queries: Tensor, token: Tensor, packed: bool) -> Tensor:
    """[n] bool: tokens of a sequence that no query at these positions reads packed; or in BF16."""
    # Tokens leave the window as queries go on: the first that sees a token and the last one tell for all between. A token
    # before the queries is first seen by the first of them, any other by its own.
    older = min(int(queries[0]), len(token))
    by_itself = window.visible(token[older:], len(token)).diagonal(older)
    by_first = torch.cat([window.visible(queries[:1], len(token))[0, :older], by_itself])
    by_last = window.visible(queries[-1:], len(token))[0]
    return by_first & by_last if packed else ~by_first & ~by_last


def _free_slots(
    cache: PagedKVCache, layer: int, part: Part, placed_batch: Batch, row: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Units, offsets and positions that a sequence's last block has room for behind its last token; None where there are none,
    or where older tokens or several at once lie there."""
    length, size = int(placed_batch.seq_lens[row]), cache.block_size
    token = torch.arange(length, -(-length // size) * size)
    if not len(token) or cache.kv[layer].ring is not None or part.kv_format.group_tokens > 1:
        return None
    return placed_batch.block_table[row, token // size].long(), token % size, token


def _toward(q: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, 1, D]: unit vectors whose product with all queries [t, Hq, D] of a KV head is the same, or as nearly as can be."""
    by_head = q.view(len(q), kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
    direction = torch.linalg.lstsq(by_head, by_head.new_ones(*by_head.shape[:2], 1), rcond=0.01).solution
    return torch.nn.functional.normalize(direction.mT, dim=-1)


def _drown(part: Part, fields: dict[str, Tensor], at: tuple[Tensor, Tensor], positions: Tensor, toward: Tensor | None) -> None:
    """Put longer vectors at some units and offsets, opposite ones or, if a direction is given, of that direction."""
    unit, offset = at
    slot_fields = {name: tensor[unit, :, offset] for name, tensor in fields.items()}
    x = part.kv_format.dequantize(by_token(slot_fields), part.layer)
    length = vector_lengths(x).unsqueeze(-1)
    longer = (_LONGEST / length.clamp(min=1e-30)).clamp(1 / 3, _LONGER)
    opposite = torch.where(x == 0, 1.0, -longer * x)
    if toward is None:
        far = opposite
    else:
        far = part.kv_format.as_stored(torch.where(length == 0, _LONGER, longer * length) * toward, part.layer, positions)
    for name, tensor in by_token(part.kv_format.quantize(far, part.layer)).items():
        fields[name][unit, :, offset] = tensor


# -- Where a window ends ---------------------------------------------------------------------------------------------------
def with_tail(window: ResidualWindow, tail: int) -> ResidualWindow:
    """The same tokens, of which queries see another number in BF16; at least 0."""
    new_window = copy(window)
    new_window.tail = max(tail, 0)
    return new_window


def twice(parts: Parts) -> dict[str, Tensor]:
    """What of `Parts` is another where packed tokens end one too late: the oldest in BF16 counts twice."""
    return {"packed": parts.packed | parts.oldest}


def nowhere(parts: Parts) -> dict[str, Tensor]:
    """The same where they end one too early: the token that has just left the tail is not seen."""
    return {"packed": parts.packed & ~parts.oldest.roll(-1, -1)}


def edges(ops: OpTable, q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> dict[str, Tensor]:
    """What each slip changes attention [T, Hq, D] fp32 by, before it is rounded; empty where no window ends."""
    windows, sliding = cache.kv[layer].windows, cache.kv[layer].shape.window
    has_tail = any(window and window.ring for window in windows)
    slides = sliding is not None and bool((batch.positions >= sliding).any())
    if not has_tail and not slides:
        return {}

    def attend(by: int = 0, sliding_change: int = 0) -> Tensor:
        k, v = (with_tail(window, window.tail + by) if window and window.ring else window for window in windows)
        read = read_as(cache, layer, windows=(k, v), sliding=sliding and sliding + sliding_change)
        return ops.paged_attention(q.float(), read.view(layer, batch), scale)

    right = attend()
    effects = {SHORT: attend(-1) - right, LONG: attend(1) - right} if has_tail else {}
    if slides:
        effects |= {SLIDES_SHORT: attend(sliding_change=-1) - right, SLIDES_LONG: attend(sliding_change=1) - right}
    return effects | (_gaps(q, cache, layer, batch, scale) if has_tail and _same_window(*windows) else {})


def _gaps(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> dict[str, Tensor]:
    """The slips of packed tokens alone, which end too late or too early for those in BF16."""
    parts = in_parts(q, cache, layer, batch, scale)
    assert parts is not None
    right = parts.merge()
    wrong = {TWICE: twice(parts), NOWHERE: nowhere(parts)}
    return {name: parts.ungroup_heads(replace(parts, **change).merge() - right) for name, change in wrong.items()}


def _same_window(k: ResidualWindow | None, v: ResidualWindow | None) -> bool:
    return k is not None and v is not None and (k.tail, k.sink, k.group) == (v.tail, v.sink, v.group)
