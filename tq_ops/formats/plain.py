"""Formats that keep the vector as it is, rounded to a floating type: `bf16`, and `fp32` as the yardstick of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of
from haarkv.tq_ops.formats.numbers import Exact, Kind, Numbers

_KINDS = {torch.bfloat16: Kind.BF16, torch.float32: Kind.FP32}


class Plain(KVFormat):
    """Vectors stored as one tensor `data` of a floating dtype; not finite values pass through."""

    lossy = False

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name, self.purpose, self._dtype = name, purpose, dtype

    def numbers(self, head_dim: int) -> Numbers:
        return Numbers(_KINDS[self._dtype], "data", exact=Exact(torch.inf))

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"data": Field(self._dtype, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self._dtype)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return bytes_of(fields["data"], 1)
