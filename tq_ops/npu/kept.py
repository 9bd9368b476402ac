"""Tokens that stay in BF16, as the programs take them: which places a query sees, and where new tokens go; no PyPTO here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kept import Kept, token_sequences
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KEPT_CHUNK

HIDDEN = -1e30
"""What a logit gets added that nobody may see."""
_ONE_TILE, _LINE = 256, 16
MOST_PLACES, MOST_SINKS = 2048, 256
"""Places that one step of attention takes, and sinks, which its first step of packed keys hides."""


@dataclass(frozen=True)
class KeptShape:
    """Of K and V of a layer alike, as `tq_ops.kv.kept.Kept` has it.

    Attributes:
        tail: tokens that a query sees in BF16, the newest, itself among them.
        sink: first tokens that every query sees in BF16.
        ring: newest tokens there is room for.
        seen: the newest tokens that a query sees at all, itself among them; None for all.
    """

    tail: int
    sink: int
    ring: int
    seen: int | None = None

    @property
    def window(self) -> int:
        """Places of one head of a sequence."""
        return self.sink + self.ring

    @property
    def span(self) -> int:
        """Places as the cube takes them: whole lines, or whole tiles of 256."""
        whole = _LINE if self.window <= _ONE_TILE else _ONE_TILE
        return -(-self.window // whole) * whole

    @property
    def tile(self) -> int:
        """Places of one tile of the cube; divides the span."""
        return min(self.span, _ONE_TILE)


def kept_shape(plan: KVPlan, layer: int, chunk: int = KEPT_CHUNK, window: int | None = None) -> KeptShape | None:
    """What a layer keeps in BF16 of K and of V, None where nothing.

    Args:
        chunk: of the cache.
        window: of the layer.
    """
    k_format = plan.k(layer)
    if not plan.keeps(k_format):
        return None
    return KeptShape(plan.tail(k_format), plan.sink, plan.ring_tokens(k_format, chunk), window)


@dataclass(frozen=True)
class Keeping:
    """What a batch's tokens see and leave in BF16, each [T, …].

    Attributes:
        begin: int64, the row of a token's sequence and its first head among all rows of places.
        seen: [T, span] fp32, 0 at places that a token's query sees and `HIDDEN` at all others.
        token, place: int64, pairs of which token goes to which place of its sequence.
    """

    begin: Tensor
    seen: Tensor
    token: Tensor
    place: Tensor


def keeping(kept: Kept, shape: KeptShape, batch: Batch) -> Keeping:
    """Of a layer's K or V, which are alike."""
    positions, device = batch.positions, batch.positions.device
    heads, window = kept.vectors.shape[1:3]
    recent = positions.unsqueeze(1) - torch.arange(shape.tail, device=device)
    first = torch.arange(shape.sink, device=device).expand(len(positions), -1)
    oldest = (positions.unsqueeze(1) + 1 - shape.seen).clamp(min=0) if shape.seen else 0
    there = torch.cat([recent >= oldest, (first <= positions.unsqueeze(1)) & (first >= oldest)], 1)
    places = torch.cat([kept.places(recent.clamp(min=0)), first], 1)
    seen = torch.full((len(positions), shape.span + 1), HIDDEN, device=device)
    # What is not there goes to a column behind the last.
    seen.scatter_(1, places.masked_fill(~there, shape.span), 0.0)
    tokens = torch.arange(len(positions), device=device)
    sinks = (positions < shape.sink).nonzero().flatten()
    in_ring = tokens if shape.ring else tokens[:0]
    return Keeping(
        begin=batch.rows[token_sequences(batch)] * (heads * window),
        seen=seen[:, : shape.span],
        token=torch.cat([in_ring, sinks]),
        place=torch.cat([kept.in_ring(positions[in_ring]), positions[sinks]]),
    )
