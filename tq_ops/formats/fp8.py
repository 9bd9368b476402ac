"""`fp8_e4m3`: eight-bit floats, what serving engines call an fp8 cache. Source: OCP 8-bit floating point, E4M3."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats.base import Field, KVFormat, LevelChoice, require_finite

LARGEST = 448.0


@cache
def _boundaries_on(device: torch.device) -> Tensor:
    """The 252 numbers from which on a vector's coordinate rounds to the next of the 253 finite ones."""
    upper = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.cat([-upper[1:].flip(0), upper])
    middle = (numbers[:-1] + numbers[1:]) / 2
    # A tie goes to the even code; where that is the lower number, the boundary lies just above the tie.
    magnitude = (torch.arange(252) - 126).abs()
    above = torch.nextafter(middle, torch.full_like(middle, torch.inf))
    return torch.where(magnitude % 2 == 0, above, middle).to(device)


class FP8E4M3(KVFormat):
    """Each coordinate rounded to four exponent and three mantissa bits, ties to even, saturating at 448; no scale.

    The smallest number is 2**-9: half of it and less comes back as zero.
    """

    name = "fp8_e4m3"
    purpose = "8-bit floats without a scale, to compare with"

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"codes": Field(torch.uint8, (head_dim,))}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        return {"codes": x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["codes"].view(torch.float8_e4m3fn).float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        return fields["codes"]

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        """1, of every vector: no scale keeps a length, and what levels say of it they say by themselves."""
        return torch.ones(fields["codes"].shape[:-1], dtype=torch.float64, device=fields["codes"].device)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """Place among the 253 finite numbers, 0 for -448, 126 for both zeros."""
        magnitude = (fields["codes"] & 127).int()
        return torch.where(fields["codes"] < 128, 126 + magnitude, 126 - magnitude).to(torch.uint8)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        x = x.float()
        reach = noise * torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return LevelChoice(x, reach.expand_as(x), _boundaries_on(x.device))
