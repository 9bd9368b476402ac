"""Formats of groups as if every group were full when it comes: caches without a token in BF16, to compare formats alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from haarkv.tq_ops.formats import Field, KVFormat, LevelChoice
from haarkv.tq_ops.formats.base import lengths_of
from haarkv.tq_ops.formats.numbers import Numbers
from haarkv.tq_ops.formats.rotated import Description
from haarkv.tq_ops.kv.plan import KVPlan


class AsItComes:
    """A format of groups whose groups are all full when they come: what comes out of it is kept, its bytes are counted.

    So no query sees a token in BF16, and even a group's first token is read as its last one lets it be stored.
    """

    group_tokens, lossy = 1, True

    def __init__(self, of: KVFormat) -> None:
        self.of, self.name, self.purpose = of, of.name, of.purpose

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"restored": Field(torch.float32, (head_dim,))}

    def description(self, head_dim: int) -> Description | None:
        return None

    def numbers(self, head_dim: int) -> Numbers | None:
        return None

    def bytes_per_vector(self, head_dim: int) -> float:
        return self.of.bytes_per_vector(head_dim)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """x: [..., n, D], whole groups."""
        groups = x.bfloat16().float().reshape(*x.shape[:-2], -1, self.of.group_tokens, x.shape[-1])
        return {"restored": self.of.dequantize(self.of.quantize(groups, layer), layer).flatten(-3, -2)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["restored"]

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError("only what comes out of it is kept")

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        return None

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return lengths_of(self.dequantize(fields, layer))

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice | None:
        return None


def without_waiting(plan: KVPlan) -> KVPlan:
    """The same, but for groups that are stored as they come."""

    def as_it_comes(kv_format: KVFormat) -> KVFormat:
        return kv_format if kv_format.group_tokens == 1 else AsItComes(kv_format)

    return replace(plan, layers=tuple((as_it_comes(k), as_it_comes(v)) for k, v in plan.layers), recent=None)
