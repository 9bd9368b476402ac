"""Formats of rotated levels: `tq2` to `tq8` (`tq4`: 66 bytes a vector at head_dim 128), and the published `tq4_seed`.

    y = unit @ matrix;  level = #{b : y >= b};  scale = ||x|| / ||c[level]||;  restored: scale * c[level] @ matrix.T

With `along`, scale = ||x|| / sum(c[level] * y). Everything else is data in a `Description`. A backend declares which
descriptions it reads (`tq_ops.kv.kernel_support`), and never tests a name or class. Source: TurboQuant (arXiv 2504.19874), MSE
variant, no QJL, with a Haar rotation per layer and one Gaussian codebook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks import Codebook, haar_rotation, lloyd_max
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, KVFormat, Part, require_finite
from haarkv.tq_ops.formats.packing import Column, pack_planes, planes, unpack_planes
from haarkv.tq_ops.formats.stretches import RopeShift


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Learned coordinates of one layer, different for each KV head; see docs/formats.md.

        u = bf16((x - mean) / gamma);  y = u @ forward;  rho = sqrt(mean of y**2);  levels are taken of gain * y / rho
        x is about scale * (c[level] @ rows) + mean

    Attributes:
        mean: [H, D] fp32, in units of x.
        forward, rows: [H, D, D] fp32 of BF16 numbers; a coordinate is a column of `forward`, a row of `rows`.
        weights: [H, D] fp32, weight of each coordinate's squared error.
        rope_shift: rotation of keys by stretches; None without stretches.
    """

    mean: Tensor
    forward: Tensor
    rows: Tensor
    weights: Tensor
    rope_shift: RopeShift | None = None

    def to(self, device: torch.device) -> Coordinates:
        """The same on another device."""
        tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


Rotation = Callable[[int, int], Tensor]
"""(layer, head_dim) -> [D, D] bf16."""


@dataclass(frozen=True)
class Transform:
    """The rotation before quantization: `y = x @ matrix`; its inverse is `y @ matrix.T`.

    Attributes:
        matrix: (layer, head_dim) -> [D, D] bf16 on the CPU, cached; [H, D, D] with `coordinates`.
        coordinates: layer -> learned coordinates; None for a rotation.
        heads: number H of KV heads with learned coordinates; None for a rotation.
    """

    matrix: Rotation
    coordinates: Callable[[int], Coordinates] | None = None
    heads: int | None = None

    def on(self, layer: int, head_dim: int, device: torch.device) -> Tensor:
        """The matrix as fp32 on a device, cached. Do not write to it."""
        return _matrix_on(self, layer, head_dim, device)


@dataclass(frozen=True)
class Description:
    """Everything that a backend needs to read and write a format at one head_dim. Equal descriptions mean equal bytes.

    A format has a description only if its fields are `codes`, packed by `pack_planes` (or `pack_columns`), and `scale`, one
    FP16 number for each vector, which saturates. A unit vector is rounded to BF16 before it is rotated.

    Attributes:
        bits: bits of a level; with `columns` the mean of the widths.
        centroids: 2**bits numbers, ascending, in units of a unit vector's coordinate; empty with `columns`.
        boundaries: 2**bits - 1 numbers, ascending; level = #{b : y >= b}; empty with `columns`.
        columns: places of levels of several widths, which use the tables of `codebooks.cubic`; empty if all widths are equal.
        along: whether the scale preserves the projection of the restored vector on x instead of its length.
    """

    head_dim: int
    bits: int
    transform: Transform
    centroids: tuple[float, ...]
    boundaries: tuple[float, ...]
    columns: tuple[Column, ...] = ()
    along: bool = False


@cache
def numbers_on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """[n] fp32 on a device, cached. Do not write to it."""
    return torch.tensor(numbers, device=device)


def centroids_at(level: Tensor, centroids: Tensor) -> Tensor:
    """Centroid of each level: [..., D] uint8 -> [..., D] fp32. `index_select` is three times as fast as indexing."""
    return centroids.index_select(0, level.flatten().int()).view(level.shape)


