"""A tensor as a checkpoint stores it: its name, its shape, and how it is cut between ranks; and the tensors of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import Weight, dense


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
        in_fp32: it is kept in FP32, whatever the model's dtype.
    """

    name: str
    axes: tuple[Axis, ...]
    plus_one: bool = False
    in_fp32: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def renamed(self, name: str) -> StoredTensor:
        """The same under another name."""
        return replace(self, name=name)

    def in_memory(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """What is kept of a tensor as it is stored: in the model's dtype or in FP32, or 1 + w in FP32."""
        return tensor.float() + 1.0 if self.plus_one else tensor.to(self.kept_as(dtype))

    def kept_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that it has in memory, of a model's."""
        return torch.float32 if self.plus_one or self.in_fp32 else dtype


class LayerWeights(Mapping[str, Tensor]):
    """One layer's tensors by field, such as `q_proj` or `experts.3.up_proj`; projections are [out, in].

    As a mapping it gives numbers: what is stored in blocks is restored each time it is asked for. `matrix` gives a projection
    as it is stored, for `linear`.

    Args:
        tensors: by field; only projections may be in blocks.
        names: the Hugging Face name of each within the layer.
        stack: all experts in one, of which their tensors are views; None where they lie apart, or there are none.
    """

    def __init__(self, tensors: Mapping[str, Weight], names: Mapping[str, str], stack: Stack | None = None) -> None:
        self._tensors, self._names, self.stack = dict(tensors), names, stack

    def __getitem__(self, field: str) -> Tensor:
        return dense(self._tensors[field])

    def matrix(self, field: str) -> Weight:
        """A projection as it is stored."""
        return self._tensors[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def named(self) -> Iterator[tuple[str, str, Weight]]:
        """(field, Hugging Face name within the layer, tensor as it is stored) of each."""
        for field, tensor in self._tensors.items():
            yield field, self._names[field], tensor

    def changed(self, change: Callable[[str, Any], Weight], stack: Stack | None = None) -> LayerWeights:
        """A copy in which each tensor is what `change` makes of its field and of itself as it is stored.

        Args:
            stack: of the copy, of which its experts are views.
        """
        return LayerWeights({field: change(field, tensor) for field, tensor in self._tensors.items()}, self._names, stack)

    def within(self, prefix: str) -> LayerWeights:
        """The tensors of a part, such as one expert, by their fields behind `prefix`."""
        fields = {field: field.removeprefix(prefix) for field in self._tensors if field.startswith(prefix)}
        names = {short: self._names[field] for field, short in fields.items()}
        return LayerWeights({short: self._tensors[field] for field, short in fields.items()}, names)
