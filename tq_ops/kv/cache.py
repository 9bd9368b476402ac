"""What all layers of a model remember of some sequences: paged K and V in any format, and states beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.layer import LayerKV, Side, fields_in
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.recurrent import LayerState, Recurrent, StateShape
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, WINDOW_CHUNK, KVShape, SequencePlace, Shapes, blocks_for, each
from haarkv.tq_ops.memory import ask_for_large_pages


class PagedKVCache:
    """The memory of every layer: K and V in blocks of tokens, the tokens that stay in BF16 beside them, and states.

    Each field of a format is one tensor a layer, [num_blocks, Hkv, block_size / G, *field.shape], where G tokens are
    stored together: one head's codes of one block lie together, which is the tile that a fused kernel loads. Slot s is row
    s % block_size of block s // block_size. It is zeroed memory of the cache's own, one tensor a field, or views of `pages`.

    Layers of one shape are a group with one block table. Those that keep all tokens use the blocks that `PagedSequences`
    hands out. Those with a sliding window keep a ring of blocks a row, whose table follows from the rows (`Batch.in_ring`);
    every op asks `placed` for the batch as its layer has it.

    Args:
        plan: how each layer's K and V are stored.
        shapes: of each layer's K and V, None where it has none; or one for all layers.
        num_blocks: blocks of each layer that keeps all tokens.
        num_rows: sequences at a time, where tokens stay in BF16, in rings or in states; as many as blocks unless given.
        row_blocks: blocks of one sequence at most; `num_blocks` unless given.
        chunk: new tokens of a sequence in one forward, where a tail stays in BF16.
        room: of those, as many as each layer keeps room for; more are stored within `with_room`. All of them unless given.
        ring_chunk: new tokens of a sequence that a layer with a sliding window keeps room for; `RING_CHUNK`, or with a
            tail `WINDOW_CHUNK`, unless given. A forward with a tail brings up to `chunk`, in `pieces`.
        block_size: tokens a block.
        device: where the tensors live.
        pages: layer -> memory of another owner as `kv.layer` lays it out, [num_blocks, page_bytes] uint8, of those layers
            that this cache holds; it is left as it is.
        states: layer -> what else it remembers.
    Attributes:
        most_new_tokens: new tokens of a sequence that one batch may bring; None for any number.
        most_undone: of those, as many as can be taken back again; None for any number.
        states: the memory of each layer that is held here, by layer.
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
        default_chunk = plan.ring_chunk(RING_CHUNK, min(chunk, WINDOW_CHUNK))
        self._ring_chunk = default_chunk if ring_chunk is None else plan.ring_chunk(ring_chunk, chunk)
        self.states: dict[int, LayerState] = {}
        self._kv: dict[int, LayerKV] = {}
        for layer in range(len(plan.layers)) if pages is None else pages:
            if (shape := self.shapes[layer]) is not None:
                self._kv[layer] = self._layer(layer, shape, None if pages is None else pages[layer])
        self.states |= self._kv
        self.states |= {layer: Recurrent(shape, self.num_rows, self.device) for layer, shape in (states or {}).items()}
        tails = any(window.ring for *_, window in self.fields() if window)
        self._wide = dict.fromkeys(self._kv, False) if tails and self.room < chunk else None
        rings = any(kv_layer.ring is not None for kv_layer in self._kv.values())
        self.most_new_tokens = chunk if tails else self._ring_chunk if rings else None
        undone = [shape.versions - 1 for shape in (states or {}).values()] + [self.room] * (self._wide is not None)
        self.most_undone = min(undone, default=None)

    def empty_like(self, device: torch.device | str) -> PagedKVCache:
        """An empty cache of the same plan and sizes, on a device."""
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
        """A cache of one layer over memory of another owner, for attention to read: nothing is allocated.

        Args:
            layer: the only one that it holds; chooses the rotation.
            fields: K's and V's, each [num_blocks, Hkv, block_size / group_tokens, *field.shape].
            windows: the tokens of K and V in BF16, where some are.
            window: the newest tokens that a query sees, of a layer with a sliding window.
            ring: blocks of a row's ring, where the memory is laid out so.
        """
        num_blocks, num_kv_heads, groups = next(iter(fields[0].values())).shape[:3]
        block_size, shape = groups * formats[0].group_tokens, KVShape(num_kv_heads, head_dim, window)
        cache = cls(
            KVPlan((formats,) * (layer + 1)), shape, num_blocks=num_blocks,
            block_size=block_size, device=next(iter(fields[0].values())).device, pages={},
        )  # fmt: skip
        k, v = map(Side, formats, fields, windows)
        cache._kv[layer] = LayerKV(layer, shape, k, v, block_size, ring)
        cache.states[layer] = cache._kv[layer]
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
            if self.device.type == "cpu":  # attention reads it from end to end
                ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
            tensor.zero_()
        return tensors

    def _new_window(self, kv_format: KVFormat, shape: KVShape) -> ResidualWindow | None:
        if not self.plan.keeps(kv_format):
            return None
        return ResidualWindow(
            tail=self.plan.tail(kv_format), sink=self.plan.sink, group=kv_format.group_tokens,
            ring=self.plan.ring_tokens(kv_format, self.room), num_rows=self.num_rows, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, device=self.device,
        )  # fmt: skip

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.plan.layers)

    @property
    def held(self) -> tuple[int, ...]:
        """The layers whose K and V are stored here: all that have any, unless pages of some were given."""
        return tuple(self._kv)

    def shape(self, layer: int) -> KVShape:
        """Of a layer's K and V."""
        return self._kv[layer].shape

    def ring(self, layer: int) -> int | None:
        """Blocks of a row's ring in a layer; None where its blocks are those of the bookkeeping."""
        return self._kv[layer].ring

    def placed(self, layer: int, batch: Batch) -> Batch:
        """A forward's batch with the slots and the block table of a layer."""
        return self._kv[layer].placed(batch)

    def blocks_at(self, layer: int, place: SequencePlace, first: int, end: int) -> list[int]:
        """Where a layer has blocks `first` … `end` - 1 of a sequence."""
        return self._kv[layer].blocks_at(place, first, end)

    def k_format(self, layer: int) -> KVFormat:
        """How a layer's K is stored."""
        return self.plan.k(layer)

    def v_format(self, layer: int) -> KVFormat:
        """How a layer's V is stored."""
        return self.plan.v(layer)

    def k_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's K, by field name."""
        return self._kv[layer].k.fields

    def v_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's V, by field name."""
        return self._kv[layer].v.fields

    def kept(self, layer: int) -> tuple[ResidualWindow | None, ResidualWindow | None]:
        """A layer's K and V in BF16, where tokens stay in it."""
        return self._kv[layer].k.kept, self._kv[layer].v.kept

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Quantize and store K and V.

        Args:
            k, v: [T, Hkv, D] fp32 or bf16; K after RoPE, V as projected.
            batch: of the forward, where they go; no slot twice.
        Raises:
            IndexError: a slot outside the cache.
            ValueError: more new tokens of a sequence than `most_new_tokens`.
            NonFiniteError: naming layer, side, token, slot and KV head; nothing of this layer was written.
        """
        batch, most = self.placed(layer, batch), self.num_slots_of(layer)
        slots = batch.slot_mapping
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < most:
            raise IndexError(f"slots must lie in 0 … {most - 1}")
        self.require_room(batch, layer)
        self._kv[layer].write(k, v, batch)

    def require_room(self, batch: Batch, layer: int | None = None) -> None:
        """Refuse a batch that a tail or a ring has no room for; waits for the device as `Batch.at_most` does.

        Args:
            layer: that is about to store it; without one whether a forward may bring it.
        Raises:
            ValueError: more new tokens of a sequence than `most_new_tokens`, or than this layer has room for now.
        """
        if (most := self.most_new_tokens) is not None and not batch.at_most(most):
            raise ValueError(f"this cache takes at most {most} new tokens of a sequence at a time: it has a tail or a window")
        if layer is None:
            return
        if (most := self._most(layer)) is not None and not batch.at_most(most):
            raise ValueError(f"layer {layer} takes {most} new tokens of a sequence at a time; store more in `pieces`")
        rooms = self._rooms(layer)
        if rooms and not batch.at_most(most := min(rooms)):
            raise ValueError(f"layer {layer} keeps room for {most} new tokens of a sequence; store more within `with_room`")

    def pieces(self, layer: int, batch: Batch) -> Iterator[tuple[Tensor | None, Batch]]:
        """A batch as a layer stores and reads it: whole, or cut where its ring has too little room; see `Batch.cut`.

        Raises:
            ValueError: more new tokens of a sequence than `most_new_tokens`.
        """
        self.require_room(batch)
        return iter([(None, batch)]) if self._kv[layer].ring is None else batch.cut(self._ring_chunk)

    def _most(self, layer: int) -> int | None:
        """New tokens of a sequence that a layer stores at a time, within `with_room`; None for any number."""
        return self.most_new_tokens if self._kv[layer].ring is None else self._ring_chunk

    def _rooms(self, layer: int) -> list[int]:
        """New tokens that each side of a layer with a tail has room for beside it now."""
        return [window.ring - window.tail for window in self.kept(layer) if window and window.ring]

    def has_room(self, batch: Batch) -> bool:
        """Whether every layer can store a batch as it is, outside `with_room`."""
        return self._wide is None or batch.at_most(self.room)

    def is_widened(self, layer: int) -> bool:
        """Whether `with_room` is open for a layer, so that its tokens in BF16 lie elsewhere than before."""
        return self._wide is not None and self._wide[layer]

    @contextmanager
    def with_room(self, layer: int, batch: Batch, always: bool = False) -> Iterator[None]:
        """While it is open, a layer has room for all new tokens of a batch beside its tail, in memory of its own.

        It is open from before they are stored until attention has read them. Of what was stored the newest stay, as many as
        the layer keeps room for; of a store that was refused, none. A device is not waited for, but by `Batch.at_most`.

        Args:
            always: also where they fit without it, so that a compiled program finds one size.
        """
        if self._wide is None or not self._rooms(layer) or (batch.at_most(self.room) and not always):
            yield
            return
        small = self._kv[layer]
        wide = small.wider(self._most(layer) or self.chunk, batch)
        self._kv[layer], self._wide[layer] = wide, True
        try:
            yield
            small.take_newest(wide, batch)
        finally:
            self._kv[layer], self._wide[layer] = small, False

    def read(self, layer: int, block_table: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """De-quantized K and V of whole blocks, for the reference and for tests.

        Args:
            block_table: [B, n] int32 of a placed batch; -1 pads and reads as block 0, to be masked by the caller.
            first: position of the first token of its first block.
        Returns:
            K and V as they are packed, each [B, Hkv, n * block_size, D] fp32.
        """
        return self._kv[layer].read(block_table, first)

    def fields(self) -> Iterator[tuple[str, KVFormat, dict[str, Tensor], ResidualWindow | None]]:
        """Every side that is stored here: its name, such as `layers.0.k`, its format, fields and tokens in BF16."""
        for layer, kv_layer in self._kv.items():
            for letter, side in kv_layer.sides:
                yield f"layers.{layer}.{letter}", side.kv_format, side.fields, side.kept

    @property
    def keeps_rows(self) -> bool:
        """Whether anything is kept by a sequence's row: tokens in BF16, rings or states."""
        return any(layer.ring is not None or layer.k.kept or layer.v.kept for layer in self._kv.values()) or bool(
            self.states.keys() - self._kv.keys()
        )

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold, where it keeps all of them."""
        return self.num_blocks * self.block_size

    def num_slots_of(self, layer: int) -> int:
        """Tokens that one layer can hold."""
        ring = self._kv[layer].ring
        return self.num_slots if ring is None else self.num_rows * ring * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, or in use of pages: every field of every layer, the tokens in BF16, and states."""
        return sum(state.nbytes for state in self.states.values())


