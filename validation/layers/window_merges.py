"""Faults in attention's last step with tokens in BF16: packed tokens and those in BF16 become one softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation.layers.faults import Fault, Table
from haarkv.validation.layers.slips import OUT, Layer


@dataclass
class Parts:
    """Attention's two parts, before they are merged. Leading axes [B, Hkv, G*Q]; scores [.., S] of every token.

    Attributes:
        packed, exact: [B, 1, G*Q, S] bool, tokens that are seen packed; in BF16.
        queries: [B, Hkv, G*Q, D], times the softmax scale.
        packed_scores, exact_scores: by packed K; by K in BF16.
        exact_keys, packed_values, exact_values: [B, Hkv, S, D].
        sinks: [S] bool.
        future: [B, 1, G*Q, S] bool, tokens after a query.
        rotation: [D, D], of the layer.
    """

    packed: Tensor
    exact: Tensor
    queries: Tensor
    packed_scores: Tensor
    exact_scores: Tensor
    exact_keys: Tensor
    packed_values: Tensor
    exact_values: Tensor
    sinks: Tensor
    future: Tensor
    rotation: Tensor

    @property
    def values(self) -> Tensor:
        """[B, Hkv, 2 * S, D]"""
        return torch.cat([self.packed_values, self.exact_values], 2)

    def merged(self, packed: Tensor | None = None, exact: Tensor | None = None) -> Tensor:
        """One softmax over both, of other tokens if some are given."""
        scores = [
            self.packed_scores.masked_fill(~(self.packed if packed is None else packed), -torch.inf),
            self.exact_scores.masked_fill(~(self.exact if exact is None else exact), -torch.inf),
        ]
        return torch.softmax(torch.cat(scores, -1), -1) @ self.values

    def sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of each part, against its own maximum: weighted values, and the sum of weights; 0 where it has no token."""
        out, total = [], []
        for seen, scores, values in (
            (self.packed, self.packed_scores, self.packed_values), (self.exact, self.exact_scores, self.exact_values),
        ):  # fmt: skip
            masked = scores.masked_fill(~seen, -torch.inf)
            weights = torch.exp(masked - masked.amax(-1, keepdim=True).nan_to_num(neginf=0.0))
            out.append(weights @ values)
            total.append(weights.sum(-1, keepdim=True))
        return out, total


Merge = Callable[[Parts], Tensor]


def merging(at: Layer, merge: Merge) -> Table:
    """Attention in two parts, in FP32, merged so; with `Parts.merged` it is right."""

    def attend(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, softmax_scale: float) -> Tensor:
        token, position, valid = reference.pad_queries(batch)
        heads, group = cache.num_kv_heads, q.shape[1] // cache.num_kv_heads
        rows = q[token].float().view(*token.shape, heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3) * softmax_scale
        k, v = cache.read(layer, batch.block_table)
        of_k, of_v = cache.kept(layer)
        if of_k is None or of_v is None:
            return reference.paged_attention(q, cache, layer, batch, softmax_scale)
        tokens = torch.arange(k.shape[2])
        seen = of_k.seen(position, len(tokens)).repeat(1, group, 1).unsqueeze(1)
        future = tokens > position.repeat(1, group)[:, None, :, None]
        keys = of_k.read(batch, len(tokens))
        parts = Parts(
            packed=~seen & ~future,
            exact=seen & ~future,
            queries=rows,
            packed_scores=rows @ k.mT,
            exact_scores=rows @ keys.mT,
            exact_keys=keys,
            packed_values=v.masked_fill((tokens >= batch.seq_lens.unsqueeze(1))[:, None, :, None], 0.0),
            exact_values=of_v.read(batch, len(tokens)),
            sinks=tokens < of_k.sink,
            future=future & (tokens < batch.seq_lens.unsqueeze(1))[:, None, None, :],
            rotation=haar_rotation(layer, cache.head_dim).float(),
        )
        out = merge(parts).view(*k.shape[:2], group, token.shape[1], -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        found: Tensor = out[valid].to(q.dtype)
        return found

    return at.attended(attend)


def merge_faults(at: Layer) -> Iterator[Fault]:
    """Every one, in one layer, for a cache whose K and V both have a window."""

    def unmerged(parts: Parts) -> Tensor:
        out, total = parts.sums()
        return (out[0] + out[1]) / (total[0] + total[1])

    def averaged(parts: Parts) -> Tensor:
        out, total = parts.sums()
        each = [one / of.clamp(min=1e-30) for one, of in zip(out, total, strict=True)]
        return torch.where(total[0] == 0, each[1], torch.where(total[1] == 0, each[0], (each[0] + each[1]) / 2))

    def query_rotated(parts: Parts) -> Tensor:
        return replace(parts, exact_scores=parts.queries @ parts.rotation @ parts.exact_keys.mT).merged()

    def values_rotated(parts: Parts) -> Tensor:
        return replace(parts, exact_values=parts.exact_values @ parts.rotation.T).merged()

    changes: dict[str, Merge] = {
        "tokens of the window are read packed as well": lambda p: p.merged(packed=p.packed | p.exact),
        "the oldest token of the window counts twice": lambda p: p.merged(packed=p.packed | (p.exact & p.packed.roll(1, -1))),
        "the token that leaves the window counts nowhere": lambda p: p.merged(
            packed=p.packed & ~(p.exact & ~p.sinks).roll(-1, -1)
        ),
        "sinks are read packed as well": lambda p: p.merged(packed=p.packed | (p.exact & p.sinks)),
        "sinks count nowhere": lambda p: p.merged(exact=p.exact & ~(p.sinks & p.packed.any(-1, keepdim=True))),
        "packed tokens and the window are merged without the maximum": unmerged,
        "packed tokens and the window are averaged": averaged,
        "the softmax scale is left out in the window": lambda p: replace(
            p, exact_scores=p.exact_scores * p.rotation.shape[0] ** 0.5
        ).merged(),
        "a query sees tokens of the window that follow it": lambda p: p.merged(exact=p.exact | p.future),
        "Q is rotated for the window": query_rotated,
        "V of the window is taken for rotated": values_rotated,
    }
    for name, merge in changes.items():
        yield Fault(name, at.index, "paged_attention", OUT, merging(at, merge))
