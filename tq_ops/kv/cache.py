"""What all layers of a model remember of some sequences: paged K and V in any format, and states beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.layer import LayerKV, Side, fields_in
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.recurrent import LayerState, Recurrent, StateShape
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, WINDOW_CHUNK, KVShape, Shapes, blocks_for, each
from haarkv.tq_ops.memory import ask_for_large_pages


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of a cache and the new tokens of a forward: all that an op knows of a cache.

    Attributes:
        layer: its index, which chooses rotations.
        batch: with the slots and the block table of this layer.
    """

    cache: PagedKVCache
    layer: int
    batch: Batch

    @property
    def kv(self) -> LayerKV:
        """The memory of a layer that attends."""
        return self.cache.kv[self.layer]

    @property
    def state(self) -> Recurrent:
        """The memory of a layer with linear attention."""
        return cast(Recurrent, self.cache.states[self.layer])

    def require_room(self) -> None:
        """A ValueError of more new tokens of a sequence than this layer has room for now."""
        self.cache.require_room(self.batch, self.layer)

    def require_slots(self) -> None:
        """Wait for the device; an IndexError of a slot outside the layer."""
        slots, most = self.batch.slot_mapping, self.kv.num_slots
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < most:
            raise IndexError(f"slots must lie in 0 … {most - 1}")

    def write(self, k: Tensor, v: Tensor) -> None:
        """Quantize and store K and V.

        Args:
            k, v: [T, Hkv, D] fp32 or bf16; K after RoPE, V as projected.
        Raises:
            IndexError, ValueError: as `require_slots` and `require_room`.
            NonFiniteError: naming layer, side, token, slot and KV head; nothing of this layer was written.
        """
        self.require_slots()
        self.require_room()
        self.kv.write(k, v, self.batch)


class PagedKVCache:
    """The memory of every layer: K and V in blocks of tokens, the tokens that stay in BF16 beside them, and states.

    Each field of a format is one tensor a layer, [num_blocks, Hkv, block_size / G, *field.shape], where G tokens are
    stored together: one head's codes of one block lie together, which is the tile that a fused kernel loads. Slot s is row
    s % block_size of block s // block_size. It is zeroed memory of the cache's own, one tensor a field, or views of `pages`.

    Layers of one shape are a group with one block table. Those that keep all tokens use the blocks that `PagedSequences`
    hands out. Those with a sliding window keep a ring of blocks a row, whose table follows from the rows (`Batch.in_ring`);
    a `view` has the batch as its layer has it.

    Args:
        plan: how each layer's K and V are stored.
        shapes: of each layer's K and V, None where it has none; or one for all layers.
        num_blocks: blocks of each layer that keeps all tokens.
        num_rows: sequences at a time, where tokens stay in BF16, in rings or in states; as many as blocks unless given.
        row_blocks: blocks of one sequence at most; `num_blocks` unless given.
        chunk: new tokens of a sequence in one forward, where a tail stays in BF16.
        room: of those, as many as each layer keeps room for; more are stored within `open`. All of them unless given.
        ring_chunk: new tokens of a sequence that a layer with a sliding window keeps room for; `RING_CHUNK`, or with a
            tail `WINDOW_CHUNK`, unless given. A forward with a tail brings up to `chunk`, cut by `run`.
        block_size: tokens a block.
        device: where the tensors live.
        pages: layer -> memory of another owner as `kv.layer` lays it out, [num_blocks, page_bytes] uint8, of those layers
            that this cache holds; it is left as it is.
        states: layer -> what else it remembers.
    Attributes:
        most_new_tokens: new tokens of a sequence that one batch may bring; None for any number.
        most_undone: of those, as many as can be taken back again; None for any number.
        kv: K and V of each layer that has any, and whose pages are here.
        states: the memory of each layer, by layer: those, and others.
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
        self.kv: dict[int, LayerKV] = {}
        for layer in range(len(plan.layers)) if pages is None else pages:
            if (shape := self.shapes[layer]) is not None:
                self.kv[layer] = self._layer(layer, shape, None if pages is None else pages[layer])
        self.states |= self.kv
        self.states |= {layer: Recurrent(shape, self.num_rows, self.device) for layer, shape in (states or {}).items()}
        tails = any(window.ring for *_, window in self.fields() if window)
        self._widens = tails and self.room < chunk
        rings = any(kv_layer.ring is not None for kv_layer in self.kv.values())
        self.most_new_tokens = chunk if tails else self._ring_chunk if rings else None
        undone = [shape.versions - 1 for shape in (states or {}).values()] + [self.room] * self._widens
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

    def view(self, layer: int, batch: Batch) -> LayerView:
        """A layer and a forward's batch as ops take them, with the room that the layer has now."""
        kv = self.kv.get(layer)
        return LayerView(self, layer, batch if kv is None else kv.place(batch))

    @contextmanager
    def open(self, layer: int, batch: Batch, always: bool = False) -> Iterator[LayerView]:
        """A layer with room for all new tokens of a batch beside its tail: store K and V, attend, and leave.

        The room is memory of its own. On leaving, the newest tokens stay, as many as the layer keeps room for; after an error,
        none. A device is not waited for, but by `Batch.at_most`.

        Args:
            always: take that room even where the tokens fit without it, so that a compiled program finds one size.
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
        """`op(view, *rows)` [T, ...] over an open layer: all tokens at once, or in pieces where its ring has too little room.

        Args:
            rows: tensors [T, ...], of which each piece gets its own tokens'.
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
            raise ValueError(f"layer {layer} takes {most} new tokens of a sequence at a time; store more by `run`")
        rooms = self._rooms(layer)
        if rooms and not batch.at_most(most := min(rooms)):
            raise ValueError(f"layer {layer} keeps room for {most} new tokens of a sequence; store more within `open`")

    def _most(self, layer: int) -> int | None:
        """New tokens of a sequence that an open layer stores at a time; None for any number."""
        return self.most_new_tokens if self.kv[layer].ring is None else self._ring_chunk

    def _rooms(self, layer: int) -> list[int]:
        """New tokens that each side of a layer with a tail has room for beside it now."""
        return [window.ring - window.tail for window in self.kv[layer].windows if window and window.ring]

    def has_room(self, batch: Batch) -> bool:
        """Whether every layer can store a batch as it is, without `open`."""
        return not self._widens or batch.at_most(self.room)

    def fields(self) -> Iterator[tuple[str, KVFormat, dict[str, Tensor], ResidualWindow | None]]:
        """Every side that is stored here: its name, such as `layers.0.k`, its format, fields and tokens in BF16."""
        for layer, kv_layer in self.kv.items():
            for letter, side in kv_layer.sides:
                yield f"layers.{layer}.{letter}", side.kv_format, side.fields, side.window

    @property
    def keeps_rows(self) -> bool:
        """Whether anything is kept by a sequence's row: tokens in BF16, rings or states."""
        return any(layer.ring is not None or any(layer.windows) for layer in self.kv.values()) or bool(
            self.states.keys() - self.kv.keys()
        )

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold, where it keeps all of them."""
        return self.num_blocks * self.block_size

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
