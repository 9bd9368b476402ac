"""K and V of one layer: fields in blocks of tokens, and the residual windows.

A field is a separate tensor, or a view of pages. A page is one block of one layer: K's fields, then V's, each
[Hkv, block_size / G, *field.shape], so that a block is one piece of memory to copy, share or free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.base import Field, by_token, require_finite
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import KVShape, SequencePlace, blocks_for

WINDOW = "window"
"""Name of the residual window in a stored sequence: `k.window`, `v.window`."""


class NonFiniteTokenError(NonFiniteError):
    """K or V of a token of a batch is not finite, or too large for its format."""

    def __init__(self, layer: int, side: str, token: int, slot: int, head: int, kv_format: str) -> None:
        where = f"layer {layer}: {side} of token {token} of the batch (slot {slot}), KV head {head}"
        super().__init__(f"{where} is not finite or too large for {kv_format}")
        self.side, self.token, self.head, self.kv_format = side, token, head, kv_format


@dataclass(frozen=True)
class Side:
    """K or V of one layer.

    Attributes:
        fields: by name, each [num_blocks, Hkv, block_size / G, *field.shape].
        window: residual window: tail and sinks in BF16; None without them.
    """

    kv_format: KVFormat
    fields: dict[str, Tensor]
    window: ResidualWindow | None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.fields.values()) + (self.window.vectors.nbytes if self.window else 0)

    def pack(self, name: str, x: Tensor, layer: int, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Quantize new vectors [T, Hkv, D]; in a format with groups of tokens, quantize the groups that they complete.

        Returns:
            fields [n, Hkv, *field.shape] of n tokens or groups, and the slot [n] of the last token of each.
        """
        last = torch.arange(len(x), device=x.device)
        try:
            if self.kv_format.group_tokens == 1:
                by_head = self.kv_format.as_stored(x.transpose(0, 1), layer, batch.positions)
                return by_token(self.kv_format.quantize(by_head, layer)), batch.slot_mapping
            require_finite(x.transpose(0, 1))
            assert self.window is not None, "a format of groups keeps tokens in BF16 until their group is full"
            groups, last = self.window.full_groups(x, batch)
            return by_token(self.kv_format.quantize(groups.transpose(0, 1), layer)), batch.slot_mapping[last]
        except NonFiniteVectorError as error:
            token = int(last[error.index[1]])
            slot = int(batch.slot_mapping[token])
            raise NonFiniteTokenError(layer, name, token, slot, error.index[0], self.kv_format.name) from None

    def unpack(self, layer: int, block_table: Tensor, first: int = 0) -> Tensor:
        """Dequantize whole blocks [B, n]: [B, Hkv, n * block_size, D] fp32; `first` is the position of the first token."""
        blocks = block_table.clamp(min=0).long()
        # [B, n, Hkv, groups, *] -> [B, Hkv, n * groups, *]: a head's blocks one after the other.
        fields = {name: tensor[blocks].transpose(1, 2).flatten(2, 3) for name, tensor in self.fields.items()}
        vectors = self.kv_format.dequantize(fields, layer)
        if self.kv_format.group_tokens > 1:
            return vectors.flatten(2, 3)
        turns = self.kv_format.rope_shift(layer)
        positions = torch.arange(first, first + vectors.shape[2], device=vectors.device)
        return turns.redo(vectors, positions) if turns else vectors


