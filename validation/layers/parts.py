"""What a layer stores, part by part: packed K and V, the newest tokens in BF16, the first tokens in BF16.

Each of them is a format with places of its own. A layer without K and V has one part, its state (`validation.layers.states`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.tq_ops import formats as kv_formats
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.base import by_token, vector_lengths
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.validation.layers.states import STATE, STATE_STAGES, Fields, StatePart, state_part

Snapshot = dict[str, Fields]
"""Fields by part ("k", "window.k", …, or "state") and field name."""
KV = tuple[Tensor, Tensor]
"""K and V [T, Hkv, D] fp32."""
Where = tuple[Tensor, Tensor, Tensor]
"""Which tokens of a batch go to a part, and the unit and offset of each."""


@dataclass(frozen=True)
class VectorPart:
    """Vectors K or V as a part of what a layer stores.

    Attributes:
        name: "k" or "v", packed; "window.k": the newest tokens in BF16; "sink.k": the first ones.
        fields: the cache's own tensors, [units, Hkv, places of a unit, *]. A unit is a block, or a sequence's row.
        where: places of a batch's tokens.
    """

    name: str
    side: str
    kv_format: KVFormat
    fields: Fields
    where: Callable[[Batch], Where]
    layer: int

    def vectors_to_store(self, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Vectors [n, Hkv, D] that go here of a batch's K and V [T, Hkv, D], as the format quantizes them."""
        tokens = self.where(batch)[0]
        x = (k if self.side == "k" else v)[tokens].transpose(0, 1)
        return self.kv_format.as_stored(x, self.layer, batch.positions[tokens]).transpose(0, 1)

    @property
    def packed(self) -> bool:
        return self.name == self.side

    def take(self, batch: Batch) -> Fields:
        """Host copies of the fields [n, Hkv, *] of a batch's tokens."""
        _, unit, offset = self.where(batch)
        return {name: tensor.cpu()[unit, :, offset] for name, tensor in self.fields.items()}

    def put(self, batch: Batch, fields: Fields) -> None:
        """The inverse of `take`."""
        _, unit, offset = self.where(batch)
        for name, tensor in self.fields.items():
            tensor[unit.to(tensor.device), :, offset.to(tensor.device)] = fields[name].to(tensor.device)

    def changes(self, before: Fields, batch: Batch | None) -> list[str]:
        """Places that changed, in words, other than those of a batch's tokens."""
        changed_mask = torch.stack([_bytes(x).ne(_bytes(before[name])).any(-1) for name, x in self.fields.items()]).any(0)
        if batch is not None:
            _, unit, offset = (index.to(changed_mask.device) for index in self.where(batch))
            changed_mask[unit, offset] = False
        places = changed_mask.flatten().nonzero().flatten().tolist()
        size = changed_mask.shape[1]
        return [f"slot {place}" if self.packed else f"place {place % size} of row {place // size}" for place in places]

    def problem(self, batch: Batch, fields: Fields) -> str:
        return ""

    def decoded(self, batch: Batch, ours: Fields, theirs: Fields) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        """Title, KV head, and both sides' vectors [n, D]; nothing where no token of a batch goes."""
        if len(self.where(batch)[0]):
            side = self.side.upper()
            title = side if self.packed else f"{side} of the {'window' if self.name.startswith('window') else 'sinks'}"
            both = [self.kv_format.dequantize(by_token(fields), self.layer) for fields in (ours, theirs)]
            for head, (x, y) in enumerate(zip(*both, strict=True)):
                yield title, head, x, y


Part = VectorPart | StatePart


def _bytes(tensor: Tensor) -> Tensor:
    """A field's bytes by place: uint8 [units, places, n]. Bytes, since a NaN is not equal to itself."""
    return tensor.reshape(*tensor.shape[:3], -1).contiguous().view(torch.uint8).transpose(1, 2).flatten(2)


def stage_of(part: str, field: str = "") -> str:
    """The stage that stores a field of a part."""
    return f"store_kv.{part}" if part in ("k", "v") else STATE_STAGES.get(field, part)


def cache_parts(cache: PagedKVCache, layer: int) -> Sequence[Part]:
    """Every part of a layer: its state, or packed K and V, windows, sinks."""
    state = state_part(cache, layer)
    return vector_parts(cache, layer) if state is None else [state]


