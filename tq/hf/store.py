"""The store of K or V of one layer: first tokens in full precision, packed groups, recent tokens in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.kivi import groups_to_flush

READ_TOKENS = 1024
"""Tokens restored at a time, so that a read needs little memory besides its result."""
SPARE_FRACTION, SPARE_TOKENS = 32, 32
"""Memory is allocated for 1/32 more tokens than there are, and for at least 32 more."""


class Packed:
    """Groups of a format, appended at the end and dropped at either end, in memory allocated ahead.

    Each field is one tensor [B, Hkv, capacity, *field.shape], of which the groups `begin` to `end` are in use. A token is
    copied about 32 times while a cache grows to any length, and no group is ever quantized again: of one that `drop_newest`
    cuts through, the fewer tokens that still count are remembered.

    Args:
        kv_format: how the vectors are stored.
        layer: chooses the rotation.
        like: [B, Hkv, 0, D]; gives shapes and device.
        scales: [Hkv, D], what channels are multiplied with before they are stored, powers of two; None for 1.
    Raises:
        InputError: the format has no layout for D.
    """

    def __init__(self, kv_format: KVFormat, layer: int, like: Tensor, scales: Tensor | None = None) -> None:
        self.kv_format, self.layer = kv_format, layer
        self._scales = None if scales is None else scales.to(like.device).unsqueeze(1)
        batch, heads, _, head_dim = like.shape
        self.fields = {
            name: torch.empty(batch, heads, 0, *field.shape, dtype=field.dtype, device=like.device)
            for name, field in kv_format.fields(head_dim).items()
        }
        self.begin = self.end = 0
        self._short: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Groups that the allocated memory can hold."""
        return next(iter(self.fields.values())).shape[2]

    @property
    def tokens(self) -> int:
        """Tokens that a read returns."""
        group = self.kv_format.group_tokens
        return (self.end - self.begin) * group - sum(group - count for count in self._short.values())

    def quantize(self, vectors: Tensor) -> dict[str, Tensor]:
        """Fields of vectors [B, Hkv, n, D], or [B, Hkv, n / G, G, D] of a format that stores G together."""
        if self._scales is not None:
            scales = self._scales.unsqueeze(2) if self.kv_format.group_tokens > 1 else self._scales
            vectors = vectors.float() * scales
        return self.kv_format.quantize(vectors, self.layer)

    def append(self, new: dict[str, Tensor]) -> None:
        """Store groups: every field [B, Hkv, groups, *field.shape]."""
        count = next(iter(new.values())).shape[2]
        if self.end + count > self.capacity:
            self._move(count)
        for name, values in new.items():
            self.fields[name][:, :, self.end : self.end + count] = values
        self.end += count

    def pieces(self) -> Iterator[Tensor]:
        """All tokens in order, restored: [B, Hkv, n, D] fp32 each."""
        group = self.kv_format.group_tokens
        step = max(1, READ_TOKENS // group)
        for first in range(self.begin, self.end, step):
            last = min(first + step, self.end)
            fields = {name: tensor[:, :, first:last] for name, tensor in self.fields.items()}
            vectors = self.kv_format.dequantize(fields, self.layer)
            if group > 1:
                vectors = vectors.flatten(2, 3)
            if self._scales is not None:
                vectors = vectors / self._scales
            short = {g - first: n for g, n in self._short.items() if first <= g < last}
            if short:
                kept = [g * group + t for g in range(last - first) for t in range(short.get(g, group))]
                vectors = vectors[:, :, kept]
            yield vectors

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

    def _spare(self, groups: int) -> int:
        return max(groups // SPARE_FRACTION, -(-SPARE_TOKENS // self.kv_format.group_tokens))

    def _give_back(self) -> None:
        groups = self.end - self.begin
        if self.capacity > 2 * (groups + self._spare(groups)):
            self._move(0)

    def _move(self, more: int) -> None:
        """Move to new memory with room for `more` groups and some to spare."""
        groups = self.end - self.begin
        room = groups + more + self._spare(groups + more)
        for name, old in self.fields.items():
            new = old.new_empty(*old.shape[:2], room, *old.shape[3:])
            new[:, :, :groups] = old[:, :, self.begin : self.end]
            self.fields[name] = new
        self._short = {g - self.begin: n for g, n in self._short.items()}
        self.begin, self.end = 0, groups


@dataclass(frozen=True)
class Prepared:
    """New vectors, quantized and not yet stored."""

    sink: Tensor
    packed: dict[str, Tensor] | None
    tail: Tensor


class SideStore:
    """K or V of one layer: `sink` tokens unchanged, then packed ones, then up to `tail` tokens unchanged.

    Tokens leave the tail in groups of the format, oldest first, as soon as it would hold more than `tail`.

    Args:
        name: `K` or `V`, for messages.
        kv_format: how tokens that have left the tail are stored.
        layer: chooses the rotation.
        sink, tail: in tokens; the tail takes at least `kv_format.group_tokens - 1`.
        like: [B, Hkv, 0, D]; gives shapes, device and the dtype of sink and tail.
        scales: [Hkv, D] of packed tokens, as `Packed` takes them.
    Raises:
        InputError: the format has no layout for D.
    """

    def __init__(
        self, name: str, kv_format: KVFormat, layer: int, *, sink: int, tail: int, like: Tensor, scales: Tensor | None = None
    ) -> None:
        self.name, self.layer = name, layer
        self.max_sink, self.max_tail = sink, tail
        self.sink, self.tail = like.clone(), like.clone()
        self.packed = Packed(kv_format, layer, like, scales)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self.sink.shape[2] + self.packed.tokens + self.tail.shape[2]

    def prepare(self, x: Tensor, seen: int) -> Prepared:
        """Quantize the tokens that leave the tail as x [B, Hkv, n, D] arrives after `seen` tokens; store nothing yet.

        Raises:
            NonFiniteError: naming layer, side, row, KV head and position.
        """
        x = x.to(self.tail.dtype)
        room = min(max(self.max_sink - seen, 0), x.shape[2])
        sink = torch.cat([self.sink, x[:, :, :room]], dim=2) if room else self.sink
        recent = torch.cat([self.tail, x[:, :, room:]], dim=2) if self.tail.shape[2] else x[:, :, room:]
        kv_format = self.packed.kv_format
        groups = groups_to_flush(recent.shape[2], self.max_tail + 1, kv_format.group_tokens)
        leaving, packed = groups * kv_format.group_tokens, None
        if groups:
            vectors = recent[:, :, :leaving]
            if kv_format.group_tokens > 1:
                vectors = vectors.reshape(*vectors.shape[:2], groups, kv_format.group_tokens, -1)
            try:
                packed = self.packed.quantize(vectors)
            except NonFiniteVectorError as error:
                raise self._located(error, seen + room - self.tail.shape[2]) from None
        # A copy: a view would keep all of x alive.
        return Prepared(sink, packed, recent[:, :, leaving:].clone())

    def keep(self, prepared: Prepared) -> None:
        """Store what `prepare` returned."""
        self.sink, self.tail = prepared.sink, prepared.tail
        if prepared.packed is not None:
            self.packed.append(prepared.packed)

    def read(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """The newest `tokens` tokens [B, Hkv, tokens, D], restored into a new tensor."""
        batch, heads, _, head_dim = self.tail.shape
        result = self.tail.new_empty(batch, heads, tokens, head_dim, dtype=dtype)
        place = tokens - self.tokens
        for piece in (self.sink, *self.packed.pieces(), self.tail):
            unwanted = min(max(-place, 0), piece.shape[2])
            result[:, :, place + unwanted : place + piece.shape[2]] = piece[:, :, unwanted:]
            place += piece.shape[2]
        return result

    def drop_newest(self, tokens: int) -> None:
        """Drop this many tokens at the end; they must exist."""
        from_tail = min(tokens, self.tail.shape[2])
        from_packed = min(tokens - from_tail, self.packed.tokens)
        from_sink = tokens - from_tail - from_packed
        if from_tail:
            self.tail = self.tail[:, :, : self.tail.shape[2] - from_tail].clone()
        if from_packed:
            self.packed.drop_newest(from_packed)
        if from_sink:
            self.sink = self.sink[:, :, : self.sink.shape[2] - from_sink].clone()

    def keep_newest(self, tokens: int) -> None:
        """Drop everything before the newest `tokens` tokens, as far as whole groups allow."""
        unwanted = self.tokens - tokens
        if unwanted <= 0:
            return
        from_sink = min(unwanted, self.sink.shape[2])
        if from_sink:
            self.sink = self.sink[:, :, from_sink:].clone()
        self.packed.drop_oldest(unwanted - from_sink)
        from_tail = min(self.tokens - tokens, self.tail.shape[2]) if not self.packed.tokens else 0
        if from_tail > 0:
            self.tail = self.tail[:, :, from_tail:].clone()

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `change` of it; `change` works on the first axis."""
        self.sink, self.tail = change(self.sink), change(self.tail)
        self.packed.apply(change)

    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [self.sink, self.tail, *self.packed.fields.values()]

    @property
    def used_bytes(self) -> int:
        """Bytes of the groups and tokens that are in use."""
        groups = self.packed.end - self.packed.begin
        packed = sum(tensor[:, :, :1].nbytes for tensor in self.packed.fields.values()) * groups if groups else 0
        return self.sink.nbytes + self.tail.nbytes + packed

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
