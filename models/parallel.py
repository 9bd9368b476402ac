"""Tensor parallelism: the part of a model that each rank holds.

Attention is split by heads, MLPs by their inner width, embedding and head by the vocabulary; norms and routers are on every
rank. Ranks communicate after attention, after the MLP, at the embedding and at the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:  # commands use `SINGLE_RANK` before they import torch
    from torch import Tensor

    from haarkv.models.config import Layer, ModelConfig
    from haarkv.models.tensors import Axis

T = TypeVar("T")


class Ranks(Protocol):
    """Processes that run one model and make the same calls in the same order; `local` is the rank on this machine."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local(self) -> int: ...

    def sum(self, partial: Tensor) -> Tensor:
        """All-reduce of fp32 tensors, the same bits on every rank; `partial` may be overwritten."""

    def gather(self, part: Tensor, width: int) -> Tensor:
        """All-gather of each rank's `even_share` of the last axis: [..., share] -> [..., width]."""

    def share(self, value: T) -> T:
        """Broadcast of rank 0's value."""

    def collect(self, value: T) -> list[T]:
        """All ranks' values, on rank 0; [] elsewhere."""


@dataclass(frozen=True)
class Alone:
    """One process with the whole model."""

    rank: int = 0
    size: int = 1
    local: int = 0

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor, width: int) -> Tensor:
        return part

    def share(self, value: T) -> T:
        return value

    def collect(self, value: T) -> list[T]:
        return [value]


SINGLE_RANK = Alone()


def even_share(width: int, rank: int, size: int) -> slice:
    """A rank's part of `width`; parts differ by one at most.

    >>> [even_share(7, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(width * rank // size, width * (rank + 1) // size)


def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> slice:
    """A rank's KV heads: an even share, or one that several ranks hold.

    >>> [kv_heads_of(2, rank, 4) for rank in range(4)]
    [slice(0, 1, None), slice(0, 1, None), slice(1, 2, None), slice(1, 2, None)]
    """
    if num_kv_heads >= size:
        return even_share(num_kv_heads, rank, size)
    head = rank * num_kv_heads // size
    return slice(head, head + 1)


@dataclass(frozen=True)
class Split:
    """One rank's part of a model; an InputError if it cannot be split over this number of ranks."""

    whole: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size == 1:
            return
        for layer in dict.fromkeys(self.whole.layers):
            self._require_parts(layer)
        if self.whole.vocab_size < self.size:
            raise InputError(f"a vocabulary of {self.whole.vocab_size} cannot be split over {self.size} ranks")

    def _require_parts(self, layer: Layer) -> None:
        size, shape = self.size, layer.mixer.kv_shape
        if shape is None or layer.mixer.state_shape is not None:
            raise InputError("a layer with a recurrent state cannot be split over ranks; leave out --tensor-parallel")
        heads = layer.attention.num_heads
        if heads % size:
            raise InputError(f"{heads} heads cannot be split evenly over {size} ranks; --tensor-parallel must divide them")
        if shape.num_kv_heads % size and size % shape.num_kv_heads:
            raise InputError(
                f"{shape.num_kv_heads} KV heads can be neither split evenly over {size} ranks nor held by as many each; "
                "--tensor-parallel must divide them or be a multiple of them"
            )
        for width in (layer.mlp.width, getattr(layer.mlp, "shared", 0)):
            if width % size:
                raise InputError(f"an MLP of {width} columns cannot be split evenly over {size} ranks")

    def kv_heads(self, layer: int) -> slice:
        """The rank's KV heads of a layer."""
        shape = self.whole.kv_shapes[layer]
        return kv_heads_of(shape.num_kv_heads if shape else 0, self.rank, self.size)

    @property
    def part(self) -> ModelConfig:
        """Declaration of the rank's part; `vocab_size` stays the model's."""
        if self.size == 1:
            return self.whole
        return replace(self.whole, layers=tuple(map(self._layer_part, self.whole.layers)))

    def _layer_part(self, layer: Layer) -> Layer:
        mixer, size = layer.attention, self.size
        heads = mixer.num_heads // size, max(1, mixer.num_kv_heads // size)
        return replace(
            layer, mixer=replace(mixer, num_heads=heads[0], num_kv_heads=heads[1]),
            mlp=replace(layer.mlp, width=layer.mlp.width // size),
        )  # fmt: skip

    def slices(self, axes: Sequence[Axis]) -> tuple[slice, ...]:
        """The rank's part of a weight with these axes."""

        def part(axis: Axis) -> slice:
            if not axis.cut:
                return slice(0, axis.size)
            share = kv_heads_of if axis.shared else even_share
            units = share(axis.size // axis.unit, self.rank, self.size)
            return slice(units.start * axis.unit, units.stop * axis.unit)

        return tuple(map(part, axes))