def vector_parts(cache: PagedKVCache, layer: int) -> list[VectorPart]:
    """As `cache_parts`, without the state."""
    if layer not in cache.kv:
        return []

    def slots(batch: Batch) -> Where:
        slot = cache.kv[layer].place(batch).slot_mapping
        return torch.arange(len(slot), device=slot.device), slot // cache.block_size, slot % cache.block_size

    packed = [VectorPart(side, side, one.kv_format, one.fields, slots, layer) for side, one in cache.kv[layer].sides]
    windows, sinks, plain = [], [], kv_formats.get("bf16")
    for side, window in zip("kv", cache.kv[layer].windows, strict=True):
        if window and window.ring:
            newest = {"data": window.vectors[:, :, window.sink :]}
            windows.append(VectorPart(f"window.{side}", side, plain, newest, _in_rows(window.ring), layer))
        if window and window.sink:
            first = {"data": window.vectors[:, :, : window.sink]}
            sinks.append(VectorPart(f"sink.{side}", side, plain, first, _in_rows(window.sink, window.sink), layer))
    return [*packed, *windows, *sinks]


def _in_rows(size: int, end: int | None = None) -> Callable[[Batch], Where]:
    """Tokens at positions before `end`, in rows of `size` places that start over."""

    def where(batch: Batch) -> Where:
        tokens = torch.arange(len(batch.positions), device=batch.positions.device)
        tokens = tokens if end is None else tokens[batch.positions < end]
        return tokens, batch.of_tokens(batch.rows)[tokens], batch.positions[tokens] % size

    return where


def new_cache(plan: KVPlan, config: ModelConfig, num_blocks: int, **how: Any) -> PagedKVCache:
    """An empty cache for a model; `how` is passed to `PagedKVCache`."""
    return PagedKVCache(plan, config.kv_shapes, num_blocks=num_blocks, states=config.state_shapes, **how)


def read_as(
    cache: PagedKVCache, layer: int, *, formats: tuple[KVFormat, KVFormat] | None = None,
    fields: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
    windows: tuple[ResidualWindow | None, ResidualWindow | None] | None = None
) -> PagedKVCache:  # fmt: skip
    """A layer of a cache for attention to read, with other formats, fields or windows."""
    kv = cache.kv[layer]
    return PagedKVCache.over(
        formats or kv.formats, layer, fields or kv.fields, windows or kv.windows, kv.shape.head_dim,
        kv.shape.window, kv.ring,
    )  # fmt: skip


def layer_tensors(cache: PagedKVCache, layer: int) -> Snapshot:
    """A layer's own tensors."""
    return {part.name: part.fields for part in cache_parts(cache, layer)}


def snapshot(cache: PagedKVCache, layer: int) -> Snapshot:
    """A copy of a layer, on the host."""
    return {
        part: {name: tensor.to("cpu", copy=True) for name, tensor in fields.items()}
        for part, fields in layer_tensors(cache, layer).items()
    }


def load(cache: PagedKVCache, layer: int, part_fields: Snapshot) -> None:
    """Copy a snapshot, or another cache's tensors, into a layer."""
    for part, fields in layer_tensors(cache, layer).items():
        for name, tensor in fields.items():
            tensor.copy_(part_fields[part][name])


def take(cache: PagedKVCache, layer: int, batch: Batch) -> Snapshot:
    """Host copies of the fields [n, Hkv, *] of a batch's tokens; of a state the batch's rows."""
    return {part.name: part.take(batch) for part in cache_parts(cache, layer)}


def put(cache: PagedKVCache, layer: int, batch: Batch, part_fields: Snapshot) -> None:
    """The inverse of `take`, for some parts. A state without fields is spoilt: its versions that must not be read."""
    for part in cache_parts(cache, layer):
        if part.name in part_fields:
            part.put(batch, part_fields[part.name])


def quantized(cache: PagedKVCache, layer: int, batch: Batch, k: Tensor, v: Tensor, rotated_as: int | None = None) -> Snapshot:
    """Every part's fields for K and V [T, Hkv, D] fp32; by another layer's rotation, if `rotated_as` names one."""
    part_fields: Snapshot = {}
    for part in vector_parts(cache, layer):
        x = part.vectors_to_store(k, v, batch).transpose(0, 1)
        part_fields[part.name] = by_token(part.kv_format.quantize(x, layer if rotated_as is None else rotated_as))
    return part_fields


