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
    """Tokens and what is stored of them.

    Attributes:
        token_ids: of the whole sequence; the last may not be stored yet.
        length: tokens that are stored.
        tensors: on the CPU, `layers.L.NAME` by the names of `LayerState.take`.
        earlier: the sequence where its last answer began, with only those tensors that the answer overwrote: a prompt that
            drops or changes the answer continues from there.
    """

    token_ids: tuple[int, ...]
    length: int
    tensors: Mapping[str, Tensor]
    earlier: StoredSequence | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + (self.earlier.nbytes if self.earlier else 0)

    @property
    def versions(self) -> tuple[StoredSequence, ...]:
        """All that a prompt may continue from, each with all of its tensors, the longest first."""
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
    """Copy a sequence out of a cache, where it stays.

    Args:
        token_ids: at least those that are stored.
        whole: else only what later tokens overwrite.
        earlier: of the same sequence, taken before with `whole` false.
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
    """Begin a sequence in a cache of the same plan with what is stored, or its first `length` tokens as `reusable` allows.

    Returns:
        its id; a CacheFullError if the cache has no room for it.
    """
    length = snapshot.length if length is None else length
    version = [version for version in snapshot.versions if version.length >= length][-1]  # it holds the most before `length`
    sequence = paging.add(length)
    for layer, state in cache.states.items():
        state.put(version.layer_tensors(layer), version.length, paging.places(sequence), length)
    return sequence


def reusable(snapshot: StoredSequence, token_ids: Sequence[int], cache: PagedKVCache) -> int:
    """How many tokens of another sequence need not be computed; its last one always must be.

    The two sequences begin alike, and each layer can continue: what the next query sees in BF16 or in a window is still there,
    and a state has the version of just these tokens.
    """
    most = min(snapshot.length, len(token_ids) - 1)
    common = next((i for i in range(most) if snapshot.token_ids[i] != token_ids[i]), most)
    return max(_reusable(version, min(common, version.length), cache) for version in snapshot.versions)


def _reusable(snapshot: StoredSequence, length: int, cache: PagedKVCache) -> int:
    """Most of a version's first `length` tokens that every layer can continue from."""
    tensors = {layer: snapshot.layer_tensors(layer) for layer in cache.states}
    before = None
    while length and length != before:
        before = length
        for layer, state in cache.states.items():
            length = state.reusable(tensors[layer], snapshot.length, length)
    return length


class Advance:
    """The next tokens of some sequences, of which `keep` may take some back after the forward.

    Packed tokens behind a sequence's length are ignored; each layer's state saves what else new tokens overwrite.

    Args:
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
