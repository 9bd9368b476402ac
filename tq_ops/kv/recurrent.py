"""What a layer remembers of its sequences: keys and values by token (`kv.layer`), or a state that each token changes.

Such a state, of linear attention or of a short convolution, cannot be cut at a token. Each sequence's is kept in a few
versions, by the number of tokens that it has seen. A forward from position p reads the version that has seen p, writes later
ones beside it and discards those of another continuation. Tokens can so be taken back, and a forward can be run again. A
version that is not there is an error, never another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.shapes import SequencePlace


class LayerState(Protocol):
    """The memory of one layer: each sequence's, in rows and blocks that the cache's bookkeeping hands out.

    A forward may be run again from the same tokens, and its last tokens may be taken back: what a layer remembers after
    n tokens follows from those n alone. K and V are told apart by their positions; a state keeps versions.
    """

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def snapshot(self, batch: Batch) -> object | None:
        """What `roll_back` needs, taken before the batch's new tokens are stored; None if it needs nothing."""

    def roll_back(self, snapshot: object, batch: Batch, drop_mask: Tensor) -> None:
        """Take back some new tokens, the last ones of their sequences.

        Args:
            drop_mask: [T] bool.
        """

    def take(self, place: SequencePlace, length: int, whole: bool = True) -> dict[str, Tensor]:
        """A sequence's memory after `length` tokens, on the CPU, by names within the layer.

        Args:
            whole: or that alone which later tokens replace.
        """

    def put(self, tensors: Mapping[str, Tensor], stored_length: int, place: SequencePlace, length: int) -> None:
        """The inverse, for the first `length` of the stored tokens, as `reusable` allows."""

    def reusable(self, tensors: Mapping[str, Tensor], stored_length: int, length: int) -> int:
        """The longest prefix, of at most `length` tokens, that a sequence can go on from; 0 for none."""


VERSIONS = 2
"""Of a state, at least: one to go on from, and one to write. Each token that may be taken back takes one more."""
MOST_VERSIONS = 2**16
UNSEEN = "no version of a recurrent state has seen the tokens before this batch: too many were taken back"
"""What is said of a state that is not there."""


