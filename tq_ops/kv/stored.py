"""One sequence as a cache stores it, taken out of the cache: its tokens, and what each layer remembers, byte for byte.

`take` copies it out, `put` copies it into any cache of the same plan, where it goes on as if it had never left.
`Advance` takes tokens back again: afterwards a cache is as if they had never come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import WINDOW
from haarkv.tq_ops.kv.recurrent import LayerState


@dataclass(frozen=True)
class StoredSequence:
    """Tokens and what is stored of them.

    Attributes:
        token_ids: of the whole sequence; the last may not be stored yet.
        length: tokens that are stored.
        tensors: on the CPU, of layer L as `layers.L.NAME`, by the names that its state takes them by: `k.FIELD` and
            `v.FIELD` of blocks, `k.window` of tokens in BF16 (`LayerKV.take`); or those of `Recurrent.take`.
        earlier: the same where its last answer began, of which it has those tensors alone that the answer replaced. A prompt
            that leaves out or changes the answer goes on from there.
    """

    token_ids: tuple[int, ...]
    length: int
    tensors: Mapping[str, Tensor]
    earlier: StoredSequence | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + (self.earlier.nbytes if self.earlier else 0)

    @property
    def versions(self) -> tuple[StoredSequence, ...]:
        """All that a prompt may go on from, each with all of its tensors, the longest first."""
        if self.earlier is None:
            return (self,)
        return self, replace(self.earlier, tensors={**self.tensors, **self.earlier.tensors})

    def layer_tensors(self, layer: int) -> dict[str, Tensor]:
        """The tensors of one layer by their names within it."""
        begin = f"layers.{layer}."
        return {name.removeprefix(begin): tensor for name, tensor in self.tensors.items() if name.startswith(begin)}


def in_blocks(name: str) -> bool:
    """Whether a stored tensor's first axis is blocks of tokens."""
    return name.split(".")[-2] in ("k", "v") and not name.endswith("." + WINDOW)


def take(
    cache: PagedKVCache, paging: PagedSequences, sequence: int, token_ids: Sequence[int], whole: bool = True,
    earlier: StoredSequence | None = None,
) -> StoredSequence:  # fmt: skip
    """Copy a sequence out of a cache, in which it stays.

    Args:
        token_ids: its tokens, at least those that are stored.
        whole: or that alone which later tokens replace.
        earlier: of the same sequence, taken before without what stays.
    """
    length, place = paging.length(sequence), paging.places(sequence)
    assert length <= len(token_ids), "more tokens are stored than were named"
    tensors = {
        f"layers.{layer}.{name}": tensor
        for layer, state in cache.states.items()
        for name, tensor in state.take(place, length, whole).items()
    }
    differs = earlier is not None and earlier.tensors and earlier.length < length
    return StoredSequence(tuple(token_ids), length, tensors, earlier if differs else None)


def put(snapshot: StoredSequence, cache: PagedKVCache, paging: PagedSequences, length: int | None = None) -> int:
    """Begin a sequence in a cache of the same plan with what is stored.

    Args:
        length: of its first so many tokens alone, as `reusable` allows; all of them unless given.
    Returns:
        the sequence's id; its next token is that at `length`.
    Raises:
        CacheFullError: the cache has no room for it.
    """
    length = snapshot.length if length is None else length
    version = [version for version in snapshot.versions if version.length >= length][-1]  # it holds the most before `length`
    sequence = paging.add(length)
    for layer, state in cache.states.items():
        state.put(version.layer_tensors(layer), version.length, paging.places(sequence), length)
    return sequence


def reusable(snapshot: StoredSequence, token_ids: Sequence[int], cache: PagedKVCache) -> int:
    """How many tokens of another sequence need not be computed, because these are stored: its last one always must be.

    They begin alike, and every layer can go on from there: where tokens stay in BF16 or leave a window, those that the next
    query sees must still be held, at the sequence's end or where its last answer began; a state must have a version that has
    seen just these.
    """
    most = min(snapshot.length, len(token_ids) - 1)
    common = next((i for i in range(most) if snapshot.token_ids[i] != token_ids[i]), most)
    return max(_reusable(version, min(common, version.length), cache) for version in snapshot.versions)


def _reusable(snapshot: StoredSequence, length: int, cache: PagedKVCache) -> int:
    """The most of a version's first `length` tokens that every layer can go on from."""
    tensors = {layer: snapshot.layer_tensors(layer) for layer in cache.states}
    before = None
    while length and length != before:
        before = length
        for layer, state in cache.states.items():
            length = state.reusable(tensors[layer], snapshot.length, length)
    return length


class Advance:
    """The next tokens of some sequences, some of which may turn out to be wrong.

    Made before a forward stores them; `keep` says after it how many of each sequence stay. What is packed behind a sequence's
    last token is nobody's, so that alone its length says what is there. What else new tokens replace is kept until then: each
    layer's state says what it needs.

    Args:
        cache, paging: where they go.
        sequences, counts: as for `PagedSequences.batch`.
    Attributes:
        batch: of all of them, on the cache's device.
    Raises:
        CacheFullError: as `PagedSequences.batch`.
    """

    def __init__(self, cache: PagedKVCache, paging: PagedSequences, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._paging, self._sequences, self._counts = paging, list(sequences), list(counts)
        self.batch: Batch = paging.batch(sequences, counts).to(cache.device)
        snapshots = ((state, state.snapshot(self.batch)) for state in cache.states.values())
        self._saved: list[tuple[LayerState, object]] = [
            (state, snapshot) for state, snapshot in snapshots if snapshot is not None
        ]

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first so many new tokens of each sequence, and take the others back."""
        drop_counts = [new - remaining for new, remaining in zip(self._counts, counts, strict=True)]
        if not any(drop_counts):
            return
        self._paging.take_back(self._sequences, drop_counts)
        if not self._saved:
            return
        remaining = [torch.arange(new) < stay for new, stay in zip(self._counts, counts, strict=True)]
        undone = ~torch.cat(remaining).to(self.batch.positions.device)
        for state, snapshot in self._saved:
            state.roll_back(snapshot, self.batch, undone)
