"""Rotated Lloyd-Max formats: `tq4`, the product's packed 66-byte layout, its kin of 2 to 8 bits, and the published `tq4_seed`.

All rotate a unit vector by the layer's Haar rotation and quantize each coordinate with one Gaussian codebook; `tq4` and the
132-byte `tq4_seed` choose the same levels and differ in what is stored. Source: TurboQuant (arXiv 2504.19874), MSE variant,
no QJL.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks import Codebook, haar_rotation, lloyd_max
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, LevelChoice, bytes_of, require_finite, stored_bytes
from haarkv.tq_ops.formats.packing import pack_parts, pack_planes, planes, unpack_parts, unpack_planes

BITS = 4
LARGEST_FP16 = 65504.0
SEED_EPS = 1e-6


@cache
def codebook_on(head_dim: int, device: torch.device, bits: int = BITS) -> Codebook:
    """The codebook of 2**bits levels, on a device: the published one up to 4 bits, the fixed point from 5 on.

    The published solver stops after 200 rounds, which costs nothing up to 4 bits, 1 % at 5, a fifth at 6, a half at 8.
    """
    book = lloyd_max(bits, head_dim, "published" if bits <= BITS else "converged")
    return Codebook(book.centroids.to(device), book.boundaries.to(device))


@cache
def rotation_on(layer: int, head_dim: int, device: torch.device) -> Tensor:
    """A layer's BF16 rotation [D, D] as fp32 numbers, on a device: products with it accumulate in FP32."""
    return haar_rotation(layer, head_dim).to(device, torch.float32)


def polar_quantize(unit: Tensor, layer: int, bits: int = BITS) -> Tensor:
    """Rotate unit vectors and quantize each coordinate.

        y = bf16(unit) @ rotation;   level_i = #{b : y_i >= b}

    Args:
        unit: [..., D] fp32, of norm 1 (or 0).
        layer: chooses the rotation.
        bits: of a level.
    Returns:
        level: [..., D] uint8, 0 to 2**bits - 1. A zero vector gets level 8 of 16 everywhere.
    Rounding points: unit to BF16; the product accumulates in FP32 and stays there.
    """
    y = unit.to(torch.bfloat16).float() @ rotation_on(layer, unit.shape[-1], unit.device)
    boundaries = codebook_on(unit.shape[-1], unit.device, bits).boundaries
    return torch.bucketize(y, boundaries, right=True, out_int32=True).to(torch.uint8)


def polar_choice(unit: Tensor, layer: int, noise: float | Tensor, bits: int = BITS) -> LevelChoice:
    """What `polar_quantize` chooses the levels of unit vectors from, and how far noise may move it.

        reach_j = noise + 2 * sqrt(sum over the coordinates i beside a BF16 rounding point of (ulp_i * rotation_ij)**2)

    That covers any four roundings that fall the other way, and of many, whose signs are random, five standard deviations: a
    rounding error is spread evenly over an ulp, and the difference of two has a variance of ulp**2 / 6.

    Args:
        unit: [..., D] fp32, of norm 1 (or 0).
        noise: of each coordinate of `unit`; the rotation spreads it evenly.
        bits: of a level.
    """
    rotation = rotation_on(layer, unit.shape[-1], unit.device)
    rounded = unit.to(torch.bfloat16).float()
    # BF16 keeps 8 bits: a step is 2**-8 of the power of two above the number.
    step = torch.ldexp(torch.ones_like(unit), torch.frexp(unit).exponent - 8)
    to_rounding_point = step / 2 - (unit - rounded).abs()
    reach = 2 * (torch.where(to_rounding_point <= noise, step, 0.0).square() @ rotation.square()).sqrt() + noise
    return LevelChoice(rounded @ rotation, reach, codebook_on(unit.shape[-1], unit.device, bits).boundaries)


