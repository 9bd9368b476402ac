"""What attention must not read, made to be heard: tokens that lie both packed and in BF16, where no query may read them.

A token lies packed and, for a while, in BF16; each query must read it in one of these. The other is near the right one, and
shows little when it is read by mistake. So it becomes what every query attends to most, with values that are far off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import by_token, lengths_of
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kept import Kept
from haarkv.validation.layers.parts import Part, Stored, parts_of

_LONGER, _LONGEST = 64.0, 2.0**15
"""Times which a vector's length is what it was; and the length up to which that is done: an FP16 scale holds 65,504."""


def without_unread(cache: PagedKVCache, layer: int, stored: Stored, batch: Batch, lengths: Tensor, q: Tensor) -> Stored:
    """A layer's cache in which no query of a batch can miss what it must not read.

    K there points to where the queries of its KV head do and is 64 times as long: a query that reads it attends to nothing
    else. V is opposite, and 64 times as long.

    Args:
        stored: a snapshot of the layer.
        batch: the queries.
        lengths: [B], tokens of each sequence that are stored.
        q: [T, Hq, D], the queries, not rotated.
    Returns:
        packed tokens that all queries see in BF16, and those in BF16 that none sees there, replaced.
    """
    windows = dict(zip("kv", cache.kept(layer), strict=True))
    if not any(windows.values()):
        return stored
    changed = {part: {name: tensor.clone() for name, tensor in of.items()} for part, of in stored.items()}
    starts = batch.query_start_loc.long()
    for row in range(len(lengths)):
        own = slice(int(starts[row]), int(starts[row + 1]))
        toward = _toward(q[own].float(), cache.num_kv_heads)
        token = torch.arange(int(lengths[row]))
        for part in parts_of(cache, layer):
            window = windows[part.side]
            if window is None or part.name.startswith("sink"):
                continue
            unread = _unread(window, batch.positions[own], token, packed=part.packed)
            if part.packed:
                unit, offset = batch.block_table[row, token // cache.block_size].long(), token % cache.block_size
            else:
                unread &= token >= int(lengths[row]) - window.ring
                unit, offset = batch.rows[row].expand(len(token)), token % max(window.ring, 1)
            places = _Places(part, changed[part.name], unit[unread], offset[unread])
            places.replace(layer, toward if part.side == "k" else None)
    return changed


def _unread(window: Kept, queries: Tensor, token: Tensor, packed: bool) -> Tensor:
    """[n] bool: tokens of a sequence that no query at these positions reads packed; or in BF16."""
    # Tokens leave the window as queries go on: the first that sees a token and the last one tell for all between. A token
    # before the queries is first seen by the first of them, any other by its own.
    older = min(int(queries[0]), len(token))
    of_own = window.seen(token[older:], len(token)).diagonal(older)
    of_first = torch.cat([window.seen(queries[:1], len(token))[0, :older], of_own])
    of_last = window.seen(queries[-1:], len(token))[0]
    return of_first & of_last if packed else ~of_first & ~of_last


def _toward(q: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, 1, D]: unit vectors whose product with all queries [t, Hq, D] of a KV head is the same, or as nearly as can be."""
    of_heads = q.view(len(q), kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
    found = torch.linalg.pinv(of_heads, rtol=0.01).sum(-1)
    return torch.nn.functional.normalize(found, dim=-1).unsqueeze(1)


@dataclass(frozen=True)
class _Places:
    """Some places of a part: fields, and unit and offset of each."""

    part: Part
    fields: dict[str, Tensor]
    unit: Tensor
    offset: Tensor

    def replace(self, layer: int, toward: Tensor | None) -> None:
        """Put longer vectors there, opposite ones or, if a direction is given, of that direction."""
        if not len(self.unit):
            return
        kv_format = self.part.kv_format
        found = {name: tensor[self.unit, :, self.offset] for name, tensor in self.fields.items()}
        x = kv_format.dequantize(by_token(found), layer)
        length = lengths_of(x).unsqueeze(-1)
        longer = (_LONGEST / length.clamp(min=1e-30)).clamp(1 / 3, _LONGER)
        if toward is None:
            far = torch.where(x == 0, 1.0, -longer * x)
        else:
            far = torch.where(length == 0, 1.0, longer * length) * toward
        for name, tensor in by_token(kv_format.quantize(far, layer)).items():
            self.fields[name][self.unit, :, self.offset] = tensor
