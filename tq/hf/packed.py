"""Packed groups of tokens in blocks, as attention kernels read them; appended at the end and dropped at either end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE

READ_TOKENS = 1024
"""Tokens restored at a time, so that a read needs little memory besides its result."""
SPARE_FRACTION, SPARE_TOKENS = 32, 32
"""Memory is allocated for 1/32 more tokens than there are, for at least 32 more, and in whole blocks."""


class Packed:
    """Groups of a format in memory allocated ahead.

    Each field is one tensor [B, blocks, Hkv, P, *field.shape] of blocks of P groups, as in `tq_ops.kv.cache.PagedKVCache`: a
    head's codes of one block lie together. The groups `begin` to `end` of each row are in use. A token is copied about 32
    times while a cache grows to any length, and no group is ever quantized again: of one that `drop_newest` cuts through, the
    fewer tokens that still count are remembered.

    Args:
        kv_format: how the vectors are stored.
        layer: chooses the rotation.
        like: [B, Hkv, 0, D]; gives shapes and device.
        front: groups left free before the first, for tokens that are kept elsewhere: so a token lies at its position.
    Raises:
        InputError: the format has no layout for D.
    """

    def __init__(self, kv_format: KVFormat, layer: int, like: Tensor, *, front: int = 0) -> None:
        self.kv_format, self.layer, self.front = kv_format, layer, front
        self.block_groups = max(1, BLOCK_SIZE // kv_format.group_tokens)
        batch, heads, _, head_dim = like.shape
        self.fields = {
            name: torch.zeros(batch, 0, heads, self.block_groups, *field.shape, dtype=field.dtype, device=like.device)
            for name, field in kv_format.fields(head_dim).items()
        }
        self.begin = self.end = front
        self._short: dict[int, int] = {}
        self._ahead = 0  # a token's position less its group, of formats that pack each token alone

    @property
    def blocks(self) -> int:
        """Blocks of a row that memory is allocated for."""
        return next(iter(self.fields.values())).shape[1]

    @property
    def capacity(self) -> int:
        """Groups that the allocated memory can hold, `front` included."""
        return self.blocks * self.block_groups

    @property
    def tokens(self) -> int:
        """Tokens that a read returns."""
        group = self.kv_format.group_tokens
        return (self.end - self.begin) * group - sum(group - count for count in self._short.values())

    @property
    def in_place(self) -> bool:
        """Whether every token lies at its position, none of a group being left out."""
        return self.begin == self.front and not self._short

    def append(self, new: dict[str, Tensor]) -> None:
        """Store groups: every field [B, Hkv, groups, *field.shape]."""
        count = next(iter(new.values())).shape[2]
        if self.end + count > self.capacity:
            self.move(self.blocks_for(self.end - self.begin + count))
        block, place = self._places(self.end, self.end + count)
        for name, values in new.items():
            self.fields[name][:, block, :, place] = values.movedim(2, 0)
        self.end += count

    def pieces(self) -> Iterator[Tensor]:
        """All tokens in order, restored: [B, Hkv, n, D] fp32 each."""
        group = self.kv_format.group_tokens
        step = max(1, READ_TOKENS // group)
        for first in range(self.begin, self.end, step):
            last = min(first + step, self.end)
            vectors = self.kv_format.dequantize(self._read(first, last), self.layer)
            if turns := self.kv_format.turns(self.layer):
                vectors = turns.forth(vectors, torch.arange(first, last, device=vectors.device) + self._ahead)
            if group > 1:
                vectors = vectors.flatten(2, 3)
            short = {g - first: n for g, n in self._short.items() if first <= g < last}
            if short:
                kept = [g * group + t for g in range(last - first) for t in range(short.get(g, group))]
                vectors = vectors[:, :, kept]
            yield vectors

    def _read(self, first: int, last: int) -> dict[str, Tensor]:
        """Fields [B, Hkv, last - first, *field.shape] of some groups."""
        size = self.block_groups
        begin, end = first // size, -(-last // size)
        inside = slice(first - begin * size, last - begin * size)
        return {name: tensor[:, begin:end].transpose(1, 2).flatten(2, 3)[:, :, inside] for name, tensor in self.fields.items()}

    def _places(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Block, and place in it, of groups: [n] int64 each."""
        groups = torch.arange(first, last, device=next(iter(self.fields.values())).device)
        return groups // self.block_groups, groups % self.block_groups

    def drop_newest(self, tokens: int) -> None:
        """Drop this many tokens at the end; they must exist."""
        group = self.kv_format.group_tokens
        while tokens:
            whole = tokens // group if not self._short else 0
            if whole:
                self.end, tokens = self.end - whole, tokens - whole * group
                continue
            last = self.end - 1
            count = self._short.pop(last, group)
            if count <= tokens:
                self.end, tokens = last, tokens - count
            else:
                self._short[last], tokens = count - tokens, 0
        self._give_back()

    def drop_oldest(self, tokens: int) -> None:
        """Drop the groups that lie wholly within the first `tokens` tokens."""
        group = self.kv_format.group_tokens
        while self.begin < self.end:
            whole = min(tokens // group, self.end - self.begin) if not self._short else 0
            if whole:
                self.begin, tokens = self.begin + whole, tokens - whole * group
                continue
            count = self._short.get(self.begin, group)
            if count > tokens:
                break
            self._short.pop(self.begin, None)
            self.begin, tokens = self.begin + 1, tokens - count
        self._give_back()

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every field by `change` of it; `change` works on the first axis."""
        self.fields = {name: change(tensor) for name, tensor in self.fields.items()}

    @property
    def used_bytes(self) -> int:
        """Bytes of the groups that are in use."""
        groups = self.end - self.begin
        return sum(tensor[:, :1, :, :1].nbytes for tensor in self.fields.values()) * groups if groups else 0

    def blocks_for(self, groups: int) -> int:
        """Blocks of memory for that many groups in use, with some to spare."""
        spare = max(groups // SPARE_FRACTION, -(-SPARE_TOKENS // self.kv_format.group_tokens))
        return -(-(self.front + groups + spare) // self.block_groups)

    def _give_back(self) -> None:
        if self.blocks > 2 * (blocks := self.blocks_for(self.end - self.begin)):
            self.move(blocks)

    def move(self, blocks: int) -> None:
        """Move to new memory for `blocks` blocks, at least as many as are in use."""
        held = self._read(self.begin, self.end)
        self._ahead += self.begin - self.front
        self._short = {g - self.begin + self.front: n for g, n in self._short.items()}
        self.begin, self.end = self.front, self.front + self.end - self.begin
        block, place = self._places(self.begin, self.end)
        for name, old in self.fields.items():
            # Zeros: kernels load whole blocks, and what no token was stored in must be a number.
            new = old.new_zeros(old.shape[0], blocks, *old.shape[2:])
            new[:, block, :, place] = held[name].movedim(2, 0)
            self.fields[name] = new
