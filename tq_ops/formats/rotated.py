"""Formats of rotated levels: `tq4`, the product's packed 66-byte layout, its kin of 2 to 8 bits, the published `tq4_seed`.

Such a format rotates a unit vector, keeps the level of each coordinate, and one scale that holds the length:

    y = unit @ matrix;  level = #{b : y >= b};  scale = ||x|| / ||c[level]||;  it stands for scale * c[level] @ matrix.T

or, `along` x itself, scale = ||x|| / sum(c[level] * y).

Everything else is data, which `Description` holds. A backend is built from descriptions and declares which of them its
kernels read (`tq_ops.kv.kernel_support`); none asks for a format's name or class. Source of `tq4` and its kin:
TurboQuant (arXiv 2504.19874), MSE variant, no QJL, with the layer's Haar rotation and one Gaussian codebook.
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
    """What the levels of a vector stand for in one layer, where KV heads differ. docs/formats.md has the whole of it.

        u = bf16((x - mean) / gamma);  y = u @ forward;  rho = sqrt(mean of y**2);  levels are taken of gain * y / rho
        x is near scale * (c[level] @ rows) + mean

    Attributes:
        mean: [H, D] fp32, in units of x.
        forward: [H, D, D] fp32 of BF16 numbers, a coordinate a column.
        rows: [H, D, D] fp32 of BF16 numbers, a coordinate a row.
        weights: [H, D] fp32, of each coordinate in a vector's length.
        gains: the sizes at which a vector is tried; of those that serve it alike, the first.
        rope_shift: how x is rotated back by stretches; None where x is stored as it is.
    """

    mean: Tensor
    forward: Tensor
    rows: Tensor
    weights: Tensor
    gains: tuple[float, ...]
    rope_shift: RopeShift | None = None

    def to(self, device: torch.device) -> Coordinates:
        """The same on another device."""
        tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


Rotation = Callable[[int, int], Tensor]
"""(layer, head_dim) -> [D, D] bf16."""


@dataclass(frozen=True)
class Transform:
    """The rotation behind which levels are taken: `y = x @ matrix`, back with `y @ matrix.T`.

    Attributes:
        matrix: (layer, head_dim) -> [D, D] bf16, on the CPU; it is made once a layer and then kept.
        coordinates: layer -> what levels stand for where KV heads differ, and `matrix` is [H, D, D] then; None of a rotation.
        heads: H, KV heads that differ; None where one rotation serves all.
    """

    matrix: Rotation
    coordinates: Callable[[int], Coordinates] | None = None
    heads: int | None = None

    def on(self, layer: int, head_dim: int, device: torch.device) -> Tensor:
        """The matrix [D, D] as fp32 on a device, kept there. Do not write to it."""
        return _matrix_on(self, layer, head_dim, device)


@dataclass(frozen=True)
class Description:
    """What a backend has to know of a format at one head_dim. Two formats with equal descriptions store the same bytes.

    The stored fields are `codes`, as `pack_planes` or `pack_columns` lays levels, and `scale` in FP16. A unit vector is
    rounded to BF16 before it is rotated, and a scale above FP16 saturates.

    Attributes:
        head_dim: D, numbers of a vector.
        bits: of a level.
        transform: the rotation.
        centroids: 2**bits numbers, ascending, in units of a unit vector's coordinate; none where widths differ.
        boundaries: 2**bits - 1 numbers, ascending; level = #{b : y >= b}; none where widths differ.
        columns: how levels of several widths lie in the codes, with the tables of `codebooks.cubic`; `bits` is their mean
            then. Empty where all have the same width.
        along: whether the scale keeps the length along the vector, and not the length of what comes back.
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
    """[n] fp32 on a device, kept there. Do not write to it."""
    return torch.tensor(numbers, device=device)


def centroids_at(level: Tensor, centroids: Tensor) -> Tensor:
    """Centroid of each level: [..., D] uint8 -> [..., D] fp32. `index_select` is three times as fast as indexing."""
    return centroids.index_select(0, level.flatten().int()).view(level.shape)


def choose_levels(unit: Tensor, rotation: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate unit vectors and quantize each coordinate: `level_i = #{b : y_i >= b}`, y = unit @ rotation.

    Args:
        unit: [..., D] fp32, of norm 1 (or 0).
        rotation: [D, D] fp32.
        boundaries: [2**bits - 1] fp32, ascending.
    Returns:
        level: [..., D] uint8, 0 to 2**bits - 1. A zero vector gets level 8 of 16 everywhere if the middle boundary is <= 0.
        y: [..., D] fp32.
    Rounding points: unit to BF16; the product accumulates in FP32 and stays there.
    """
    y = unit.to(torch.bfloat16).float() @ rotation
    return torch.bucketize(y, boundaries, right=True, out_int32=True).to(torch.uint8), y


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
    normal = torch.where(tiny, x * 2.0**64, x)
    exponent = torch.frexp(normal.abs().amax(-1, keepdim=True)).exponent
    scaled = torch.ldexp(normal, -exponent)
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    unit = torch.where(norm > 0, scaled / norm, torch.zeros_like(scaled))
    norm = torch.ldexp(norm, exponent)
    return unit, torch.where(tiny, norm * 2.0**-64, norm)


def stored_scale(scale: Tensor) -> Tensor:
    """Scales [...] fp32 as FP16; one that is too large becomes the largest finite one."""
    return scale.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)


class RotatedFormat(KVFormat):
    """A KV format that its description says all about, with one scale a vector.

    A zero vector stores scale 0 and comes back as zeros. A scale below its dtype's smallest comes back as zeros.

    Args:
        name: the word for it in `formats.get` and `--kv`.
        purpose: one line for a table: what it is for.
        bits: of a level, at every head_dim.
        describe: head_dim -> its description.
    """

    def __init__(self, name: str, purpose: str, bits: int, describe: Callable[[int], Description]) -> None:
        self.name, self.purpose, self.bits = name, purpose, bits
        self.layout = (Part("codes", torch.uint8, bits), Part("scale", torch.float16, axes=0))
        self._describe = lru_cache(None)(describe)

    def description(self, head_dim: int) -> Description:
        """What a backend has to know of it; made once a head_dim.

        Raises:
            InputError: the format has no layout for this head_dim.
        """
        return self._describe(head_dim)

    def fields(self, head_dim: int) -> dict[str, Field]:
        self.description(head_dim)  # says what it cannot hold
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


# -- tq4 and its kin ------------------------------------------------------------------------------------------------------
BITS = 4
SEED_EPS = 1e-6
_CPU = torch.device("cpu")


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
    """K's and V's format of a few bits."""
    purpose = f"as tq4, with {bits} bits"
    return TurboQuant(bits, purpose), TurboQuant(bits, purpose, inner_product=True)


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
