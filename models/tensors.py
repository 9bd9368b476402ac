"""A tensor as a checkpoint stores it: its name, its shape, and how it is cut between ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One axis of a weight.

    Attributes:
        name: what it counts: hidden, q, kv, mlp, …
        cut: each rank holds a part of it; else every rank has it whole.
        unit: it is cut at multiples of this, such as a head's rows.
        shared: where there are fewer units than ranks, several ranks hold the same one.
    """

    size: int
    name: str = ""
    cut: bool = False
    unit: int = 1
    shared: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint must hold.

    Attributes:
        name: Hugging Face's, within the layer or in full.
        plus_one: w is stored, and 1 + w is what is multiplied with: in memory it is that, in FP32.
    """

    name: str
    axes: tuple[Axis, ...]
    plus_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def renamed(self, name: str) -> StoredTensor:
        """The same under another name."""
        return replace(self, name=name)

    def in_memory(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What is kept of a tensor as it is stored: in the model's dtype, or 1 + w in FP32."""
        return stored.float() + 1.0 if self.plus_one else stored.to(dtype)