@dataclass(frozen=True, eq=False)
class LayerKV:
    """K and V of one layer; a `LayerState`.

    Attributes:
        index: the layer's index, which chooses the rotation.
        ring: blocks in each sequence's ring (sliding window); None if the layer uses the blocks of `PagedSequences`.
    """

    index: int
    shape: KVShape
    k: Side
    v: Side
    block_size: int
    ring: int | None = None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """K and V with their letters."""
        return ("k", self.k), ("v", self.v)

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        return self.k.kv_format, self.v.kv_format

    @property
    def fields(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Fields of K and of V."""
        return self.k.fields, self.v.fields

    @property
    def windows(self) -> tuple[ResidualWindow | None, ResidualWindow | None]:
        """Residual windows of K and of V, None without one."""
        return self.k.window, self.v.window

    @property
    def num_slots(self) -> int:
        """Number of tokens that all blocks hold."""
        return len(next(iter(self.k.fields.values()))) * self.block_size

    def place(self, batch: Batch) -> Batch:
        """The batch with the slots and the block table of this layer: with a sliding window, those of its ring."""
        return batch if self.ring is None else batch.in_ring(self.ring, self.block_size)

    def blocks_at(self, place: SequencePlace, first: int, end: int) -> list[int]:
        """Numbers of the blocks that hold a sequence's blocks `first` … `end` - 1."""
        if self.ring is None:
            return list(place.blocks[first:end])
        return [place.row * self.ring + block % self.ring for block in range(first, end)]

    def write(self, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Quantize and store K and V [T, Hkv, D] of a batch from `place`; raises as `LayerView.write`."""
        packed = [side.pack(name.upper(), x, self.index, batch) for (name, side), x in zip(self.sides, (k, v), strict=True)]
        for (_, side), x, (fields, slots) in zip(self.sides, (k, v), packed, strict=True):
            block, offset = slots // self.block_size, slots % self.block_size // side.kv_format.group_tokens
            for name, values in fields.items():
                side.fields[name][block, :, offset] = values
            if side.window:
                side.window.write(x, batch)

    def wider(self, room: int, batch: Batch) -> LayerKV:
        """The same packed memory with larger rings of BF16 tokens (`ResidualWindow.wider`)."""

        def widen_side(side: Side) -> Side:
            return replace(side, window=side.window.wider(room, batch)) if side.window and side.window.ring else side

        return replace(self, k=widen_side(self.k), v=widen_side(self.v))

    def take_newest(self, wide: LayerKV, batch: Batch) -> None:
        """Copy the newest BF16 tokens back from `wider`'s result (`ResidualWindow.take_newest`)."""
        for (_, side), (_, other) in zip(self.sides, wide.sides, strict=True):
            if side.window and side.window.ring and other.window:
                side.window.take_newest(other.window, batch)

    def read(self, block_table: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks, each [B, Hkv, n * block_size, D] fp32; `first` is the position of the first token.

        Args:
            block_table: [B, n] int32 of a batch from `place`; -1 pads and reads block 0, which the caller masks.
            first: position of the first token.
        Returns:
            K and V, each [B, Hkv, n * block_size, D] fp32.
        """
        return self.k.unpack(self.index, block_table, first), self.v.unpack(self.index, block_table, first)

    def snapshot(self, batch: Batch) -> list[tuple[Tensor, Tensor] | None] | None:
        """A copy of the BF16 tokens that new ones overwrite. Packed tokens need none: those after the length are ignored, and
        a ring of blocks overwrites none that a query sees again, if the caller takes back at most `PagedKVCache.most_undone`.
        """
        if self.k.window is None and self.v.window is None:
            return None
        return [side.window.overwritten(batch) if side.window else None for _, side in self.sides]

    def roll_back(self, snapshot: Any, batch: Batch, drop_mask: Tensor) -> None:
        for (_, side), vectors in zip(self.sides, snapshot, strict=True):
            if side.window:
                side.window.put_back(vectors, batch, drop_mask)

    def take(self, place: SequencePlace, length: int, whole: bool = True) -> dict[str, Tensor]:
        """A sequence's fields `k.NAME` and `v.NAME` [blocks, Hkv, block_size / G, *field.shape] from `KVShape.first_block` on,
        zero after the last token; its residual windows as `k.window` and `v.window` [Hkv, sink + ring, D].
        """
        first, end = self.shape.first_block(length, self.block_size), blocks_for(length, self.block_size)
        index = torch.tensor(
            self.blocks_at(place, first, end), dtype=torch.int64, device=next(iter(self.k.fields.values())).device
        )
        tensors: dict[str, Tensor] = {}
        for letter, side in self.sides:
            groups = length // side.kv_format.group_tokens - first * self.block_size // side.kv_format.group_tokens
            for name, field in side.fields.items() if whole or self.shape.window else ():
                tensors[f"{letter}.{name}"] = _cut(field[index].cpu(), groups)
            if side.window is not None and (whole or side.window.ring):
                occupied = side.window.occupied_places(length)
                tensors[f"{letter}.{WINDOW}"] = side.window.vectors[place.row].cpu().masked_fill(~occupied[:, None], 0.0)
        return tensors

    def put(self, tensors: Mapping[str, Tensor], stored_length: int, place: SequencePlace, length: int) -> None:
        first, end = self.shape.first_block(stored_length, self.block_size), blocks_for(length, self.block_size)
        for letter, side in self.sides:
            for name, field in side.fields.items():
                index = torch.tensor(self.blocks_at(place, first, end), dtype=torch.int64, device=field.device)
                field[index] = tensors[f"{letter}.{name}"][: len(index)].to(field.device)
            if side.window is not None:
                side.window.vectors[place.row] = tensors[f"{letter}.{WINDOW}"].to(side.window.vectors.device)

    def reusable(self, tensors: Mapping[str, Tensor], stored_length: int, length: int) -> int:
        """`length` if the stored tensors hold everything that the query after `length` tokens sees; else 0."""
        if length == stored_length:
            return length
        if self.shape.first_block(length, self.block_size) < self.shape.first_block(stored_length, self.block_size):
            return 0
        for _, side in self.sides:
            window = side.window
            # The next query's tail must lie in the ring, which holds the newest `ring` tokens; it may begin within a group.
            if window and window.ring and length < stored_length - window.ring + window.tail + window.group:
                return 0
        return length


def _cut(tensor: Tensor, groups: int) -> Tensor:
    """Blocks [n, Hkv, P, *] with zeros after the first `groups` groups: older contents must not reach a file."""
    if len(tensor) and (rest := groups - (len(tensor) - 1) * tensor.shape[2]) < tensor.shape[2]:
        tensor[-1, :, max(rest, 0) :] = 0
    return tensor


def page_bytes(formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes of one page: K and V of block_size tokens, all heads."""
    *_, (_, _, _, end) = _places(formats, num_kv_heads, head_dim, block_size)
    return -(-end // _alignment(formats, head_dim)) * _alignment(formats, head_dim)


def fields_in(
    pages: Tensor, formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fields of K and of V as views of pages.

    Args:
        pages: [num_blocks, page_bytes] uint8, each page contiguous.
    Returns:
        fields of K and of V, each [num_blocks, Hkv, block_size / G, *field.shape].
    Raises:
        InputError: the pages have the wrong size or alignment.
    """
    page_size, alignment = page_bytes(formats, num_kv_heads, head_dim, block_size), _alignment(formats, head_dim)
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != page_size or pages.stride(1) != 1:
        raise InputError(
            f"pages of {block_size} tokens in {formats[0].name} and {formats[1].name} are uint8 [num_blocks, {page_size}], "
            f"each in one piece, not {pages.dtype} {list(pages.shape)}"
        )
    if pages.data_ptr() % alignment or pages.stride(0) % alignment:
        raise InputError(f"pages must begin at multiples of {alignment} bytes")
    sides: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for side, (name, field), begin, end in _places(formats, num_kv_heads, head_dim, block_size):
        groups = block_size // formats[side].group_tokens
        sides[side][name] = pages[:, begin:end].view(field.dtype).view(-1, num_kv_heads, groups, *field.shape)
    return sides


def _places(
    formats: tuple[KVFormat, KVFormat], num_kv_heads: int, head_dim: int, block_size: int
) -> Iterator[tuple[int, tuple[str, Field], int, int]]:
    """For each field in a page, in order: side (0 for K, 1 for V), (name, field), first byte, end byte."""
    end = 0
    for side, kv_format in enumerate(formats):
        for name, field in kv_format.fields(head_dim).items():
            begin = math.ceil(end / field.dtype.itemsize) * field.dtype.itemsize
            end = begin + num_kv_heads * (block_size // kv_format.group_tokens) * field.nbytes
            yield side, (name, field), begin, end


def _alignment(formats: tuple[KVFormat, KVFormat], head_dim: int) -> int:
    return max(field.dtype.itemsize for kv_format in formats for field in kv_format.fields(head_dim).values())
