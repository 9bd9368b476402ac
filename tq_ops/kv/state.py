"""What a layer remembers of its sequences, whatever it is: keys and values by token, or a state that each token changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.shapes import Place


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

    def roll_back(self, snapshot: object, batch: Batch, dropped: Tensor) -> None:
        """Take back some new tokens, the last ones of their sequences.

        Args:
            dropped: [T] bool.
        """

    def take(self, place: Place, length: int, whole: bool = True) -> dict[str, Tensor]:
        """A sequence's memory after `length` tokens, on the CPU, by names within the layer.

        Args:
            whole: or that alone which later tokens replace.
        """

    def put(self, tensors: Mapping[str, Tensor], stored_length: int, place: Place, length: int) -> None:
        """The inverse, for the first `length` of the stored tokens, as `reusable` allows."""

    def reusable(self, tensors: Mapping[str, Tensor], stored_length: int, length: int) -> int:
        """The longest prefix, of at most `length` tokens, that a sequence can go on from; 0 for none."""
