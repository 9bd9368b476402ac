"""Formats without levels: `bf16`, `fp32` as the yardstick of tests, and `fp8_e4m3`, what serving engines call an fp8 cache.

Source of the last: OCP 8-bit floating point, E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.stretches import Turns

LARGEST_FP8 = 448.0


class Plain(KVFormat):
    """Vectors stored as one tensor `data` of a floating dtype; not finite values pass through."""

    lossy = False
    plain: torch.dtype

    def __init__(self, name: str, dtype: torch.dtype, purpose: str) -> None:
        self.name, self.purpose, self.plain = name, purpose, dtype

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"data": Field(self.plain, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        return {"data": x.to(self.plain)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["data"].float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return bytes_of(fields["data"], 1)


class ByStretches(Plain):
    """Plain numbers of keys that are stored by stretches, for the reference to read."""

    to_compare = True

    def __init__(self, turns: Turns) -> None:
        super().__init__("fp32", torch.float32, "keys by stretches")
        self._turns = turns

    def turns(self, layer: int) -> Turns:
        return self._turns


class FP8E4M3(KVFormat):
    """Each coordinate rounded to four exponent and three mantissa bits, ties to even, saturating at 448; no scale.

    The smallest number is 2**-9: half of it and less comes back as zero.
    """

    name = "fp8_e4m3"
    purpose = "8-bit floats, no scale"
    to_compare = True

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"codes": Field(torch.uint8, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        return {"codes": x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["codes"].view(torch.float8_e4m3fn).float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return fields["codes"]
