"""One sequence as a cache stores it, byte for byte, outside the cache.

`take` copies it out, `put` copies it into any cache of the same plan. `Advance` takes
new tokens back.
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
    """A sequence with everything that a cache stored for it.

    Attributes:
        token_ids: token ids of the whole sequence; the last token may not be stored yet.
        length: number of stored tokens.
        tensors: `layers.L.NAME` -> tensor on the CPU, with the names of `LayerState.take`.
        earlier: the sequence where its last answer began, with only the tensors that the answer overwrote. A prompt that
            drops or changes the answer continues from there.
    """

    token_ids: tuple[int, ...]
    length: int
    tensors: Mapping[str, Tensor]
    earlier: StoredSequence | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + (self.earlier.nbytes if self.earlier else 0)

    @property
    def versions(self) -> tuple[StoredSequence, ...]:
        """The states from which a prompt may continue (the end, the last answer's start), each complete, the longest first."""
        if self.earlier is None:
            return (self,)
        return self, replace(self.earlier, tensors={**self.tensors, **self.earlier.tensors})

    def layer_tensors(self, layer: int) -> dict[str, Tensor]:
        """Tensors of one layer by their names within it."""
        begin = f"layers.{layer}."
        return {name.removeprefix(begin): tensor for name, tensor in self.tensors.items() if name.startswith(begin)}


def in_blocks(name: str) -> bool:
    """Whether a stored tensor's first axis is blocks of tokens."""
    return name.split(".")[-2] in ("k", "v") and not name.endswith("." + WINDOW)


def take(
    cache: PagedKVCache, paging: PagedSequences, sequence: int, token_ids: Sequence[int], whole: bool = True,
    earlier: StoredSequence | None = None,
) -> StoredSequence:  # fmt: skip
    """Copy a sequence out of a cache; the cache keeps it.

    Args:
        token_ids: token ids of the sequence, at least all stored tokens.
        whole: whether to copy everything; if not, only what later tokens overwrite.
        earlier: an earlier result for the same sequence, with `whole` false.
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
    """Begin a sequence with stored contents in a cache of the same plan; return its id.

    Args:
        length: number of first tokens to copy, a result of `reusable`; all by default.
    Raises:
        CacheFullError: the cache has no room for the sequence.
    """
    length = snapshot.length if length is None else length
    version = [version for version in snapshot.versions if version.length >= length][-1]  # it holds the most before `length`
    sequence = paging.add(length)
    for layer, state in cache.states.items():
        state.put(version.layer_tensors(layer), version.length, paging.places(sequence), length)
    return sequence


def reusable(snapshot: StoredSequence, token_ids: Sequence[int], cache: PagedKVCache) -> int:
    """The number of tokens `token_ids` that need not be computed, because `snapshot` holds them; the last one always must be.

    The sequences have these tokens in common, and each layer can continue after them: `snapshot` still holds all that the next
    query sees in BF16 or in a sliding window, and the version of each recurrent state after exactly these tokens.
    """
    most = min(snapshot.length, len(token_ids) - 1)
    common = next((i for i in range(most) if snapshot.token_ids[i] != token_ids[i]), most)
    return max(_reusable(version, min(common, version.length), cache) for version in snapshot.versions)


def _reusable(snapshot: StoredSequence, length: int, cache: PagedKVCache) -> int:
    """The most of a version's first `length` tokens after which every layer can continue."""
    tensors = {layer: snapshot.layer_tensors(layer) for layer in cache.states}
    before = None
    while length and length != before:
        before = length
        for layer, state in cache.states.items():
            length = state.reusable(tensors[layer], snapshot.length, length)
    return length


class Advance:
    """The next tokens of some sequences; after the forward, `keep` takes some of them back.

    Packed tokens need no copy, and recurrent states keep versions. BF16 tokens are copied before new ones overwrite them.

    Args:
        sequences, counts: as in `PagedSequences.batch`.
    Attributes:
        batch: batch of the new tokens, on the cache's device.
    Raises:
        CacheFullError: as in `PagedSequences.batch`.
    """

    def __init__(self, cache: PagedKVCache, paging: PagedSequences, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._paging, self._sequences, self._counts = paging, list(sequences), list(counts)
        self.batch: Batch = paging.batch(sequences, counts).to(cache.device)
        snapshots = ((state, state.snapshot(self.batch)) for state in cache.states.values())
        self._saved: list[tuple[LayerState, object]] = [
            (state, snapshot) for state, snapshot in snapshots if snapshot is not None
        ]

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the first `counts` new tokens of each sequence, and take the others back."""
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
