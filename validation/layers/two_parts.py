"""Attention taken apart: packed tokens and those that stay in BF16, in FP32, and which of them each query sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache


@dataclass(frozen=True)
class Parts:
    """Attention's two parts, packed tokens and those in BF16, before they are merged. Leading axes [B, Hkv, G*Q]; S tokens.

    Attributes:
        packed, exact: [B, 1, G*Q, S] bool, tokens that are seen packed; in BF16.
        oldest: [B, 1, G*Q, S] bool, of the latter that which leaves the tail next; none that is a sink.
        queries: [B, Hkv, G*Q, D], times the softmax scale.
        packed_keys, packed_values, exact_keys, exact_values: [B, Hkv, S, D].
        sinks: [S] bool.
        future: [B, 1, G*Q, S] bool, tokens after a query.
        rotation: [D, D], of the layer.
        valid: [B, Q] bool, queries that are no padding.
    """

    packed: Tensor
    exact: Tensor
    oldest: Tensor
    queries: Tensor
    packed_keys: Tensor
    packed_values: Tensor
    exact_keys: Tensor
    exact_values: Tensor
    sinks: Tensor
    future: Tensor
    rotation: Tensor
    valid: Tensor

    def scores(self) -> list[Tensor]:
        """Of each part; of tokens that it does not see -inf."""
        each = (self.packed, self.packed_keys), (self.exact, self.exact_keys)
        return [(self.queries @ keys.mT).masked_fill(~visible, -torch.inf) for visible, keys in each]

    def merge(self) -> Tensor:
        """One softmax over both."""
        return torch.softmax(torch.cat(self.scores(), -1), -1) @ torch.cat([self.packed_values, self.exact_values], 2)

    def sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of each part, against its own maximum: weighted values, and the sum of weights; 0 where it has no token."""
        weights = [torch.exp(x - x.amax(-1, keepdim=True).nan_to_num(neginf=0.0)) for x in self.scores()]
        out = [weights[0] @ self.packed_values, weights[1] @ self.exact_values]
        return out, [w.sum(-1, keepdim=True) for w in weights]

    def ungroup_heads(self, out: Tensor) -> Tensor:
        """[B, Hkv, G*Q, D] -> [T, Hq, D]: what a merge gives, as attention gives it."""
        heads, queries = out.shape[1], self.valid.shape[1]
        by_query = out.view(len(out), heads, -1, queries, out.shape[-1]).permute(0, 3, 1, 2, 4)
        return by_query.flatten(2, 3)[self.valid]


def in_parts(q: Tensor, cache: PagedKVCache, layer: int, batch: Batch, scale: float) -> Parts | None:
    """What attention over a layer's cache consists of; None where K or V keep nothing in BF16. V is seen as K is.

    Arguments as of `paged_attention`.
    """
    windows, shape = cache.kv[layer].windows, cache.kv[layer].shape
    if windows[0] is None or windows[1] is None:
        return None
    placed_batch = cache.kv[layer].place(batch)
    token, position, valid = placed_batch.rectangle()
    heads, group = shape.num_kv_heads, q.shape[1] // shape.num_kv_heads
    rows = q[token].float().view(*token.shape, heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    k, v = cache.kv[layer].read(placed_batch.block_table)
    tokens, at = torch.arange(k.shape[2]), position.repeat(1, group)[:, None, :, None]
    in_window = windows[0].visible(position, len(tokens)).repeat(1, group, 1).unsqueeze(1)
    future, past_end = tokens > at, tokens >= placed_batch.seq_lens.unsqueeze(1)
    attendable = ~future if shape.window is None else ~future & (tokens > at - shape.window)
    sinks = tokens < windows[0].sink
    first = windows[0].first_recent(position).repeat(1, group)[:, None, :, None]
    exact_keys, exact_values = (window.read(placed_batch, len(tokens)) for window in windows if window)
    return Parts(
        ~in_window & attendable, in_window & attendable, (tokens == first) & ~sinks & attendable, rows * scale, k,
        v.masked_fill(past_end[:, None, :, None], 0.0), exact_keys, exact_values, sinks, future & ~past_end[:, None, None],
        haar_rotation(layer, shape.head_dim).float(), valid,
    )  # fmt: skip
