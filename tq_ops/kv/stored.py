"""One sequence as a cache stores it, taken out of the cache: its tokens, and its K and V byte for byte.

`take` copies it out, `put` copies it into any cache of the same plan, where it goes on as if it had never left. `requantized`
stores it by another plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import WINDOW_CHUNK, KVPlan
from haarkv.tq_ops.kv.window import Window


@dataclass(frozen=True)
class StoredSequence:
    """Tokens and what is stored of them.

    Attributes:
        token_ids: of the whole sequence; the last may not be stored yet.
        length: tokens that are stored.
        tensors: on the CPU: `layers.L.k.FIELD` and `layers.L.v.FIELD` [blocks, Hkv, block_size / G, *field.shape], zero
            behind the last token, and `layers.L.k.window` [Hkv, sink + ring, D] BF16 where tokens stay in it.
    """

    token_ids: tuple[int, ...]
    length: int
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def blocks(self) -> int:
        """Blocks of each side of each layer."""
        return next((len(tensor) for name, tensor in self.tensors.items() if not name.endswith(".window")), 0)


def take(cache: PagedKVCache, paging: PagedSequences, sequence: int, token_ids: Sequence[int]) -> StoredSequence:
    """Copy a sequence out of a cache, in which it stays.

    Args:
        token_ids: its tokens, at least those that are stored.
    """
    length = paging.length(sequence)
    assert length <= len(token_ids), "more tokens are stored than were named"
    blocks, row = paging.places(sequence)
    index = torch.tensor(blocks[: blocks_for(length, cache.block_size)], dtype=torch.int64, device=cache.device)
    tensors: dict[str, Tensor] = {}
    for name, kv_format, fields, window in cache.fields():
        groups = length // kv_format.group_tokens
        for field, tensor in fields.items():
            tensors[f"{name}.{field}"] = _cut(tensor[index].cpu(), groups)
        if window is not None:
            held = window.held(length)
            tensors[f"{name}.window"] = window.vectors[row].cpu().masked_fill(~held[:, None], 0.0)
    return StoredSequence(tuple(token_ids), length, tensors)


def put(stored: StoredSequence, cache: PagedKVCache, paging: PagedSequences, length: int | None = None) -> int:
    """Begin a sequence in a cache of the same plan with what is stored.

    Args:
        length: of its first so many tokens alone, as `reusable` allows; all of them unless given.
    Returns:
        the sequence's id; its next token is that at `length`.
    Raises:
        CacheFullError: the cache has no room for it.
    """
    length = stored.length if length is None else length
    sequence = paging.add(length)
    blocks, row = paging.places(sequence)
    index = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    for name, _, fields, window in cache.fields():
        for field, tensor in fields.items():
            tensor[index] = stored.tensors[f"{name}.{field}"][: len(blocks)].to(cache.device)
        if window is not None:
            window.vectors[row] = stored.tensors[f"{name}.window"].to(cache.device)
    return sequence


def reusable(stored: StoredSequence, token_ids: Sequence[int], plan: KVPlan) -> int:
    """How many tokens of another sequence need not be computed, because these are stored: its last one always must be.

    They begin alike. Where tokens stay in BF16, those that the next query sees in it must still be held: the ring has room
    for some more than the tail, so that a few tokens at the end may differ.
    """
    most = min(stored.length, len(token_ids) - 1)
    common = next((i for i in range(most) if stored.token_ids[i] != token_ids[i]), most)
    if common == stored.length:
        return common
    for kv_format in plan.formats:
        ring = plan.ring_tokens(kv_format)
        # The next query sees its tail, and the group that it is in, in BF16.
        if ring and common < stored.length - ring + plan.tail(kv_format) + kv_format.group_tokens:
            return 0
    return common


def _cut(tensor: Tensor, groups: int) -> Tensor:
    """A copy [blocks, Hkv, P, *] with zeros behind so many groups: what others left there is nobody's business."""
    if len(tensor) and (rest := groups - (len(tensor) - 1) * tensor.shape[2]) < tensor.shape[2]:
        tensor[-1, :, max(rest, 0) :] = 0
    return tensor


def requantized(stored: StoredSequence, before: KVPlan, after: KVPlan, num_kv_heads: int, head_dim: int) -> StoredSequence:
    """The same sequence as another plan stores it: from what is packed, and from BF16 where that is still held.

    Args:
        before: the plan that it is stored by.
    """
    source, target = (
        PagedKVCache(plan, num_kv_heads=num_kv_heads, head_dim=head_dim, num_blocks=max(stored.blocks, 1), num_rows=1)
        for plan in (before, after)
    )
    from_paging, to_paging = (PagedSequences(cache.num_blocks, cache.block_size, num_rows=1) for cache in (source, target))
    places, sequence = from_paging.places(put(stored, source, from_paging)), to_paging.add()
    carry_over(source, *places, stored.length, target, to_paging, sequence)
    return take(target, to_paging, sequence, stored.token_ids)


def carry_over(
    source: PagedKVCache, blocks: Sequence[int], row: int, length: int, target: PagedKVCache, paging: PagedSequences,
    sequence: int,
) -> None:  # fmt: skip
    """Store a sequence that is in one cache in another as well, which may have another plan.

    Args:
        source: the cache that it is in, on the target's device.
        blocks, row: its places there.
        length: tokens that it has there.
        target, paging: the other cache.
        sequence: its id there, with no tokens so far.
    Raises:
        CacheFullError: there is no room for it.
    """
    chunk = target.most_new_tokens or WINDOW_CHUNK
    table = torch.tensor([blocks], dtype=torch.int32, device=source.device)
    for begin in range(0, length, chunk):
        batch = paging.batch([sequence], [min(chunk, length - begin)])
        first, last = begin // source.block_size, int(batch.positions[-1]) // source.block_size
        batch = batch.to(target.device)
        inside = batch.positions - first * source.block_size
        for layer in range(target.num_layers):
            k, v = (
                _with_window(x[0, :, inside], window, row, batch.positions, length).transpose(0, 1)
                for x, window in zip(source.read(layer, table[:, first : last + 1]), source.windows(layer), strict=True)
            )
            target.write(layer, k, v, batch)


def _with_window(x: Tensor, window: Window | None, row: int, positions: Tensor, length: int) -> Tensor:
    """Vectors x [Hkv, n, D], those in BF16 that a window holds in a row in their place."""
    if window is None:
        return x
    place = torch.where(positions < window.sink, positions, window.sink + positions % max(window.ring, 1))
    held = (positions < window.sink) | (positions >= length - window.ring)
    place = torch.where(held, place, 0)
    return torch.where(held[:, None], window.vectors[row][:, place].float(), x)
