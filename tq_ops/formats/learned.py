"""Formats of learned nibbles, `lrN`: N levels of 4 bits a vector, each of a learned coordinate, and one FP16 scale.

What a level stands for is learned for each layer, side and KV head; a coordinate that matters owns two or three nibbles, one
that does not owns none. A rotation's columns as the coordinates, one nibble each, make it `tq4`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from haarkv.codebooks.learned import STAGES, Basis, refinements, stages
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, LevelChoice, bytes_of, lengths_of, require_finite, stored_bytes
from haarkv.tq_ops.formats.packing import pack_parts, unpack_parts
from haarkv.tq_ops.formats.rotated import (
    Coordinates,
    Description,
    Plane,
    Quantizer,
    Transform,
    bf16_reach,
    centroids_at,
    exact_norm,
    in_parts,
    numbers_on,
    stored_scale,
)
from haarkv.tq_ops.formats.turboquant import BITS, codebook_on

PREFIX = "lr"
MULTIPLE = 16
"""Nibbles come in so many: 8 bytes, the least that a kernel reads at once."""
_FIT_NOISE = 1e-6
GAINS = (1.0, 7 / 8, 19 / 16)
"""A vector is quantized at each of these sizes, and the nearest is kept; of equals, the first."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was learned of a model: coordinates of K and of V, of every layer.

    Attributes:
        k, v: of each layer.
        digest: SHA-256 of all of it, in hexadecimal, by which caches and files tell it from another.
    """

    k: tuple[Basis, ...]
    v: tuple[Basis, ...]
    digest: str

    def heads(self, part: slice) -> Calibration:
        """That of some KV heads, as a rank holds them."""
        k, v = (tuple(basis.heads(part) for basis in side) for side in (self.k, self.v))
        return Calibration(k, v, self.digest)

    @cached_property
    def _formats(self) -> dict[tuple[str, int], LearnedFormat]:
        return {}

    def format(self, side: str, nibbles: int) -> LearnedFormat:
        """The format of so many nibbles for K ("k") or V ("v"), the same object each time.

        Raises:
            InputError: a number of nibbles that cannot be stored.
        """
        key = (side, nibbles)
        if key not in self._formats:
            self._formats[key] = LearnedFormat(self.k if side == "k" else self.v, nibbles)
        return self._formats[key]


def nibbles_of(name: str) -> int | None:
    """N of `lrN`, None of any other name."""
    count = name.removeprefix(PREFIX)
    return int(count) if name.startswith(PREFIX) and count.isascii() and count.isdigit() and len(count) < 6 else None


def coordinates(basis: Basis, nibbles: int) -> Coordinates:
    """What each of N nibbles stands for: all first nibbles by coordinate, then the second ones, then the third.

    Args:
        basis: of one layer, H KV heads.
        nibbles: N.
    """
    dim, steps = basis.mean.shape[1], refinements()
    counts = stages(basis.weights, nibbles)  # [H, STAGES]
    place = torch.arange(STAGES * dim)
    owned = place % dim < counts[:, place // dim]  # [H, STAGES * D]
    owners = place.expand(len(counts), -1)[owned].view(len(counts), nibbles)
    step = torch.tensor(steps)[owners // dim]
    rows = basis.back.gather(1, (owners % dim).unsqueeze(-1).expand(-1, -1, dim)) * step.unsqueeze(-1)
    # The steps are no powers of two: rounded again, rows are BF16 numbers as the basis is.
    rows = rows.to(torch.bfloat16).float()
    owning = (torch.arange(dim) < counts[:, :1]).float()
    shares = owning * (dim / counts[:, :1])
    return Coordinates(basis.mean, basis.forward, rows, shares, basis.weights * owning, owners, steps, GAINS)


@dataclass(frozen=True)
class _Try:
    """Vectors quantized at one size.

    Attributes:
        levels: [..., N] uint8.
        kept: [...], weighted square of the length of what the levels restore.
        fit: [...], the more, the nearer is that to the vector's direction.
    """

    levels: Tensor
    kept: Tensor
    fit: Tensor


class LearnedFormat:
    """`lrN`: N nibbles a vector, and one FP16 scale.

        u = bf16((x - mean) / gamma);  y = u @ forward, of the coordinates that own a nibble
        rho = sqrt(D * (mean of y**2));  t = gain * (y / rho), for each of three gains
        n1 = level(t);  n2 = level((t - c[n1]) / s2);  n3 = level((t - c[n1] - s2 * c[n2]) / s3)   where owned
        z = c[n1] + s2 * c[n2] + s3 * c[n3], of what is owned
        kept: the gain whose z lies nearest to y's direction: the largest (sum weights * y * z)**2 / sum weights * z**2
        scale = fp16(gamma * sqrt(sum weights * y**2) / sqrt(sum weights * z**2))
        it stands for scale * (c[level] @ rows) + mean

    A vector whose numbers are spread otherwise than a Gaussian's wants its levels a little wider or narrower: so the gains.
    Codes are packed as those of `tq4`, with N for head_dim: `byte[j] = level[j] | level[j + N/2] << 4`. A vector equal to the
    mean stores scale 0 and comes back as the mean. A scale above FP16 saturates at its largest finite value.

    Args:
        bases: of each layer.
        nibbles: N, a multiple of 16, at most three for each coordinate.
    Raises:
        InputError: another number of nibbles.
    Rounding points: x - mean, gamma, sums and quotients in FP32; u to BF16; the scale to FP16.
    """

    group_tokens = 1
    lossy = True
    bits = BITS

    def __init__(self, bases: tuple[Basis, ...], nibbles: int) -> None:
        self.head_dim = bases[0].mean.shape[1]
        if not 0 < nibbles <= STAGES * self.head_dim or nibbles % MULTIPLE:
            most = STAGES * self.head_dim // MULTIPLE * MULTIPLE
            raise InputError(
                f"a vector of head_dim {self.head_dim} takes {MULTIPLE} to {most} learned nibbles in steps of {MULTIPLE}, "
                f"not {nibbles}"
            )
        self.name, self.nibbles, self._bases = f"{PREFIX}{nibbles}", nibbles, bases
        self.purpose = f"{nibbles} learned nibbles a vector"
        self._coordinates = lru_cache(None)(lambda layer: coordinates(bases[layer], nibbles))
        transform = Transform(
            lambda layer, _: bases[layer].forward.to(torch.bfloat16), True, torch.bfloat16, self._coordinates,
            heads=len(bases[0].mean),
        )  # fmt: skip
        book = codebook_on(self.head_dim, torch.device("cpu"))
        self._described = Description(
            head_dim=self.head_dim,
            planes=(Plane(BITS, in_parts(nibbles, BITS)),),
            transform=transform,
            centroids=tuple(book.centroids.tolist()),
            boundaries=tuple(book.boundaries.tolist()),
            quantizer=Quantizer(rounds_unit=True, smallest=0.0, saturates=True),
        )

    def altered(self, alter: Callable[[Coordinates], Coordinates]) -> LearnedFormat:
        """The same with other coordinates in every layer: what somebody stores and reads who has them wrong."""
        other = LearnedFormat(self._bases, self.nibbles)
        transform = replace(other._described.transform, coordinates=lambda layer: alter(self._coordinates(layer)))
        other._described = replace(other._described, transform=transform)
        return other

    def description(self, head_dim: int) -> Description:
        """What a backend has to know of it.

        Raises:
            InputError: it was learned at another head_dim.
        """
        if head_dim != self.head_dim:
            raise InputError(f"{self.name} was learned of vectors of {self.head_dim} numbers, not {head_dim}")
        return self._described

    def fields(self, head_dim: int) -> dict[str, Field]:
        scale = Field(self.description(head_dim).scale_dtype, ())
        return {"codes": Field(torch.uint8, (self.nibbles * BITS // 8,)), "scale": scale}

    def bytes_per_vector(self, head_dim: int) -> float:
        return float(stored_bytes(self.fields(head_dim)))

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        of = self._on(layer, x.device)
        y, length = self._values(x, of)
        tried = [self._choose(y, gain, of) for gain in of.gains]
        best = torch.stack([t.fit for t in tried]).argmax(0)
        level, kept = tried[0].levels, tried[0].kept
        for number, other in enumerate(tried[1:], 1):
            level = torch.where((best == number).unsqueeze(-1), other.levels, level)
            kept = torch.where(best == number, other.kept, kept)
        scale = torch.where(kept > 0, length / kept.sqrt(), 0.0)
        return {"codes": pack_parts(level, BITS), "scale": stored_scale(scale, self._described)}

    def rotated(self, fields: dict[str, Tensor]) -> Tensor:
        """What queries by `rows` meet, [..., N] fp32: `scale * c[level]`."""
        level = self.levels(fields)
        centroids = numbers_on(self._described.centroids, level.device)
        return centroids_at(level, centroids) * fields["scale"].float().unsqueeze(-1)

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        stored = self.rotated(fields)
        of = self._on(layer, stored.device)
        return stored @ of.rows + of.mean.unsqueeze(-2)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Codes, then the scale, little-endian."""
        return torch.cat([fields["codes"], bytes_of(fields["scale"], 0)], dim=-1)

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        of = self._on(layer, fields["scale"].device)
        levels = centroids_at(self.levels(fields), numbers_on(self._described.centroids, fields["scale"].device))
        steps = torch.tensor(of.steps, device=levels.device).unsqueeze(-1)
        restored = (self._by_stage(levels, of) * steps).sum(-2)
        return fields["scale"].double() * lengths_of(restored * of.weights.sqrt().unsqueeze(-2))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_parts(fields["codes"], BITS)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        """What `quantize` chooses the levels of x from.

        Args:
            x, layer, noise: as in `KVFormat.choice`.
            levels: [..., N] uint8 to judge, each refinement of what they leave; what `quantize` chooses unless given.
        """
        x = x.float()
        of = self._on(layer, x.device)
        unit, gamma = exact_norm(x - of.mean.unsqueeze(-2))
        y, _ = self._values(x, of)
        rho = self._rho(unit.to(torch.bfloat16).float() @ of.forward, of)
        noise = noise * torch.linalg.vector_norm(x, dim=-1, keepdim=True) / gamma.clamp(min=1e-30)
        reach = bf16_reach(unit, of.forward, noise) / rho.clamp(min=1e-30)
        gain, chosen = self._judged(y, reach, of, levels)
        centroids = numbers_on(self._described.centroids, x.device)
        spread = self._by_stage(centroids_at(chosen, centroids), of)
        values, reaches, left, reach = [], [], gain * y, gain * reach
        for stage, step in enumerate(of.steps):
            values.append(left / step)
            reaches.append(reach / step)
            left = left - step * spread[..., stage, :]
        return LevelChoice(
            self._owned(torch.stack(values, -2), of), self._owned(torch.stack(reaches, -2), of),
            numbers_on(self._described.boundaries, x.device),
        )  # fmt: skip

    def _judged(self, y: Tensor, reach: Tensor, of: Coordinates, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gains [..., 1], and the levels to judge by them, [..., N].

        Where two gains serve a vector alike, rounding decides between them. So of those that fit as well as the best, up to
        what rounding may move, it is the one whose levels are nearest to the levels given.
        """
        tried = [self._choose(y, gain, of) for gain in of.gains]
        fits = torch.stack([t.fit for t in tried])  # [G, ...]
        wanted = torch.stack([t.levels for t in tried])
        weights = of.weights.unsqueeze(-2)
        whole = (weights * y.square()).sum(-1).clamp(min=1e-30)
        # The angle between y and z moves by as much as y does, relative to its length; its cosine by the sine of that.
        moved = ((weights * reach.square()).sum(-1) / whole).sqrt()
        sine = (1 - fits / whole).clamp(min=0.0).sqrt()
        best, at = fits.max(0)
        if levels is not None:
            slack = (2 * (sine + sine.gather(0, at.unsqueeze(0))) * moved + _FIT_NOISE) * whole
            off = (wanted != levels).sum(-1)
            at = torch.where(fits >= best - slack, off, off.max() + 1).argmin(0)
        chosen = wanted.gather(0, at[None, ..., None].expand(1, *wanted.shape[1:]))[0]
        return torch.tensor(of.gains, device=y.device)[at].unsqueeze(-1), chosen if levels is None else levels

    def _on(self, layer: int, device: torch.device) -> Coordinates:
        return _coordinates_on(self, layer, device)

    def _rho(self, y: Tensor, of: Coordinates) -> Tensor:
        """Size [..., 1] of coordinates [..., D], of those that own a nibble."""
        return (y.square() * of.shares.unsqueeze(-2)).sum(-1, keepdim=True).sqrt()

    def _values(self, x: Tensor, of: Coordinates) -> tuple[Tensor, Tensor]:
        """Coordinates [..., D] of the size that the levels are made for, or 0, and weighted lengths [...] in units of x."""
        unit, gamma = exact_norm(x - of.mean.unsqueeze(-2))
        y = unit.to(torch.bfloat16).float() @ of.forward
        rho = self._rho(y, of)
        length = (y.square() * of.weights.unsqueeze(-2)).sum(-1).sqrt()
        return torch.where(rho > 0, y / rho, 0.0), gamma.squeeze(-1) * length

    def _choose(self, y: Tensor, gain: float, of: Coordinates) -> _Try:
        """Quantize coordinates [..., D] at a size."""
        centroids, boundaries = (numbers_on(n, y.device) for n in (self._described.centroids, self._described.boundaries))
        owned = self._by_stage(torch.ones(of.owners.shape, device=y.device).unsqueeze(-2), of)  # [H, 1, stages, D]
        left, found, restored = gain * y, [], torch.zeros_like(y)
        for stage, step in enumerate(of.steps):
            level = torch.bucketize(left / step, boundaries, right=True, out_int32=True).to(torch.uint8)
            restores = step * centroids_at(level, centroids) * owned[..., stage, :]
            found.append(level)
            restored, left = restored + restores, left - restores
        weighted = restored * of.weights.unsqueeze(-2)
        along, kept = (weighted * y).sum(-1), (weighted * restored).sum(-1)
        return _Try(self._owned(torch.stack(found, -2), of), kept, along.square() / kept)

    def _owned(self, by_stage: Tensor, of: Coordinates) -> Tensor:
        """[..., H, n, stages, D] -> [..., H, n, N], in the order of the levels."""
        flat = by_stage.flatten(-2)
        return flat.gather(-1, of.owners.unsqueeze(-2).expand(*flat.shape[:-1], -1))

    def _by_stage(self, of_levels: Tensor, of: Coordinates) -> Tensor:
        """The inverse of `_owned`, 0 where no level is: [..., H, n, N] -> [..., H, n, stages, D]."""
        flat = of_levels.new_zeros(*of_levels.shape[:-1], len(of.steps) * self.head_dim)
        flat.scatter_(-1, of.owners.unsqueeze(-2).expand(of_levels.shape), of_levels)
        return flat.view(*flat.shape[:-1], len(of.steps), self.head_dim)


@cache
def _coordinates_on(kv_format: LearnedFormat, layer: int, device: torch.device) -> Coordinates:
    described = kv_format.description(kv_format.head_dim)
    assert described.transform.coordinates is not None, "learned formats have coordinates"
    return described.transform.coordinates(layer).to(device)
