"""Paged storage of K and V in any format: fields by block, codes and scales apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.base import by_token, require_finite
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.pages import fields_in
from haarkv.tq_ops.kv.plan import BLOCK_SIZE, WINDOW_CHUNK, KVPlan
from haarkv.tq_ops.kv.window import Window
from haarkv.tq_ops.memory import ask_for_large_pages


class PagedKVCache:
    """The K and V of every layer, stored in blocks of tokens, and the tokens that stay in BF16 beside them.

    Each field of a format is one tensor a layer, [num_blocks, Hkv, block_size / G, *field.shape], where G tokens are
    stored together: one head's codes of one block lie together, which is the tile that a fused kernel loads. Slot s is row
    s % block_size of block s // block_size. It is zeroed memory of the cache's own, one tensor a field, or views of `pages`.

    Args:
        plan: how each layer's K and V are stored.
        num_kv_heads, head_dim: the model's.
        num_blocks: blocks of each layer.
        num_rows: sequences at a time, where tokens stay in BF16; as many as there are blocks unless given.
        chunk: new tokens of a sequence at a time, where a tail stays in BF16.
        block_size: tokens a block.
        device: where the tensors live.
        pages: layer -> memory of another owner as `kv.pages` lays it out, [num_blocks, page_bytes] uint8, of those layers
            that this cache holds; it is left as it is.
    Attributes:
        most_new_tokens: new tokens of a sequence that one batch may bring; None for any number.
    Raises:
        InputError: a format has no layout for this head_dim, block size or number of KV heads.
    """

    def __init__(
        self,
        plan: KVPlan,
        *,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        num_rows: int | None = None,
        chunk: int = WINDOW_CHUNK,
        block_size: int = BLOCK_SIZE,
        device: torch.device | str = "cpu",
        pages: Mapping[int, Tensor] | None = None,
    ) -> None:
        plan.require_layout(head_dim, block_size, num_kv_heads)
        self.plan = plan
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_rows = num_blocks if num_rows is None else num_rows
        self.chunk = chunk
        self.device = torch.device(device)
        self._k: dict[int, _SideStorage] = {}
        self._v: dict[int, _SideStorage] = {}
        for layer in range(len(plan.layers)) if pages is None else pages:
            pair = plan.layers[layer]
            fields = (
                tuple(map(self._allocate, pair))
                if pages is None
                else fields_in(pages[layer], pair, num_kv_heads, head_dim, block_size)
            )
            self._k[layer], self._v[layer] = map(self._side, pair, fields)
        has_ring = any(side.window and side.window.ring for side in (*self._k.values(), *self._v.values()))
        self.most_new_tokens = chunk if has_ring else None

    @classmethod
    def over(
        cls,
        formats: tuple[KVFormat, KVFormat],
        layer: int,
        fields: tuple[dict[str, Tensor], dict[str, Tensor]],
        windows: tuple[Window | None, Window | None],
        head_dim: int,
    ) -> PagedKVCache:
        """A cache of one layer over memory of another owner, for attention to read: nothing is allocated.

        Args:
            formats: K's and V's.
            layer: the only one that it holds; chooses the rotation.
            fields: K's and V's, each [num_blocks, Hkv, block_size / group_tokens, *field.shape].
            windows: the tokens of K and V in BF16, where some are.
        """
        num_blocks, num_kv_heads, groups = next(iter(fields[0].values())).shape[:3]
        block_size = groups * formats[0].group_tokens
        cache = cls(
            KVPlan((formats,) * (layer + 1)), num_kv_heads=num_kv_heads, head_dim=head_dim, num_blocks=num_blocks,
            block_size=block_size, device=next(iter(fields[0].values())).device, pages={},
        )  # fmt: skip
        cache._k[layer], cache._v[layer] = map(_SideStorage, formats, fields, windows)
        return cache

    def _allocate(self, kv_format: KVFormat) -> dict[str, Tensor]:
        groups = self.block_size // kv_format.group_tokens
        made = {
            name: torch.empty(self.num_blocks, self.num_kv_heads, groups, *field.shape, dtype=field.dtype, device=self.device)
            for name, field in kv_format.fields(self.head_dim).items()
        }
        for field in made.values():
            if self.device.type == "cpu":  # attention reads it from end to end
                ask_for_large_pages(field.data_ptr(), field.nbytes)
            field.zero_()
        return made

    def _side(self, kv_format: KVFormat, fields: dict[str, Tensor]) -> _SideStorage:
        if not self.plan.has_window(kv_format):
            return _SideStorage(kv_format, fields, None)
        window = Window(
            tail=self.plan.tail(kv_format), sink=self.plan.sink, group=kv_format.group_tokens,
            ring=self.plan.ring_tokens(kv_format, self.chunk), num_rows=self.num_rows, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, device=self.device,
        )  # fmt: skip
        return _SideStorage(kv_format, fields, window)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.plan.layers)

    @property
    def held(self) -> tuple[int, ...]:
        """The layers that are stored here: all, unless pages of some were given."""
        return tuple(self._k)

    def k_format(self, layer: int) -> KVFormat:
        """How a layer's K is stored."""
        return self.plan.k(layer)

    def v_format(self, layer: int) -> KVFormat:
        """How a layer's V is stored."""
        return self.plan.v(layer)

    def k_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's K, by field name."""
        return self._k[layer].fields

    def v_fields(self, layer: int) -> dict[str, Tensor]:
        """The very tensors that hold a layer's V, by field name."""
        return self._v[layer].fields

    def windows(self, layer: int) -> tuple[Window | None, Window | None]:
        """A layer's K and V in BF16, where tokens stay in it."""
        return self._k[layer].window, self._v[layer].window

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Quantize and store K and V.

        Args:
            k, v: [T, Hkv, D] fp32 or bf16; K after RoPE, V as projected.
            batch: where they go; no slot twice.
        Raises:
            IndexError: a slot outside the cache.
            ValueError: more new tokens of a sequence than `most_new_tokens`.
            NonFiniteError: naming layer, side, token, slot and KV head; nothing of this layer was written.
        """
        slots = batch.slot_mapping
        if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_slots:
            raise IndexError(f"slots must lie in 0 … {self.num_slots - 1}")
        self.require_room(batch)
        given = (("K", self._k[layer], k), ("V", self._v[layer], v))
        packed = [side.pack(name, x, layer, batch) for name, side, x in given]
        for (_, side, x), (fields, stored) in zip(given, packed, strict=True):
            block, offset = stored // self.block_size, stored % self.block_size // side.kv_format.group_tokens
            for name, values in fields.items():
                side.fields[name][block, :, offset] = values
            if side.window:
                side.window.write(x, batch)

    def require_room(self, batch: Batch) -> None:
        """Refuse a batch that the tail has no room for; waits for the device unless the whole batch fits.

        Raises:
            ValueError: more new tokens of a sequence than `most_new_tokens`.
        """
        most = self.most_new_tokens
        if most is not None and len(batch.positions) > most and int(batch.query_start_loc.diff().max()) > most:
            raise ValueError(f"a cache with a tail takes at most {most} new tokens of a sequence at a time")

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """De-quantized K and V of whole blocks, for the reference and for tests.

        Args:
            block_table: [B, n] int32; -1 pads and reads as block 0, to be masked by the caller.
        Returns:
            K and V as they are packed, each [B, Hkv, n * block_size, D] fp32.
        """
        return self._k[layer].unpack(layer, block_table), self._v[layer].unpack(layer, block_table)

    def fields(self) -> Iterator[tuple[str, KVFormat, dict[str, Tensor], Window | None]]:
        """Every side that is stored here: its name, such as `layers.0.k`, its format, fields and tokens in BF16."""
        for layer in self.held:
            for name, side in (("k", self._k[layer]), ("v", self._v[layer])):
                yield f"layers.{layer}.{name}", side.kv_format, side.fields, side.window

    @property
    def num_slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.num_blocks * self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, or in use of pages: every field of every layer, and the tokens in BF16."""
        return sum(side.nbytes for side in (*self._k.values(), *self._v.values()))


