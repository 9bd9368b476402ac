"""Tensors of a checkpoint: names, shapes, how ranks share them; and the weights of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import Weight, dense


@dataclass(frozen=True)
class Axis:
    """One axis of a weight.

    Attributes:
        cut: each rank holds a part; else all of it.
        unit: parts are multiples of this, such as a head's rows.
        shared: with fewer units than ranks, several ranks hold the same one.
    """

    size: int
    cut: bool = False
    unit: int = 1
    shared: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint must hold.

    Attributes:
        name: Hugging Face's, within the layer or in full.
        plus_one: the checkpoint stores w; in memory it is 1 + w in FP32.
        in_fp32: FP32 in memory, whatever the model's dtype.
    """

    name: str
    axes: tuple[Axis, ...]
    plus_one: bool = False
    in_fp32: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def in_memory(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in memory, from the tensor as it is stored."""
        return tensor.float() + 1.0 if self.plus_one else tensor.to(self.memory_dtype(dtype))

    def memory_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in memory, in a model of `dtype`."""
        return torch.float32 if self.plus_one or self.in_fp32 else dtype


class LayerWeights(Mapping[str, Tensor]):
    """One layer's tensors by field, such as `q_proj` or `experts.3.up_proj`; projections are [out, in].

    The mapping gives numbers: quantized blocks are restored at each access. `matrix` gives a projection as it is stored.

    Args:
        tensors: by field; only projections may be in blocks.
        names: Hugging Face name within the layer, by field.
        stack: all experts in one, of which their tensors are views; None where they lie apart.
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

    def named_tensors(self) -> Iterator[tuple[str, str, Weight]]:
        """(field, Hugging Face name within the layer, weight as it is stored)."""
        for field, tensor in self._tensors.items():
            yield field, self._names[field], tensor

    def map(self, change: Callable[[str, Any], Weight], stack: Stack | None = None) -> LayerWeights:
        """A copy with `change(field, weight)` in place of each weight; `stack` is the copy's."""
        return LayerWeights({field: change(field, tensor) for field, tensor in self._tensors.items()}, self._names, stack)

    def part(self, prefix: str) -> LayerWeights:
        """Weights whose fields begin with `prefix`, without it, such as those of one expert."""
        fields = {field: field.removeprefix(prefix) for field in self._tensors if field.startswith(prefix)}
        names = {short: self._names[field] for field, short in fields.items()}
        return LayerWeights({short: self._tensors[field] for field, short in fields.items()}, names)
