"""The store of K or V of one layer: first tokens in full precision, packed groups, recent tokens in full precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.kivi import groups_to_flush
from tq.hf.packed import Packed


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
        # Of formats that pack each token alone, token j lies at j: kernels find it there.
        self.packed = Packed(kv_format, layer, like, scales, front=sink if kv_format.group_tokens == 1 else 0)

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
        return self.sink.nbytes + self.tail.nbytes + self.packed.used_bytes

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
