"""Rotated Lloyd-Max formats: `tq4`, the product's packed 66-byte layout, its kin of 2 to 8 bits, and the published `tq4_seed`.

All rotate a unit vector by the layer's Haar rotation and quantize each coordinate with one Gaussian codebook; `tq4` and the
132-byte `tq4_seed` choose the same levels and differ in what is stored. Source: TurboQuant (arXiv 2504.19874), MSE variant,
no QJL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import Codebook, haar_rotation, lloyd_max
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.packing import planes
from haarkv.tq_ops.formats.rotated import (
    Description,
    RotatedFormat,
    Transform,
    centroids_at,
    choose_levels,
)

BITS = 4
SEED_EPS = 1e-6
_CPU = torch.device("cpu")

Rotation = Callable[[int, int], Tensor]
"""(layer, head_dim) -> [D, D] bf16."""


@cache
def codebook_on(head_dim: int, device: torch.device, bits: int = BITS) -> Codebook:
    """The codebook of 2**bits levels, on a device: the published one up to 4 bits, the optimum from 5 on.

    The published solver stops after 200 rounds, which costs nothing up to 4 bits, 1 % at 5, a fifth at 6, a half at 8. There
    are published tables for some sizes of a head only; the others have the optimum at every width.
    """
    book = lloyd_max(bits, head_dim, "published" if bits <= BITS else "converged")
    return Codebook(book.centroids.to(device), book.boundaries.to(device))


class TurboQuant(RotatedFormat):
    """`tq4` and its kin: packed levels and one FP16 scale a vector, the renormalisation folded into the scale.

        gamma = ||x||;  level = #{b : (bf16(x / gamma) @ rotation) >= b};  scale = fp16(gamma / ||c[level]||)

    Two, four and eight bits are packed in parts of the vector (tq4: `byte[j] = level[j] | level[j + D/2] << 4`), other widths
    in planes that are, low bits first: tq3 is tq2's layout of the low two bits and then the third, eight a byte.

    It stands for `scale * c[level]` in the rotated domain. A zero vector stores scale 0 and comes back as zeros; a scale
    above FP16 saturates at its largest finite value, one below its smallest comes back as zeros.

    With `along`, scale = fp16(gamma / sum(c[level] * y)), y what levels are chosen from: the length along x is kept, and all
    of the error lies across it. Else what comes back is too short along x, `tq2` by 6 %, `tq3` by 1.7 %. Attention takes the
    mean of many values, in which errors across them cancel, and a common shortfall does not. Keys are better off short: what
    they err makes a softmax's sum too large.

    Args:
        bits: of a level.
        purpose: one line for a table.
        rotation: of a layer; the shipped one unless given.
        along: of values of few bits.
    """

    def __init__(self, bits: int, purpose: str, rotation: Rotation = haar_rotation, along: bool = False) -> None:
        super().__init__(f"tq{bits}", purpose, bits, self._described)
        self._transform, self._along = Transform(rotation), along

    def _described(self, head_dim: int) -> Description:
        together = 8 // planes(self.bits)[-1]
        if head_dim < together or head_dim % together:
            need = "an even head_dim" if together == 2 else f"a head_dim that {together} divides"
            raise InputError(f"{self.name} packs {together} coordinates together and needs {need}, not {head_dim}")
        book = codebook_on(head_dim, _CPU, self.bits)
        return Description(
            head_dim=head_dim,
            bits=self.bits,
            transform=self._transform,
            centroids=tuple(book.centroids.tolist()),
            boundaries=tuple(book.boundaries.tolist()),
            along=self._along,
        )


def rotated_pair(bits: int) -> tuple[TurboQuant, TurboQuant]:
    """K's and V's format of a few bits."""
    purpose = f"as tq4, with {bits} bits"
    return TurboQuant(bits, purpose), TurboQuant(bits, purpose, along=True)


class TurboQuant4Seed(KVFormat):
    """`tq4_seed`: the layout of the public Qwen3-14B kernels, one byte a level and the FP32 norm. Kept to compare with.

        gamma = sqrt(sum(x**2) + 1e-6);  restored: bf16(c[level] * rsqrt(sum(c[level]**2) + 1e-6) * gamma) @ rotation.T

    As published, a zero vector comes back with norm 1e-3 and vectors shorter than about 1e-2 shrink. Squares overflow
    from |x| ~ 1e19 on; such a vector is refused instead of stored as infinite.

    Args:
        rotation: of a layer; the shipped one unless given.
    """

    name = "tq4_seed"
    purpose = "published Qwen3-14B layout"

    def __init__(self, rotation: Rotation = haar_rotation) -> None:
        self._transform = Transform(rotation)

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"codes": Field(torch.uint8, (head_dim,)), "norm": Field(torch.float32, ())}

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        unit, norm = self._unit(x.float())
        require_finite(norm)
        return {"codes": self.choose(unit, self._rotation(x, layer)), "norm": norm.squeeze(-1)}

    def choose(self, unit: Tensor, rotation: Tensor) -> Tensor:
        """Levels [..., D] uint8 of unit vectors [..., D] fp32."""
        return choose_levels(unit, rotation, codebook_on(unit.shape[-1], unit.device).boundaries)[0]

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        codes = fields["codes"]
        centroids = centroids_at(codes, codebook_on(codes.shape[-1], codes.device).centroids)
        scale = (centroids.square().sum(-1) + SEED_EPS).rsqrt() * fields["norm"]
        rotated = (centroids * scale.unsqueeze(-1)).to(torch.bfloat16).float()
        restored = rotated @ self._rotation(rotated, layer).T
        return restored.to(torch.bfloat16).float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Levels, then the norm as FP32 little-endian."""
        return torch.cat([fields["codes"], bytes_of(fields["norm"], 0)], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        return fields["codes"]

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norm = (x.square().sum(-1, keepdim=True) + SEED_EPS).sqrt()
        return x / norm, norm

    def _rotation(self, x: Tensor, layer: int) -> Tensor:
        return self._transform.on(layer, x.shape[-1], x.device)