def cache_bytes(plan: KVPlan, tokens: int, shapes: Shapes, sequences: int = 1, state_bytes: int = 0) -> int:
    """Bytes that a `PagedKVCache` allocates for sequences of `tokens` each: whole blocks, the tokens in BF16, and states
    of one sequence more, whose row is for tokens that pad a batch.

    Args:
        state_bytes: of one sequence, what layers remember beside K and V.
    """
    blocks = blocks_for(tokens)
    each_token, in_rings = plan.bytes_per_token(shapes), plan.ring_bytes(shapes, blocks)
    keys_and_values = sequences * round(blocks * BLOCK_SIZE * each_token + in_rings + plan.kept_bytes(shapes))
    return keys_and_values + (sequences + 1) * state_bytes


def tokens_that_fit(plan: KVPlan, room: float, shapes: Shapes, sequences: int = 1, state_bytes: int = 0) -> int:
    """The most tokens for which `cache_bytes` is at most `room`: of each sequence, in whole blocks."""
    low, high = 0, 1
    while high < _MOST_BLOCKS and cache_bytes(plan, high * BLOCK_SIZE, shapes, sequences, state_bytes) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = cache_bytes(plan, middle * BLOCK_SIZE, shapes, sequences, state_bytes) <= room
        low, high = (middle, high) if fits else (low, middle)
    return low * BLOCK_SIZE


_MOST_BLOCKS = 2**24
"""Of a sequence: as many tokens as positions can be counted in FP32, and more."""
