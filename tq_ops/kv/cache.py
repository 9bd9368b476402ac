"""The KV cache of all layers: paged K and V in any format, residual windows, and states of other mixers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.layer import LayerKV, Side, fields_in
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.recurrent import LayerState, Recurrent, StateShape
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, WINDOW_CHUNK, WINDOW_ROOM, KVShape, Shapes, blocks_for, each
from haarkv.tq_ops.memory import ask_for_large_pages


@dataclass(frozen=True, eq=False)
class LayerView:
    """The argument `at` of ops: one layer of a cache, and the new tokens of a forward.

    Attributes:
        layer: the layer's index, which chooses the rotation.
        batch: the new tokens, with the slots and the block table of this layer.
    """

    cache: PagedKVCache
    layer: int
    batch: Batch

    @property
    def kv(self) -> LayerKV:
        return self.cache.kv[self.layer]

    @property
    def state(self) -> Recurrent:
        return cast(Recurrent, self.cache.states[self.layer])

    def require_room(self) -> None:
        """Raise a ValueError if a sequence has more new tokens than the layer has room for now."""
        self.cache.require_room(self.batch, self.layer)

    def require_slots(self) -> None:
        """Raise an IndexError if a slot is outside the layer; waits for the device."""
        slots, most = self.batch.slot_mapping, self.kv.num_slots
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < most:
            raise IndexError(f"slots must lie in 0 … {most - 1}")

    def write(self, k: Tensor, v: Tensor) -> None:
        """Quantize and store K (after RoPE) and V, each [T, Hkv, D] fp32 or bf16.

        Raises:
            IndexError, ValueError: as `require_slots` and `require_room`.
            NonFiniteError: naming layer, side, token, slot and KV head; nothing was written.
        """
        self.require_slots()
        self.require_room()
        self.kv.write(k, v, self.batch)


class PagedKVCache:
    """The memory of every layer: K and V in blocks of tokens, residual windows, and recurrent states.

    Each layer has one tensor for each field of its format, [num_blocks, Hkv, block_size / G, *field.shape]; the format stores
    G tokens together. The codes of one head in one block are contiguous: the tile that a fused kernel loads. Slot s is row
    s % block_size of block s // block_size.

    Layers without a sliding window use the blocks of `PagedSequences`, and keep all tokens. A layer with a sliding window has
    a ring of blocks for each sequence: new tokens overwrite old ones (`KVShape.ring_blocks`, `Batch.in_ring`).

    Args:
        plan: formats of each layer's K and V.
        shapes: shape of each layer's K and V, None for a layer without them; or one shape for all layers.
        num_blocks: blocks of each layer without a sliding window.
        num_rows: the most sequences at a time; `num_blocks` by default.
        row_blocks: the most blocks of one sequence; `num_blocks` by default.
        chunk: with a tail, the most new tokens of a sequence in one forward.
        room: the tail's ring holds R + `room` tokens; `open` makes it larger while a layer runs. `chunk` by default.
        ring_chunk: the most new tokens that a sliding-window layer stores at once: `RING_CHUNK` by default. With a tail:
            at most `chunk`; if not given, also at most `BLOCK_SIZE`, which seldom takes another block.
        pages: layer -> existing memory laid out as in `kv.layer`, [num_blocks, page_bytes] uint8; no other layer has K, V.
        states: layer -> shape of its recurrent state.
    Attributes:
        kv: layer -> its K and V.
        states: layer -> its memory: an entry of `kv` or a recurrent state.
        most_new_tokens: the most new tokens of a sequence in one batch; None for any number.
        most_undone: the most tokens of a sequence that can be taken back; None for any number. The least of three limits: the
            tokens that a ring of blocks holds beyond the window - 1 that the next query sees; the tail's `room`, if it is less
            than `chunk`; and the versions of recurrent states, but one.
    Raises:
        InputError: a format has no layout for a layer's head_dim, block size or number of KV heads.
    """

    def __init__(
        self,
        plan: KVPlan,
        shapes: Shapes,
        *,
        num_blocks: int,
        num_rows: int | None = None,
        row_blocks: int | None = None,
        chunk: int = WINDOW_CHUNK,
        room: int | None = None,
        ring_chunk: int | None = None,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str = "cpu",
        pages: Mapping[int, Tensor] | None = None,
        states: Mapping[int, StateShape] | None = None,
    ) -> None:
        self.plan, self.shapes = plan, each(shapes, len(plan.layers))
        plan.require_layout(self.shapes, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_rows = num_blocks if num_rows is None else num_rows
        self.chunk, self.room, self.device = chunk, chunk if room is None else min(room, chunk), torch.device(device)
        self._row_blocks, self._states = row_blocks or num_blocks, states
        default_chunk = plan.ring_chunk(RING_CHUNK, min(chunk, BLOCK_SIZE))
        self._ring_chunk = default_chunk if ring_chunk is None else plan.ring_chunk(ring_chunk, chunk)
        self.states: dict[int, LayerState] = {}
        self.kv: dict[int, LayerKV] = {}
        for layer in range(len(plan.layers)) if pages is None else pages:
            if (shape := self.shapes[layer]) is not None:
                self.kv[layer] = self._layer(layer, shape, None if pages is None else pages[layer])
        self.states |= self.kv
        self.states |= {layer: Recurrent(shape, self.num_rows, self.device) for layer, shape in (states or {}).items()}
        tails = any(window.ring for kv in self.kv.values() for window in kv.windows if window)
        self._widens = tails and self.room < chunk
        rings = [(kv.ring, kv.shape.window) for kv in self.kv.values() if kv.ring is not None and kv.shape.window is not None]
        self.most_new_tokens = chunk if tails else self._ring_chunk if rings else None
        undone = [shape.versions - 1 for shape in (states or {}).values()] + [self.room] * self._widens
        undone += [ring * block_size - window + 1 for ring, window in rings if ring < self._row_blocks]
        self.most_undone = min(undone, default=None)

    def empty_like(self, device: torch.device | str) -> PagedKVCache:
        """An empty cache of the same plan and sizes."""
        return PagedKVCache(
            self.plan, self.shapes, num_blocks=self.num_blocks, num_rows=self.num_rows, row_blocks=self._row_blocks,
            chunk=self.chunk, room=self.room, ring_chunk=self._ring_chunk, block_size=self.block_size, device=device,
            states=self._states,
        )  # fmt: skip

    @classmethod
    def over(
        cls,
        formats: tuple[KVFormat, KVFormat],
        layer: int,
        fields: tuple[dict[str, Tensor], dict[str, Tensor]],
        windows: tuple[ResidualWindow | None, ResidualWindow | None],
        head_dim: int,
        window: int | None = None,
        ring: int | None = None,
    ) -> PagedKVCache:
        """A one-layer cache over existing memory, for attention to read. It allocates nothing.

        Args:
            layer: the index of the only layer; chooses the rotation.
            fields: K's and V's, each [num_blocks, Hkv, block_size / group_tokens, *field.shape].
            window: length of the sliding window in tokens; None without one.
            ring: blocks in each sequence's ring; None if the memory is no rings.
        """
        num_blocks, num_kv_heads, groups = next(iter(fields[0].values())).shape[:3]
        block_size, shape = groups * formats[0].group_tokens, KVShape(num_kv_heads, head_dim, window)
        cache = cls(
            KVPlan((formats,) * (layer + 1)), shape, num_blocks=num_blocks,
            block_size=block_size, device=next(iter(fields[0].values())).device, pages={},
        )  # fmt: skip
        k, v = map(Side, formats, fields, windows)
        cache.kv[layer] = LayerKV(layer, shape, k, v, block_size, ring)
        cache.states[layer] = cache.kv[layer]
        return cache

    def _layer(self, layer: int, shape: KVShape, pages: Tensor | None) -> LayerKV:
        pair = self.plan.layers[layer]
        ring = None if pages is not None else shape.ring_blocks(self._row_blocks, self.block_size, self._ring_chunk)
        if pages is None:
            blocks = self.num_blocks if ring is None else self.num_rows * ring
            fields = self._allocate(pair[0], shape, blocks), self._allocate(pair[1], shape, blocks)
        else:
            fields = fields_in(pages, pair, shape.num_kv_heads, shape.head_dim, self.block_size)
        k, v = map(Side, pair, fields, (self._new_window(kv_format, shape) for kv_format in pair))
        return LayerKV(layer, shape, k, v, self.block_size, ring)

    def _allocate(self, kv_format: KVFormat, shape: KVShape, blocks: int) -> dict[str, Tensor]:
        groups = self.block_size // kv_format.group_tokens
        tensors = {
            name: torch.empty(blocks, shape.num_kv_heads, groups, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in kv_format.fields(shape.head_dim).items()
        }
        for tensor in tensors.values():
            if self.device.type == "cpu":  # attention reads the tensor from end to end
                ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
            tensor.zero_()
        return tensors

    def _new_window(self, kv_format: KVFormat, shape: KVShape) -> ResidualWindow | None:
        if not self.plan.has_window(kv_format):
            return None
        return ResidualWindow(
            tail=self.plan.tail(kv_format), sink=self.plan.sink, group=kv_format.group_tokens,
            ring=self.plan.ring_tokens(kv_format, self.room), num_rows=self.num_rows, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, device=self.device,
        )  # fmt: skip

    def view(self, layer: int, batch: Batch) -> LayerView:
        """The argument `at` of ops for a layer and a batch, with the ring that the layer has now (`open` makes it larger)."""
        kv = self.kv.get(layer)
        return LayerView(self, layer, batch if kv is None else kv.place(batch))

    @contextmanager
    def open(self, layer: int, batch: Batch, always: bool = False) -> Iterator[LayerView]:
        """A layer whose tail has room for all new tokens of a batch. Store K and V and attend within the `with` block.

        If the new tokens do not fit, a larger ring replaces the layer's ring within the block. At exit the newest tokens are
        copied back to the small ring; after an error, none are. Only `Batch.at_most` waits for a device.

        Args:
            always: use the larger ring even if the tokens fit, so that a compiled program always sees the same size.
        """
        small = self.kv.get(layer)
        if not self._widens or small is None or not self._rooms(layer) or (batch.at_most(self.room) and not always):
            yield self.view(layer, batch)
            return
        self.kv[layer] = wide = small.wider(self._most(layer) or self.chunk, batch)
        try:
            yield self.view(layer, batch)
            small.take_newest(wide, batch)
        finally:
            self.kv[layer] = small

    def run(self, layer: int, batch: Batch, op: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """`op(view, *rows)` [T, ...] over an open layer; in pieces if its ring of blocks is too small for all new tokens.

        Args:
            rows: tensors [T, ...]; each piece gets the rows of its tokens.
        Raises:
            ValueError: more new tokens of a sequence than `most_new_tokens`.
        """
        self.require_room(batch)
        kv = self.kv.get(layer)
        if kv is None or kv.ring is None or batch.at_most(self._ring_chunk):
            with self.open(layer, batch) as view:
                return op(view, *rows)
        out: Tensor | None = None
        for tokens, piece in batch.cut(self._ring_chunk):
            with self.open(layer, piece) as view:
                part = op(view, *(x[tokens] for x in rows))
            out = part.new_empty(len(batch.positions), *part.shape[1:]) if out is None else out
            out[tokens] = part
        assert out is not None
        return out

    def require_room(self, batch: Batch, layer: int | None = None) -> None:
        """Refuse a batch with too many new tokens for one forward, or for the present ring of `layer`. Only `Batch.at_most`
        waits for a device.

        Raises:
            ValueError: too many new tokens of a sequence.
        """
        if (most := self.most_new_tokens) is not None and not batch.at_most(most):
            raise ValueError(f"this cache takes at most {most} new tokens of a sequence at a time: it has a tail or a ring")
        if layer is None:
            return
        if (most := self._most(layer)) is not None and not batch.at_most(most):
            raise ValueError(f"layer {layer} takes {most} new tokens of a sequence at a time; store more by `run`")
        rooms = self._rooms(layer)
        if rooms and not batch.at_most(most := min(rooms)):
            raise ValueError(f"layer {layer} keeps room for {most} new tokens of a sequence; store more within `open`")

    def _most(self, layer: int) -> int | None:
        """The most new tokens of a sequence that an open layer stores at a time; None for any number."""
        return self.most_new_tokens if self.kv[layer].ring is None else self._ring_chunk

    def _rooms(self, layer: int) -> list[int]:
        """The number of new tokens that fit into the ring besides the tail, for K and for V."""
        return [window.ring - window.tail for window in self.kv[layer].windows if window and window.ring]

    def has_room(self, batch: Batch) -> bool:
        """Whether every layer can store a batch without a larger ring (`open`)."""
        return not self._widens or batch.at_most(self.room)

    @property
    def has_rows(self) -> bool:
        """Whether the cache stores anything by `Batch.rows`: residual windows, rings or states."""
        return len(self.states) > len(self.kv) or any(kv.ring is not None or any(kv.windows) for kv in self.kv.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' memory, whether allocated here or given as pages."""
        return sum(state.nbytes for state in self.states.values())


