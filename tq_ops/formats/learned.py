"""Formats of learned keys, `lr2` to `lr5`: B bits a number on average, more for coordinates that matter, and one FP16 scale.

Coordinates are learned for each layer and KV head and sorted by the cost of their errors; each eighth of them has levels of
its own width, the same in all models. Keys are stored by stretches of the text (`formats.stretches`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS, Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import require_finite
from haarkv.tq_ops.formats.packing import Column, column, eighth_widths, pack_columns, unpack_columns
from haarkv.tq_ops.formats.rotated import (
    Coordinates,
    Description,
    RotatedFormat,
    Transform,
    exact_norm,
    stored_scale,
)
from haarkv.tq_ops.formats.stretches import RopeShift


@dataclass(frozen=True, eq=False)
class Eighths:
    """Levels of a vector's eighths, on a device.

    Attributes:
        tables, boundaries: of each eighth, [2**bits] and [2**bits - 1] fp32.
    """

    tables: tuple[Tensor, ...]
    boundaries: tuple[Tensor, ...]

    def levels(self, value: Tensor) -> Tensor:
        """[..., D] fp32 -> [..., D] uint8."""
        parts = zip(value.chunk(EIGHTHS, -1), self.boundaries, strict=True)
        return torch.cat([torch.bucketize(v.contiguous(), b, right=True, out_int32=True) for v, b in parts], -1).to(
            torch.uint8
        )

    def centroids(self, level: Tensor) -> Tensor:
        """[..., D] uint8 -> [..., D] fp32."""
        parts = zip(level.int().chunk(EIGHTHS, -1), self.tables, strict=True)
        return torch.cat([table.index_select(0, part.flatten()).view(part.shape) for part, table in parts], -1)


def _nearest(t: Tensor, coords: Coordinates, eighths: Eighths) -> tuple[Tensor, Tensor]:
    """Levels [..., D] uint8 of t [..., H, n, D] at the best gain, and the weighted squared length [...] of their centroids."""
    attempts = []
    for gain in GAINS:
        levels = eighths.levels(gain * t)
        centroids = eighths.centroids(levels)
        weighted_centroids = centroids * coords.weights.unsqueeze(-2)
        inner, squares = (weighted_centroids * t).sum(-1), (weighted_centroids * centroids).sum(-1)
        attempts.append((levels, squares, inner.square() / squares))
    levels, squares, fit = (torch.stack(parts) for parts in zip(*attempts, strict=True))
    best = fit.argmax(0, keepdim=True)
    return levels.take_along_dim(best.unsqueeze(-1), 0)[0], squares.take_along_dim(best, 0)[0]


@cache
def eighth_tables(columns: tuple[Column, ...], device: torch.device) -> Eighths:
    """Tables of columns on a device, cached."""
    widths = eighth_widths(columns)
    return Eighths(*(tuple(table(bits).to(device) for bits in widths) for table in (cubic.centroids, cubic.boundaries)))


PREFIX = "lr"
COLUMNS = {
    2: (column((0, 4), (1, 3), (5, 1)), column((2, 2), (3, 2), (4, 2), (6, 1), (7, 1))),
    3: (column((0, 5), (2, 3)), column((1, 4), (5, 2), (6, 2)), column((3, 3), (4, 3), (7, 2))),
    4: (column((0, 6), (2, 4), (5, 3), (6, 3)), column((1, 5), (7, 3)), column((3, 4), (4, 4))),
    5: (column((0, 6), (2, 5), (3, 5)), column((1, 6), (4, 5), (5, 5)), column((6, 4), (7, 4))),
}
"""How the levels of eighths lie in bytes, by B: benchmarks/LOG.md says how the widths were chosen."""
LEAST_DIM = 32
"""D is a multiple of this number, so that units of two bytes and eighths fill whole words."""
GAINS = (1.0, 7 / 8, 19 / 16)
"""A vector is quantized at each of these sizes, and the nearest is kept; of equals, the first."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Learned coordinates of every layer's keys.

    Attributes:
        k: of each layer; None where a layer has no K and V.
        digest: SHA-256 of all of it, in hexadecimal; its identity.
        context: most tokens of a sequence for which it holds, where RoPE's angles are unknown; None for any number.
    """

    k: tuple[Basis | None, ...]
    digest: str
    context: int | None = None

    def heads(self, part: slice) -> Calibration:
        """That of some KV heads, as a rank holds them."""
        return Calibration(tuple(basis and basis.heads(part) for basis in self.k), self.digest, self.context)

    @cached_property
    def bases(self) -> dict[int, Basis]:
        """Those of the layers that have keys, by layer."""
        return {layer: basis for layer, basis in enumerate(self.k) if basis}

    @cached_property
    def _formats(self) -> dict[int, LearnedFormat]:
        return {}

    def format(self, bits: int) -> LearnedFormat:
        """The format `lrB` for B = `bits`, cached; an InputError if it cannot store the head_dim, or no layer has keys."""
        if bits not in self._formats:
            self._formats[bits] = LearnedFormat(self.bases, bits)
        return self._formats[bits]


def unlearned(heads: Sequence[tuple[int, int] | None]) -> Calibration:
    """A calibration without coordinates, to count bytes with.

    Args:
        heads: KV heads and head_dim of each layer; None where it has no K and V.
    """

    def hollow(count: int, dim: int) -> Basis:
        vectors, matrices = torch.empty(count, dim, device="meta"), torch.empty(count, dim, dim, device="meta")
        return Basis(vectors, matrices, matrices, vectors)

    return Calibration(tuple(each and hollow(*each) for each in heads), "")


def learned_bits(name: str) -> int | None:
    """B of `lrB`, None of any other name; an InputError of `lr` and another number."""
    count = name.removeprefix(PREFIX)
    if not (name.startswith(PREFIX) and count.isascii() and count.isdigit() and len(count) < 6):
        return None
    if int(count) in COLUMNS:
        return int(count)
    names = ", ".join(f"{PREFIX}{bits}" for bits in COLUMNS)
    raise InputError(f"there is no {name}: learned keys take {names}, bits of a number on average")


class LearnedFormat(RotatedFormat):
    """`lrB`: levels of learned coordinates, B bits each on average, and one FP16 scale. Keys only.

        u = bf16((x - mean) / gamma);  y = u @ forward;  t = y / sqrt(mean of y**2)
        level_i = #{b : gain * t_i >= b}, b the boundaries of i's eighth;  z_i = c(level_i)        for each of three gains
        kept: the gain with the largest (sum weights * t * z)**2 / sum weights * z**2
        scale = fp16(gamma * sqrt(sum weights * y**2) / sqrt(sum weights * z**2))
        it stands for scale * (z @ back) + mean

    Gains widen or narrow the levels for vectors that are not spread like a Gaussian's. c and its boundaries are those of
    `codebooks.cubic`, codes those of `pack_columns`. A vector equal to the mean stores scale 0; a scale above FP16 saturates.

    Args:
        bases: layer -> coordinates, for each layer with keys.
        bits: B.
    Raises:
        InputError: 32 does not divide head_dim, or no layer has keys.
    Rounding points: x - mean, gamma, sums and quotients in FP32; u to BF16; the scale to FP16.
    """

    def __init__(self, bases: Mapping[int, Basis], bits: int) -> None:
        if not bases:
            raise InputError(f"{PREFIX}{bits} is of keys, and no layer of this model has any; take --kv bf16")
        first = next(iter(bases.values()))
        self.head_dim = first.head_dim
        if self.head_dim % LEAST_DIM:
            raise InputError(f"{PREFIX}{bits} takes a head_dim that {LEAST_DIM} divides, and this model's is {self.head_dim}")
        super().__init__(f"{PREFIX}{bits}", "keys, learned coordinates", bits, self._at_head_dim)
        self._bases = bases
        self._coordinates = lru_cache(None)(lambda layer: coordinates(bases[layer]))
        transform = Transform(
            lambda layer, _: bases[layer].forward.to(torch.bfloat16), self._coordinates,
            heads=first.num_kv_heads,
        )  # fmt: skip
        self._description = Description(self.head_dim, bits, transform, (), (), COLUMNS[bits])

    @property
    def columns(self) -> tuple[Column, ...]:
        """How levels lie in the codes."""
        return COLUMNS[self.bits]

    def altered(self, alter: Callable[[Coordinates], Coordinates]) -> LearnedFormat:
        """The same format with changed coordinates in every layer, to plant faults."""
        other = LearnedFormat(self._bases, self.bits)
        transform = replace(other._description.transform, coordinates=lambda layer: alter(self._coordinates(layer)))
        other._description = replace(other._description, transform=transform)
        return other

    def _at_head_dim(self, head_dim: int) -> Description:
        """The description; an InputError at another head_dim than it was learned at."""
        if head_dim != self.head_dim:
            raise InputError(f"{self.name} was learned of vectors of {self.head_dim} numbers, not {head_dim}")
        return self._description

    def rope_shift(self, layer: int) -> RopeShift | None:
        return self._coordinates(layer).rope_shift if layer in self._bases else None

    def pack(self, level: Tensor) -> Tensor:
        return pack_columns(level, self.columns)

    def unpack(self, codes: Tensor) -> Tensor:
        return unpack_columns(codes, self.columns)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        coords = _coordinates_on(self, layer, x.device)
        unit, gamma = exact_norm(x - coords.mean.unsqueeze(-2))
        y = unit.to(torch.bfloat16).float() @ coords.forward
        rho = y.square().mean(-1, keepdim=True).sqrt()
        levels, squares = _nearest(torch.where(rho > 0, y / rho, 0.0), coords, eighth_tables(self.columns, x.device))
        length = gamma.squeeze(-1) * (y.square() * coords.weights.unsqueeze(-2)).sum(-1).sqrt()
        scale = torch.where(squares > 0, length / squares.sqrt(), 0.0)
        return {"codes": self.pack(levels), "scale": stored_scale(scale)}

    def rotated(self, fields: dict[str, Tensor]) -> Tensor:
        levels = self.unpack(fields["codes"])
        centroids = eighth_tables(self.columns, levels.device).centroids(levels)
        return centroids * fields["scale"].float().unsqueeze(-1)

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        rotated = self.rotated(fields)
        coords = _coordinates_on(self, layer, rotated.device)
        return rotated @ coords.rows + coords.mean.unsqueeze(-2)

    def length(self, x: Tensor, layer: int) -> Tensor:
        coords = _coordinates_on(self, layer, x.device)
        return ((x.float() @ coords.forward).square() * coords.weights.unsqueeze(-2)).sum(-1).sqrt()


def coordinates(basis: Basis) -> Coordinates:
    """The coordinates of one layer."""
    turns = RopeShift(tuple(basis.inv_freq.tolist())) if len(basis.inv_freq) else None
    return Coordinates(basis.mean, basis.forward, basis.back, basis.weights, turns)


@cache
def _coordinates_on(kv_format: LearnedFormat, layer: int, device: torch.device) -> Coordinates:
    description = kv_format.description(kv_format.head_dim)
    assert description.transform.coordinates is not None, "learned formats have coordinates"
    return description.transform.coordinates(layer).to(device)
