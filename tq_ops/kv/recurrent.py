"""The memory of one layer: keys and values by token (`kv.layer`), or a recurrent state that each token changes.

A state (linear attention, a short convolution) cannot be cut at a token. So the cache keeps a few versions for each sequence,
labelled by the number of tokens that they have seen. A forward from position p reads version p, discards versions above p,
and writes new ones. So tokens can be taken back and a forward rerun. A missing version is an error.
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
    """The memory of one layer, in the rows and blocks that `PagedSequences` hands out.

    What a query can see after n tokens depends on those n tokens alone. So a forward may be rerun, and up to
    `PagedKVCache.most_undone` of its last tokens taken back: of packed K and V only the length changes, BF16 copies are put
    back, a recurrent state keeps versions.
    """

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""

    def snapshot(self, batch: Batch) -> object | None:
        """The argument for `roll_back`, copied before new tokens are stored; None if it needs nothing."""

    def roll_back(self, snapshot: object, batch: Batch, drop_mask: Tensor) -> None:
        """Take back new tokens `drop_mask` [T] bool, the last ones of their sequences."""

    def take(self, place: SequencePlace, length: int, whole: bool = True) -> dict[str, Tensor]:
        """A sequence's memory after `length` tokens, on the CPU, by name; unless `whole`, only what later tokens overwrite."""

    def put(self, tensors: Mapping[str, Tensor], stored_length: int, place: SequencePlace, length: int) -> None:
        """The inverse of `take`, for the first `length` stored tokens; `reusable` must have allowed this length."""

    def reusable(self, tensors: Mapping[str, Tensor], stored_length: int, length: int) -> int:
        """The longest prefix of at most `length` tokens from which a sequence can continue; 0 for none."""


VERSIONS = 2
"""The fewest versions of a state: one to read, one to write. Each token that may be taken back needs one more."""
MOST_VERSIONS = 2**16
UNSEEN = "no version of a recurrent state has seen the tokens before this batch: too many were taken back"
"""The error message for a missing version."""


@dataclass(frozen=True)
class StateShape:
    """Shape of one layer's state for one sequence.

    Attributes:
        tensors: name, shape and dtype of each tensor.
        versions: number of versions; comparisons ignore it.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    versions: int = field(default=VERSIONS, compare=False)

    def as_json(self) -> dict[str, Any]:
        """A JSON object for a file."""
        tensors = [[name, list(size), str(dtype).removeprefix("torch.")] for name, size, dtype in self.tensors]
        return {"versions": self.versions, "tensors": tensors}

    @classmethod
    def read(cls, raw: object) -> StateShape:
        """The inverse of `as_json`; a ValueError for any other object."""
        match raw:
            case {"versions": int(versions), "tensors": [*entries]} if VERSIONS <= versions < MOST_VERSIONS:
                return cls(tuple(map(_tensor_entry, entries)), versions)
        raise ValueError("a state of its model is not described")

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence, all versions."""
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
    """The state of one layer, for `num_rows` sequences. Row `num_rows` is for tokens without a slot, which pad a batch.

    Attributes:
        tensors: name -> [num_rows + 1, versions, *shape].
        counts: [num_rows + 1, versions] int64, number of tokens that each version has seen; -1 for an empty version.
    """

    def __init__(self, shape: StateShape, num_rows: int, device: torch.device | str = "cpu") -> None:
        if shape.versions < VERSIONS:
            raise ValueError("a state needs a version to read and one to write")
        self.shape, self._spare_row = shape, num_rows
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
        return torch.where(batch.slot_mapping[first] < 0, self._spare_row, batch.rows), batch.positions[first]

    def require(self, batch: Batch) -> None:
        """Raise a ValueError if a sequence's version before its first new token is missing; waits for the device."""
        rows, begin = self._rows(batch)
        if not bool(((self.counts[rows] == begin.unsqueeze(1)).any(1) | (begin == 0) | (rows == self._spare_row)).all()):
            raise ValueError(UNSEEN)

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """The state before each sequence's first new token, [B, *shape] by name; zeros at position 0. On the CPU a ValueError
        as of `require`.
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
        """[n] int64: indices of the tokens after which `write` stores a version: the last ones of each sequence."""
        ends = batch.query_start_loc[1:].long()
        token = torch.arange(len(batch.positions), device=ends.device)
        end = ends[torch.searchsorted(ends, token, right=True)]
        return token[end - token < self.shape.versions]

    def write(self, after: Mapping[str, Tensor], tokens: Tensor, batch: Batch) -> None:
        """Store the states after some tokens of a batch, each sequence's last included; at most versions - 1 a sequence.

        Args:
            after: name -> [n, *shape].
            tokens: [n] int64, indices in the batch, ascending.
        """
        rows, begin = self._rows(batch)
        ends = batch.query_start_loc[1:].long()
        sequence = torch.searchsorted(ends, tokens, right=True)
        upto = torch.searchsorted(tokens, ends)  # tokens of this and all earlier sequences
        number = upto[sequence] - 1 - torch.arange(len(tokens), device=tokens.device)  # 0: the last token of a sequence
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
        """Does nothing: the next `write` discards the versions of dropped tokens."""

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