# -- Poison ------------------------------------------------------------------------------------------------------------
def poison(cache: PagedKVCache, layer: int, kv: tuple[Tensor, Tensor] | None, batch: Batch) -> Snapshot:
    """Valid K and V far from the right ones, for places about to be written; a state is to be spoilt.

    Opposite vectors of another length fall into opposite levels: reading them too early gives wrong numbers, not NaN.
    """
    if kv is None:
        return {STATE: {}}
    bad_k, bad_v = (torch.where(x == 0, 1.0, -x / 3) for x in kv)
    return quantized(cache, layer, batch, bad_k, bad_v)


# -- Poison for attention ------------------------------------------------------------------------------------------------
# A token that lies both packed and in BF16 must be read in one of the two. The other copy is near the right one and shows
# little when it is read by mistake, so it becomes a key that every query attends to most, with values that are far off;
# likewise tokens that a sliding window hides, and the free slots behind a sequence's end.
_LONGER, _LONGEST = 64.0, 2.0**15
"""Factor of a vector's length, and the most that a length becomes: an FP16 scale holds 65,504."""


def without_unread(
    cache: PagedKVCache, layer: int, part_fields: Snapshot, batch: Batch, lengths: Tensor, q: Tensor
) -> Snapshot:
    """A snapshot of a layer, poisoned where no query q [T, Hq, D] of a batch may read, with `lengths` [B] tokens stored.

    These are packed tokens that all queries see in BF16, those in BF16 that none sees there, tokens that the sliding window
    hides from all, and the free slots of each last block. K there points to where the queries of its KV head do and is 64
    times as long; V is opposite and 64 times as long.
    """
    windows = dict(zip("kv", cache.kv[layer].windows, strict=True))
    new_fields = {part: {name: tensor.clone() for name, tensor in fields.items()} for part, fields in part_fields.items()}
    starts, placed_batch, sliding = batch.query_start_loc.long(), cache.kv[layer].place(batch), cache.kv[layer].shape.window
    for row, length in enumerate(lengths.tolist()):
        queries = slice(int(starts[row]), int(starts[row + 1]))
        toward, token = _toward(q[queries].float(), cache.kv[layer].shape.num_kv_heads), torch.arange(length)
        for part in vector_parts(cache, layer):
            window, direction = windows[part.side], toward if part.side == "k" else None
            if part.packed and (free_slots := _free_slots(cache, layer, part, placed_batch, row)) is not None:
                _drown(part, new_fields[part.name], free_slots[:2], free_slots[2], direction)
            if part.name.startswith("sink") or (window is None and sliding is None):
                continue
            positions = batch.positions[queries]
            unread = token <= int(positions[0]) - sliding if sliding else torch.zeros(length, dtype=torch.bool)
            if window is not None:
                unread |= _unread(window, positions, token, packed=part.packed)
            if window is None or part.packed:
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
    # Tokens leave the window as queries go on. So a token that the first and the last query that can see it do not read is
    # read by no query between. A token before the queries is first seen by the first query, any other by its own.
    older = min(int(queries[0]), len(token))
    by_itself = window.visible(token[older:], len(token)).diagonal(older)
    by_first = torch.cat([window.visible(queries[:1], len(token))[0, :older], by_itself])
    by_last = window.visible(queries[-1:], len(token))[0]
    return by_first & by_last if packed else ~by_first & ~by_last


def _free_slots(
    cache: PagedKVCache, layer: int, part: VectorPart, placed_batch: Batch, row: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Units, offsets and positions behind a sequence's last token in its last block; None if others or groups lie there."""
    length, size = int(placed_batch.seq_lens[row]), cache.block_size
    token = torch.arange(length, -(-length // size) * size)
    if not len(token) or cache.kv[layer].ring is not None or part.kv_format.group_tokens > 1:
        return None
    return placed_batch.block_table[row, token // size].long(), token % size, token


def _toward(q: Tensor, kv_heads: int) -> Tensor:
    """[Hkv, 1, D]: unit vectors whose product with all queries [t, Hq, D] of a KV head is the same, by least squares."""
    by_head = q.view(len(q), kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
    direction = torch.linalg.lstsq(by_head, by_head.new_ones(*by_head.shape[:2], 1), rcond=0.01).solution
    return torch.nn.functional.normalize(direction.mT, dim=-1)


def _drown(
    part: VectorPart, fields: dict[str, Tensor], at: tuple[Tensor, Tensor], positions: Tensor, toward: Tensor | None
) -> None:
    """Replace vectors by longer ones: opposite, or of a given direction."""
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