def cache_bytes(plan: KVPlan, tokens: int, shapes: Shapes, sequences: int = 1, state_bytes: int = 0) -> int:
    """Bytes that a `PagedKVCache` allocates for sequences of `tokens` each: whole blocks, residual windows, rings and states.

    Args:
        state_bytes: bytes of one sequence's recurrent states; one more row of states is allocated for padding.
    """
    kinds = Counter(zip(each(shapes, len(plan.layers)), plan.layers, strict=True))
    keys_and_values = sum(
        count * PagedKVCache(
            replace(plan, layers=(pair,)), shape, num_blocks=blocks_for(tokens), num_rows=1, room=WINDOW_ROOM,
            ring_chunk=plan.ring_chunk(), device="meta",
        ).nbytes
        for (shape, pair), count in kinds.items() if shape is not None
    )  # fmt: skip
    return sequences * keys_and_values + (sequences + 1) * state_bytes


def tokens_that_fit(plan: KVPlan, room: float, shapes: Shapes, state_bytes: int = 0) -> int:
    """The most tokens of one sequence, in whole blocks, with `cache_bytes` of at most `room` bytes."""

    def too_many(blocks: int) -> bool:
        return cache_bytes(plan, blocks * BLOCK_SIZE, shapes, state_bytes=state_bytes) > room

    return bisect_left(range(1, _MOST_BLOCKS), True, key=too_many) * BLOCK_SIZE


_MOST_BLOCKS = 2**24
"""An upper limit for the search: a sequence of 2**31 tokens."""