def exact_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and L2 norms without underflow or overflow, for any finite x.

    Scaling by a power of two is exact, so an ordinary vector gets the same bits as `x / sqrt(sum(x**2))`.

    Args:
        x: [..., D] fp32, finite.
    Returns:
        unit: [..., D] fp32; zeros where x is zero.
        norm: [..., 1] fp32, in units of x; inf if it or the largest value's next power of two exceeds FP32.
    """
    # Denormals first become normal numbers; 2**64 keeps every step a power of two inside FP32's exponents.
    tiny = x.abs().amax(-1, keepdim=True) < 2.0**-100
    lifted = torch.where(tiny, x * 2.0**64, x)
    exponent = torch.frexp(lifted.abs().amax(-1, keepdim=True)).exponent
    scaled = torch.ldexp(lifted, -exponent)
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    unit = torch.where(norm > 0, scaled / norm, torch.zeros_like(scaled))
    norm = torch.ldexp(norm, exponent)
    return unit, torch.where(tiny, norm * 2.0**-64, norm)


def centroids_at(level: Tensor, bits: int = BITS) -> Tensor:
    """Centroid of each level: [..., D] uint8 -> [..., D] fp32. `index_select` is three times as fast as indexing."""
    centroids = codebook_on(level.shape[-1], level.device, bits).centroids
    return centroids.index_select(0, level.flatten().int()).view(level.shape)


def pack_halves(level: Tensor) -> Tensor:
    """Two 4-bit levels a byte: `byte[j] = level[j] | level[j + D/2] << 4`. [..., D] uint8 -> [..., D/2] uint8."""
    return pack_parts(level, 4)


def unpack_halves(codes: Tensor) -> Tensor:
    """Inverse of `pack_halves`: [..., D/2] uint8 -> [..., D] uint8."""
    return unpack_parts(codes, 4)


class TurboQuant:
    """`tq4` and its kin: packed levels and one FP16 scale a vector, the renormalisation folded into the scale.

        gamma = ||x||;  level as `polar_quantize`;  scale = fp16(gamma / ||c[level]||)

    Two, four and eight bits are packed in parts of the vector (tq4: `byte[j] = level[j] | level[j + D/2] << 4`), other widths
    in planes that are, low bits first: tq3 is tq2's layout of the low two bits and then the third, eight a byte.

    It stands for `scale * c[level]` in the rotated domain. A zero vector stores scale 0 and comes back as zeros; a scale
    above FP16 saturates at its largest finite value, one below its smallest comes back as zeros.
    """

    group_tokens = 1
    lossy = True

    def __init__(self, bits: int, purpose: str) -> None:
        self.name = f"tq{bits}"
        self.purpose = purpose
        self.bits = bits

    def fields(self, head_dim: int) -> dict[str, Field]:
        together = 8 // planes(self.bits)[-1]
        if head_dim < together or head_dim % together:
            need = "an even head_dim" if together == 2 else f"a head_dim that {together} divides"
            raise InputError(f"{self.name} packs {together} coordinates together and needs {need}, not {head_dim}")
        return {"codes": Field(torch.uint8, (head_dim * self.bits // 8,)), "scale": Field(torch.float16, ())}

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(stored_bytes(self.fields(head_dim)))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        unit, norm = exact_norm(x)
        level = polar_quantize(unit, layer, self.bits)
        scale = norm.squeeze(-1) / torch.linalg.vector_norm(centroids_at(level, self.bits), dim=-1)
        return {"codes": pack_planes(level, self.bits), "scale": scale.clamp(max=LARGEST_FP16).to(torch.float16)}

    def rotated(self, fields: dict[str, Tensor]) -> Tensor:
        """The vectors [..., D] fp32 in the rotated domain: `scale * c[level]`."""
        return centroids_at(self.levels(fields), self.bits) * fields["scale"].float().unsqueeze(-1)

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        rotated = self.rotated(fields)
        return rotated @ rotation_on(layer, rotated.shape[-1], rotated.device).T

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Codes, then the scale as FP16 little-endian."""
        return torch.cat([fields["codes"], bytes_of(fields["scale"], 0)], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_planes(fields["codes"], self.bits)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor) -> LevelChoice | None:
        return polar_choice(exact_norm(x.float())[0], layer, noise, self.bits)


class TurboQuant4Seed:
    """`tq4_seed`: the layout of the public Qwen3-14B kernels, one byte a level and the FP32 norm. Kept to compare with.

        gamma = sqrt(sum(x**2) + 1e-6);  restored: bf16(c[level] * rsqrt(sum(c[level]**2) + 1e-6) * gamma) @ rotation.T

    As published, a zero vector comes back with norm 1e-3 and vectors shorter than about 1e-2 shrink. Squares overflow
    from |x| ~ 1e19 on; such a vector is refused instead of stored as infinite.
    """

    name = "tq4_seed"
    purpose = "the published Qwen3-14B layout, to compare with"
    group_tokens = 1
    lossy = True

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"codes": Field(torch.uint8, (head_dim,)), "norm": Field(torch.float32, ())}

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(stored_bytes(self.fields(head_dim)))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        norm = (x.square().sum(-1, keepdim=True) + SEED_EPS).sqrt()
        require_finite(norm)
        return {"codes": polar_quantize(x / norm, layer), "norm": norm.squeeze(-1)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        centroids = centroids_at(fields["codes"])
        scale = (centroids.square().sum(-1) + SEED_EPS).rsqrt() * fields["norm"]
        rotated = (centroids * scale.unsqueeze(-1)).to(torch.bfloat16).float()
        restored = rotated @ rotation_on(layer, rotated.shape[-1], rotated.device).T
        return restored.to(torch.bfloat16).float()

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Levels, then the norm as FP32 little-endian."""
        return torch.cat([fields["codes"], bytes_of(fields["norm"], 0)], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor | None:
        return fields["codes"]

    def choice(self, x: Tensor, layer: int, noise: float | Tensor) -> LevelChoice | None:
        x = x.float()
        return polar_choice(x / (x.square().sum(-1, keepdim=True) + SEED_EPS).sqrt(), layer, noise)