def choose_levels(unit: Tensor, rotation: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [..., D] uint8 of unit vectors [..., D] fp32, `level_i = #{b : y_i >= b}`, and y = unit @ rotation [..., D] fp32.

    Rounding points: unit to BF16; sums in FP32.
    """
    y = unit.to(torch.bfloat16).float() @ rotation
    return torch.bucketize(y, boundaries, right=True, out_int32=True).to(torch.uint8), y


def exact_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors [..., D] and L2 norms [..., 1] of x [..., D], fp32 and finite, without underflow or overflow.

    Scaling by a power of two is exact: ordinary vectors get the bits of `x / sqrt(sum(x**2))`. A zero vector gives zeros; the
    norm is inf if it, or the largest value's next power of two, exceeds FP32.
    """
    # Denormals first become normal numbers; 2**64 keeps every step a power of two inside FP32's exponents.
    tiny = x.abs().amax(-1, keepdim=True) < 2.0**-100
    normal = torch.where(tiny, x * 2.0**64, x)
    exponent = torch.frexp(normal.abs().amax(-1, keepdim=True)).exponent
    scaled = torch.ldexp(normal, -exponent)
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    unit = torch.where(norm > 0, scaled / norm, torch.zeros_like(scaled))
    norm = torch.ldexp(norm, exponent)
    return unit, torch.where(tiny, norm * 2.0**-64, norm)


def stored_scale(scale: Tensor) -> Tensor:
    """Scales [...] fp32 as FP16, saturating at its largest finite value."""
    return scale.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)


class RotatedFormat(KVFormat):
    """A KV format that its description defines, with one scale for each vector.

    A zero vector is stored with scale 0 and restored as zeros; so is a vector whose scale is too small for FP16.

    Args:
        name, purpose: as in `KVFormat`.
        bits: bits of a level, at every head_dim.
        describe: head_dim -> description.
    """

    def __init__(self, name: str, purpose: str, bits: int, describe: Callable[[int], Description]) -> None:
        self.name, self.purpose, self.bits = name, purpose, bits
        self.layout = (Part("codes", torch.uint8, bits), Part("scale", torch.float16, axes=0))
        self._describe = lru_cache(None)(describe)

    def description(self, head_dim: int) -> Description:
        """The description at a head_dim, cached; an InputError if the format cannot store this head_dim."""
        return self._describe(head_dim)

    def fields(self, head_dim: int) -> dict[str, Field]:
        self.description(head_dim)  # raises an InputError if the format cannot store this head_dim
        return super().fields(head_dim)

    def pack(self, level: Tensor) -> Tensor:
        """Levels [..., N] uint8 -> codes [..., bytes] uint8."""
        return pack_planes(level, self.bits)

    def unpack(self, codes: Tensor) -> Tensor:
        """Inverse of `pack`."""
        return unpack_planes(codes, self.bits)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        description, rotation, boundaries = self._on(x, layer)
        unit, norm = exact_norm(x)
        level, y = choose_levels(unit, rotation, boundaries)
        centroids = centroids_at(level, numbers_on(description.centroids, x.device))
        length = (centroids * y).sum(-1) if description.along else torch.linalg.vector_norm(centroids, dim=-1)
        scale = torch.where(length > 0, norm.squeeze(-1) / length, 0.0)
        return {"codes": self.pack(level), "scale": stored_scale(scale)}

    def rotated(self, fields: dict[str, Tensor]) -> Tensor:
        """The vectors [..., N] fp32 in the domain of the levels: `scale * c[level]`."""
        level = self.unpack(fields["codes"])
        centroids = numbers_on(self.description(level.shape[-1]).centroids, level.device)
        return centroids_at(level, centroids) * fields["scale"].float().unsqueeze(-1)

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        rotated = self.rotated(fields)
        return rotated @ self._on(rotated, layer)[1].T

    def _on(self, x: Tensor, layer: int) -> tuple[Description, Tensor, Tensor]:
        """The description for x [..., D], and on its device the rotation [D, D] fp32 and the boundaries."""
        description = self.description(x.shape[-1])
        rotation = description.transform.on(layer, x.shape[-1], x.device)
        return description, rotation, numbers_on(description.boundaries, x.device)


