"""Formats that keep the vector as it is, rounded to a floating type: `bf16`, and `fp32` as the yardstick of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import Field, LevelChoice, bytes_of, lengths_of
from haarkv.tq_ops.formats.exact import Exact
from haarkv.tq_ops.formats.numbers import Kind, Numbers
from haarkv.tq_ops.formats.rotated import Description

_KINDS = {torch.bfloat16: Kind.BF16, torch.float32: Kind.FP32}


class Plain:
    """Vectors stored as one tensor `data` of a floating dtype; not finite values pass through."""

    group_tokens = 1
    lossy = False

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name = name
        self.purpose = purpose
        self._dtype = dtype

    def description(self, head_dim: int) -> Description | None:
        return None  # not one of rotated levels

    def numbers(self, head_dim: int) -> Numbers:
        return Numbers(_KINDS[self._dtype], "data", exact=Exact(torch.inf))

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"data": Field(self._dtype, (head_dim,))}

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(head_dim * self._dtype.itemsize)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self._dtype)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return bytes_of(fields["data"], 1)

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return lengths_of(self.dequantize(fields, layer))

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        return None

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice | None:
        return None
