"""The store of K or V of one layer: packed groups, and the first and the newest tokens in the model's own dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats import KVFormat, NonFiniteVectorError
from haarkv.tq_ops.formats.kivi import groups_to_flush
from haarkv.tq_ops.kv.kept import Kept
from tq.hf.packed import Packed


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