@dataclass(frozen=True)
class _SideStorage:
    """K or V of one layer."""

    kv_format: KVFormat
    fields: dict[str, Tensor]
    window: Window | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.fields.values()) + (self.window.vectors.nbytes if self.window else 0)

    def pack(self, name: str, x: Tensor, layer: int, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize new vectors [T, Hkv, D], or the groups that they fill.

        Returns:
            fields [n, Hkv, *field.shape], and the slot [n] of the last token of each.
        """
        last = torch.arange(len(x), device=x.device)
        try:
            if self.kv_format.group_tokens == 1:
                return by_token(self.kv_format.quantize(x.transpose(0, 1), layer)), batch.slot_mapping
            require_finite(x.transpose(0, 1))
            assert self.window is not None, "a format of groups has a window, which holds a group until it is full"
            groups = self.window.filled(x, batch)
            last = groups.last
            return by_token(self.kv_format.quantize(groups.vectors.transpose(0, 1), layer)), batch.slot_mapping[last]
        except NonFiniteVectorError as error:
            head, token = error.index[0], int(last[error.index[1]])
            where = (
                f"layer {layer}: {name} of token {token} of the batch (slot {int(batch.slot_mapping[token])}), KV head {head}"
            )
            raise NonFiniteError(f"{where} is not finite or too large for {self.kv_format.name}") from None

    def unpack(self, layer: int, block_table: Tensor) -> Tensor:
        """[B, Hkv, n * block_size, D] fp32 of whole blocks [B, n]."""
        blocks = block_table.clamp(min=0).long()
        # [B, n, Hkv, groups, *] -> [B, Hkv, n * groups, *]: a head's blocks one after the other.
        fields = {name: tensor[blocks].transpose(1, 2).flatten(2, 3) for name, tensor in self.fields.items()}
        vectors = self.kv_format.dequantize(fields, layer)
        return vectors if self.kv_format.group_tokens == 1 else vectors.flatten(2, 3)


def cache_bytes(plan: KVPlan, tokens: int, num_kv_heads: int, head_dim: int, sequences: int = 1) -> int:
    """Bytes that a `PagedKVCache` allocates for sequences of so many tokens each: whole blocks, and the tokens in BF16."""
    slots = blocks_for(tokens) * BLOCK_SIZE
    each = slots * plan.bytes_per_token(num_kv_heads, head_dim) + plan.window_bytes(num_kv_heads, head_dim)
    return sequences * round(each)


def tokens_that_fit(plan: KVPlan, room: float, num_kv_heads: int, head_dim: int, sequences: int = 1) -> int:
    """The most tokens for which `cache_bytes` is at most `room`: of each sequence, in whole blocks."""
    each = room / sequences - plan.window_bytes(num_kv_heads, head_dim)
    return max(0, int(each // (plan.bytes_per_token(num_kv_heads, head_dim) * BLOCK_SIZE))) * BLOCK_SIZE


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return math.ceil(tokens / block_size)