@cache
def _matrix_on(transform: Transform, layer: int, head_dim: int, device: torch.device) -> Tensor:
    return transform.matrix(layer, head_dim).to(device, torch.float32)


# -- tq2 to tq8 -----------------------------------------------------------------------------------------------------------
BITS = 4
SEED_EPS = 1e-6
_CPU = torch.device("cpu")


@cache
def codebook_on(head_dim: int, device: torch.device, bits: int = BITS) -> Codebook:
    """The codebook of 2**bits levels on a device: the published one up to 4 bits, the optimum from 5 on.

    The published solver stops after 200 rounds, which costs nothing up to 4 bits, 1 % at 5, a fifth at 6, a half at 8.
    """
    book = lloyd_max(bits, head_dim, "published" if bits <= BITS else "converged")
    return Codebook(book.centroids.to(device), book.boundaries.to(device))


class TurboQuant(RotatedFormat):
    """`tq2` to `tq8`: packed levels and one FP16 scale for each vector.

        gamma = ||x||;  level = #{b : (bf16(x / gamma) @ rotation) >= b};  scale = fp16(gamma / ||c[level]||)

    Two, four and eight bits are packed in parts of the vector (tq4: `byte[j] = level[j] | level[j + D/2] << 4`), other widths
    in planes of 1, 2 or 4 bits, low bits first. A restored vector is `scale * c[level]` in the rotated domain.

    With `inner_product`, scale = fp16(gamma / sum(c[level] * y)), where y is the rotated unit vector: the projection of the
    restored vector on x has x's length. Without it, this projection is too short: in `tq2` by 6 %, in `tq3` by 1.7 %. That is
    bad for V: attention averages many values, and a common shortfall does not cancel. For K it is good (docs/mathematics.md).

    Args:
        rotation: (layer, head_dim) -> rotation; the shipped one by default.
    """

    def __init__(self, bits: int, purpose: str, rotation: Rotation = haar_rotation, inner_product: bool = False) -> None:
        super().__init__(f"tq{bits}", purpose, bits, self._turboquant_description)
        self._transform, self._along = Transform(rotation), inner_product

    def _turboquant_description(self, head_dim: int) -> Description:
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
    """The formats of K and V for 2 and 3 bits: V's scale preserves the inner product."""
    purpose = f"as tq4, with {bits} bits"
    return TurboQuant(bits, purpose), TurboQuant(bits, purpose, inner_product=True)


class TurboQuant4Seed(KVFormat):
    """`tq4_seed`: the layout of the public Qwen3-14B kernels, one byte for each level and an FP32 norm; for comparison.

        gamma = sqrt(sum(x**2) + 1e-6);  restored: bf16(c[level] * rsqrt(sum(c[level]**2) + 1e-6) * gamma) @ rotation.T

    As published, a zero vector is restored with norm 1e-3, and vectors shorter than about 1e-2 shrink. A vector whose squares
    overflow (|x| ~ 1e19) raises an error.
    """

    name = "tq4_seed"
    purpose = "published Qwen3-14B layout"
    layout = (Part("codes", torch.uint8, 8), Part("norm", torch.float32, axes=0))
    unpack = staticmethod(lambda codes: codes)

    def __init__(self, rotation: Rotation = haar_rotation) -> None:
        self._transform = Transform(rotation)

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
        vectors = rotated @ self._rotation(rotated, layer).T
        return vectors.to(torch.bfloat16).float()

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norm = (x.square().sum(-1, keepdim=True) + SEED_EPS).sqrt()
        return x / norm, norm

    def _rotation(self, x: Tensor, layer: int) -> Tensor:
        return self._transform.on(layer, x.shape[-1], x.device)
