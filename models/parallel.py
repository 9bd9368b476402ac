"""A model on several devices: which part of it each rank holds, and where the ranks must meet.

Attention is split by heads, the MLP (each expert's) by its inner width, embedding and head by the vocabulary. What is left,
norms and routers, each rank has whole. The ranks meet after attention, after the MLP, at the embedding and at the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from haarkv.tq_ops.errors import InputError

if TYPE_CHECKING:  # a command asks for `ALONE` before it imports torch
    from torch import Tensor

    from haarkv.models.base import DecoderConfig

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that run one model together, seen from one of them. All must make the same calls in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        local: of this process among those of its machine; which device it takes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local(self) -> int: ...

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, fp32 of one shape, the same bits on every rank; `partial` may be overwritten."""

    def gather(self, part: Tensor, width: int) -> Tensor:
        """Each rank's `even_share` of the last axis, put together: [..., share] -> [..., width], on every rank."""

    def share(self, value: T) -> T:
        """What rank 0 has, on every rank."""

    def collect(self, value: T) -> list[T]:
        """What every rank has, by rank, on rank 0; elsewhere nothing."""


@dataclass(frozen=True)
class Alone:
    """One process that holds the whole model: sums are what they are."""

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


ALONE = Alone()


def even_share(width: int, rank: int, size: int) -> slice:
    """The part of `width` that a rank holds; parts differ by one at most.

    >>> [even_share(7, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(width * rank // size, width * (rank + 1) // size)


def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> slice:
    """The KV heads of a rank: an even share, or one that several ranks hold where there are fewer heads than ranks.

    >>> [kv_heads_of(2, rank, 4) for rank in range(4)]
    [slice(0, 1, None), slice(0, 1, None), slice(1, 2, None), slice(1, 2, None)]
    """
    if num_kv_heads >= size:
        return even_share(num_kv_heads, rank, size)
    head = rank * num_kv_heads // size
    return slice(head, head + 1)


@dataclass(frozen=True)
class Split:
    """The part of a model that one rank holds.

    Attributes:
        whole: shapes of the model.
    Raises:
        InputError: the model cannot be cut into so many parts, with what cannot.
    """

    whole: DecoderConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        config, size = self.whole, self.size
        if size < 1 or not 0 <= self.rank < size:
            raise InputError(f"there is no rank {self.rank} of {size}")
        if config.num_heads % size:
            raise InputError(
                f"{config.num_heads} heads cannot be split evenly over {size} ranks; --tensor-parallel must divide them"
            )
        if config.num_kv_heads % size and size % config.num_kv_heads:
            raise InputError(
                f"{config.num_kv_heads} KV heads can be neither split evenly over {size} ranks nor held by as many each; "
                "--tensor-parallel must divide them or be a multiple of them"
            )
        inner = "moe_intermediate_size" if config.num_experts else "intermediate_size"
        if getattr(config, inner) % size:
            raise InputError(f"{inner} {getattr(config, inner)} cannot be split evenly over {size} ranks")
        if config.vocab_size < size:
            raise InputError(f"a vocabulary of {config.vocab_size} cannot be split over {size} ranks")

    @property
    def kv_heads(self) -> slice:
        """The rank's KV heads among the model's."""
        return kv_heads_of(self.whole.num_kv_heads, self.rank, self.size)

    @property
    def part(self) -> DecoderConfig:
        """Shapes of the rank's layers; `vocab_size` stays the model's, since every rank gets all logits."""
        whole, size = self.whole, self.size
        return replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=max(1, whole.num_kv_heads // size),
            intermediate_size=whole.intermediate_size // size,
            moe_intermediate_size=whole.moe_intermediate_size // size,
        )

    def axis(self, name: str) -> slice:
        """The rank's part of one axis of a weight, by the name of its size in `DecoderConfig`."""
        if name == "kv_size":
            heads = self.kv_heads
            return slice(heads.start * self.whole.head_dim, heads.stop * self.whole.head_dim)
        if name in _SPLIT:
            return even_share(getattr(self.whole, name), self.rank, self.size)
        return slice(0, getattr(self.whole, name))

    def of(self, axes: Sequence[str]) -> tuple[slice, ...]:
        """The rank's part of a weight with these axes."""
        return tuple(self.axis(name) for name in axes)


_SPLIT = ("q_size", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""Axes that are cut evenly; those of K and V are cut by whole heads."""