@dataclass(frozen=True)
class StateShape:
    """What one layer remembers of a sequence.

    Attributes:
        tensors: name -> shape and dtype of one sequence's part.
        versions: that are kept. Another number of them is the same state.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    versions: int = field(default=VERSIONS, compare=False)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        tensors = [[name, list(size), str(dtype).removeprefix("torch.")] for name, size, dtype in self.tensors]
        return {"versions": self.versions, "tensors": tensors}

    @classmethod
    def read(cls, raw: object) -> StateShape:
        """The inverse.

        Raises:
            ValueError: it is not what `as_json` writes.
        """
        match raw:
            case {"versions": int(versions), "tensors": [*entries]} if VERSIONS <= versions < MOST_VERSIONS:
                return cls(tuple(map(_tensor_entry, entries)), versions)
        raise ValueError("a state of its model is not described")

    @property
    def nbytes(self) -> int:
        """Of one sequence, all versions."""
        one = sum(dtype.itemsize * torch.Size(shape).numel() for _, shape, dtype in self.tensors)
        return self.versions * (one + torch.int64.itemsize)


def _tensor_entry(entry: object) -> tuple[str, tuple[int, ...], torch.dtype]:
    match entry:
        case [str(name), [*size], str(word)] if word in _DTYPES:
            counts = tuple(n for n in size if isinstance(n, int) and 0 < n < 2**31)
            if len(counts) == len(size):
                return name, counts, _DTYPES[word]
    raise ValueError("a state of its model is not described")


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class Recurrent:
    """The state of one layer, for `num_rows` sequences at a time.

    Row `num_rows` is nobody's: tokens without a slot, which pad a batch, read and write it.

    Attributes:
        tensors: name -> [num_rows + 1, versions, *shape].
        counts: [num_rows + 1, versions] int64, tokens that a version has seen; -1 where there is none.
    """

    def __init__(self, shape: StateShape, num_rows: int, device: torch.device | str = "cpu") -> None:
        if shape.versions < VERSIONS:
            raise ValueError("a state needs a version to read and one to write")
        self.shape, self._nobody = shape, num_rows
        self.tensors = {
            name: torch.zeros(num_rows + 1, shape.versions, *size, dtype=dtype, device=device)
            for name, size, dtype in shape.tensors
        }
        self.counts = torch.full((num_rows + 1, shape.versions), -1, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + self.counts.nbytes

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Row and first position of each sequence of a batch, both [B]."""
        first = batch.query_start_loc[:-1].long()
        return torch.where(batch.slot_mapping[first] < 0, self._nobody, batch.rows), batch.positions[first]

    def require(self, batch: Batch) -> None:
        """Wait for the device, to know whether a version has seen the tokens before each sequence's first new one.

        Raises:
            ValueError: none has.
        """
        rows, begin = self._rows(batch)
        if not bool(((self.counts[rows] == begin.unsqueeze(1)).any(1) | (begin == 0) | (rows == self._nobody)).all()):
            raise ValueError(UNSEEN)

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """The state before each sequence's first new token, [B, *shape] by name: zeros before the first token of all.

        Raises:
            ValueError: as `require`; a GPU is not waited for.
        """
        rows, begin = self._rows(batch)
        matches = self.counts[rows] == begin.unsqueeze(1)
        fresh = begin == 0
        if self.counts.device.type == "cpu":
            self.require(batch)
        version = matches.int().argmax(1)
        return {
            name: tensor[rows, version].masked_fill(fresh.view(-1, *[1] * (tensor.ndim - 2)), 0)
            for name, tensor in self.tensors.items()
        }

    def last_tokens(self, batch: Batch) -> Tensor:
        """Numbers [n] int64 of those of a batch's tokens that `write` keeps a state of: the last ones of each sequence."""
        ends = batch.query_start_loc[1:].long()
        token = torch.arange(len(batch.positions), device=ends.device)
        end = ends[torch.searchsorted(ends, token, right=True)]
        return token[end - token < self.shape.versions]

    def write(self, after: Mapping[str, Tensor], tokens: Tensor, batch: Batch) -> None:
        """Keep the state after some of a batch's tokens; the last one of each sequence must be among them.

        Of more tokens of a sequence than versions but one, the last ones count.

        Args:
            after: name -> [n, *shape], the state after each.
            tokens: [n] int64, their numbers in the batch, ascending.
        """
        rows, begin = self._rows(batch)
        ends = batch.query_start_loc[1:].long()
        sequence = torch.searchsorted(ends, tokens, right=True)
        upto = torch.searchsorted(tokens, ends)  # tokens of this and all earlier sequences
        number = upto[sequence] - 1 - torch.arange(len(tokens), device=tokens.device)  # 0 is a sequence's last
        counts = self.counts[rows]
        counts = counts.masked_fill((counts > begin.unsqueeze(1)) | (begin == 0).unsqueeze(1), -1)
        # The version that was read goes last: it is never overwritten.
        order = counts.masked_fill(counts == begin.unsqueeze(1), torch.iinfo(torch.int64).max).argsort(1)
        newest = number < self.shape.versions - 1
        row, version = rows[sequence[newest]], order[sequence[newest], number[newest]]
        self.counts[rows] = counts
        self.counts[row, version] = batch.positions[tokens[newest]] + 1
        for name, tensor in self.tensors.items():
            tensor[row, version] = after[name][newest].to(tensor.dtype)

    def snapshot(self, batch: Batch) -> None:
        return None

    def roll_back(self, snapshot: Any, batch: Batch, drop_mask: Tensor) -> None:
        """Nothing: versions that have seen dropped tokens go when the next are written."""

    def take(self, place: SequencePlace, length: int, whole: bool = True) -> dict[str, Tensor]:
        counts = self.counts[place.row].cpu()
        versions = ((counts >= 0) & (counts <= length)).nonzero().flatten()
        versions = versions[counts[versions].argsort()]
        return {name: tensor[place.row].cpu()[versions] for name, tensor in self.tensors.items()} | {"seen": counts[versions]}

    def put(self, tensors: Mapping[str, Tensor], stored_length: int, place: SequencePlace, length: int) -> None:
        versions = (tensors["seen"] <= length).nonzero().flatten()[-self.shape.versions :]
        self.counts[place.row] = -1
        self.counts[place.row, : len(versions)] = tensors["seen"][versions].to(self.counts.device)
        for name, tensor in self.tensors.items():
            tensor[place.row, : len(versions)] = tensors[name][versions].to(tensor.device)

    def reusable(self, tensors: Mapping[str, Tensor], stored_length: int, length: int) -> int:
        counts: Sequence[int] = tensors["seen"].tolist()
        return max((count for count in counts if count <= length), default=0)
