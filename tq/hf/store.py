"""The store of K or V of one layer: packed groups, and the first and the newest tokens in the model's own dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.base import groups_to_flush
from haarkv.tq_ops.kv.kept import Kept
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE


@dataclass(frozen=True)
class Prepared:
    """New vectors x [B, Hkv, n, D], and what of them and of the tail is packed; not yet stored.

    Attributes:
        sinks: of x, at its beginning.
        older, newer: tokens that leave the tail, and those of x that are packed at once.
        packed: fields of both.
    """

    x: Tensor
    sinks: int
    older: int
    newer: int
    packed: dict[str, Tensor] | None


class SideStore:
    """K or V of one layer: `sink` tokens unchanged, then packed ones, then up to `tail` tokens unchanged.

    Tokens leave the tail in groups of the format, oldest first, as soon as it would hold more than `tail`. Sinks and tail lie
    in the ring of a paged cache (`Kept`), where kernels read them.

    Args:
        name: `K` or `V`, for messages.
        kv_format: how tokens that have left the tail are stored.
        layer: chooses the rotation.
        sink, tail: in tokens; the tail takes at least `kv_format.group_tokens - 1`.
        like: [B, Hkv, 0, D]; gives shapes, device and the dtype of sink and tail.
        scales: [Hkv, D], what channels are multiplied with before they are stored, powers of two; None for 1.
    Attributes:
        dtype: of the model.
        end: position of the next token.
    Raises:
        InputError: the format has no layout for D.
    """

    def __init__(
        self, name: str, kv_format: KVFormat, layer: int, *, sink: int, tail: int, like: Tensor, scales: Tensor | None = None
    ) -> None:
        self.name, self.layer, self.device, self.dtype = name, layer, like.device, like.dtype
        self.scales = None if scales is None else scales.to(like.device)
        rows, self.heads, _, self.head_dim = like.shape
        # Scaling is exact in dtypes with the exponents of FP32.
        dtype = torch.float32 if like.dtype == torch.float16 and scales is not None else like.dtype
        self.kept = Kept(
            tail=tail, sink=sink, group=kv_format.group_tokens, ring=tail, num_rows=rows, num_kv_heads=self.heads,
            head_dim=self.head_dim, device=like.device, dtype=dtype,
        )  # fmt: skip
        # Of formats that pack each token alone, token j lies at j: kernels find it there.
        self.packed = Packed(kv_format, layer, like, front=sink if kv_format.group_tokens == 1 else 0)
        self.end = self._sinks = self._recent = 0  # the sinks that no window has left behind, and tokens in the tail

    @property
    def rows(self) -> int:
        """Sequences."""
        return len(self.kept.vectors)

    @property
    def keeps(self) -> bool:
        """Whether some tokens are not packed."""
        return bool(self.kept.tail or self.kept.sink)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._sinks + self.packed.tokens + self._recent

    @property
    def in_place(self) -> bool:
        """Whether every token lies where kernels look for it: a tail that was cropped is shorter than they take it for."""
        first = max(self.kept.first_recent(self.end - 1), min(self.kept.sink, self.end))
        return self.packed.in_place and self.end - self._recent == first

    def prepare(self, x: Tensor) -> Prepared:
        """Quantize the tokens that leave the tail as x [B, Hkv, n, D] arrives; store nothing yet.

        Raises:
            NonFiniteError: naming layer, side, row, KV head and position.
        """
        if self.scales is not None:
            x = x.float() * self.scales.unsqueeze(1)
        x = x.to(self.kept.vectors.dtype)
        sinks = min(max(self.kept.sink - self.end, 0), x.shape[2])
        kv_format = self.packed.kv_format
        group = kv_format.group_tokens
        groups = groups_to_flush(self._recent + x.shape[2] - sinks, self.kept.tail + 1, group)
        older = min(groups * group, self._recent)
        newer, packed = groups * group - older, None
        if groups:
            first, vectors = self.end - self._recent, x[:, :, sinks : sinks + newer]
            if older:
                vectors = torch.cat([self.kept.between(first, first + older), vectors], dim=2)
            if group > 1:
                vectors = vectors.reshape(*vectors.shape[:2], groups, group, -1)
            else:
                begin = first + sinks
                positions = torch.arange(begin, begin + vectors.shape[2], device=vectors.device)
                vectors = kv_format.as_stored(vectors, self.layer, positions)
            try:
                packed = kv_format.quantize(vectors, self.layer)
            except NonFiniteVectorError as error:
                raise self._located(error, first + sinks) from None
        return Prepared(x, sinks, older, newer, packed)

    def keep(self, new: Prepared) -> None:
        """Store what `prepare` returned."""
        for begin, end in ((0, new.sinks), (new.sinks + new.newer, new.x.shape[2])):
            if begin < end:
                self.kept.put(new.x[:, :, begin:end], self.end + begin)
        if new.packed is not None:
            self.packed.append(new.packed)
        self.end += new.x.shape[2]
        self._sinks += new.sinks
        self._recent += new.x.shape[2] - new.sinks - new.newer - new.older

    def read(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """The newest `tokens` tokens [B, Hkv, tokens, D], restored into a new tensor."""
        result = self.kept.vectors.new_empty(self.rows, self.heads, tokens, self.head_dim, dtype=dtype)
        place, sinks = tokens - self.tokens, min(self.kept.sink, self.end)
        kept = [self.kept.between(*span) for span in ((sinks - self._sinks, sinks), (self.end - self._recent, self.end))]
        for piece in (kept[0], *self.packed.pieces(), kept[1]):
            vectors = piece if self.scales is None else piece.float() / self.scales.unsqueeze(1)
            unwanted = min(max(-place, 0), piece.shape[2])
            result[:, :, place + unwanted : place + piece.shape[2]] = vectors[:, :, unwanted:]
            place += piece.shape[2]
        return result

    def drop_newest(self, tokens: int) -> None:
        """Drop this many tokens at the end; they must exist."""
        from_tail = min(tokens, self._recent)
        from_packed = min(tokens - from_tail, self.packed.tokens)
        self.end, self._recent, self._sinks = (
            self.end - tokens, self._recent - from_tail, self._sinks - (tokens - from_tail - from_packed),
        )  # fmt: skip
        if from_packed:
            self.packed.drop_newest(from_packed)

    def keep_newest(self, tokens: int) -> None:
        """Drop everything before the newest `tokens` tokens, as far as whole groups allow."""
        unwanted = self.tokens - tokens
        if unwanted <= 0:
            return
        from_sink = min(unwanted, self._sinks)
        self._sinks -= from_sink
        self.packed.drop_oldest(unwanted - from_sink)
        if not self.packed.tokens:
            self._recent -= min(self.tokens - tokens, self._recent)

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `change` of it; `change` works on the first axis."""
        self.kept.vectors = change(self.kept.vectors)
        self.packed.apply(change)

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.kept.vectors, *self.packed.fields.values()]

    @property
    def used_bytes(self) -> int:
        """Bytes of the groups and tokens that are in use."""
        return self.kept.vectors[:, :, :1].nbytes * (self._sinks + self._recent) + self.packed.used_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated, room to grow included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors())

    def _located(self, error: NonFiniteVectorError, first: int) -> NonFiniteError:
        row, head, *place = error.index
        kv_format = self.packed.kv_format
        # A grouped format may refuse a whole group, whose first position is then named.
        position = first + place[0] * kv_format.group_tokens + sum(place[1:])
        where = f"layer {self.layer}: {self.name} of row {row}, KV head {head}, position {position}"
        return NonFiniteError(f"{where} is not finite or too large for {kv_format.name}")


# -- Packed groups ----------------------------------------------------------------------------------------------------------

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
