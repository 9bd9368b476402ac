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
from haarkv.tq_ops.formats.base import LevelChoice, lengths_of, require_finite
from haarkv.tq_ops.formats.learned_levels import Refinement
from haarkv.tq_ops.formats.rotated import (
    Coordinates,
    Description,
    RotatedFormat,
    Transform,
    bf16_reach,
    exact_norm,
    numbers_on,
    stored_scale,
)
from haarkv.tq_ops.formats.turboquant import BITS, codebook_on

PREFIX = "lr"
MULTIPLE = 16
"""Nibbles come in so many: 8 bytes, the least that a kernel reads at once."""
GAINS = (1.0, 7 / 8, 19 / 16)
"""A vector is quantized at each of these sizes, and the nearest is kept; of equals, the first."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was learned of a model: coordinates of K and of V, of every layer.

    Attributes:
        k, v: of each layer.
        digest: SHA-256 of all of it, in hexadecimal, by which caches and files tell it from another.
        context: tokens of a sequence up to which it holds, since RoPE turns keys by their position; None for any number.
    """

    k: tuple[Basis, ...]
    v: tuple[Basis, ...]
    digest: str
    context: int | None = None

    def heads(self, part: slice) -> Calibration:
        """That of some KV heads, as a rank holds them."""
        k, v = (tuple(basis.heads(part) for basis in side) for side in (self.k, self.v))
        return Calibration(k, v, self.digest, self.context)

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


class LearnedFormat(RotatedFormat):
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

    def __init__(self, bases: tuple[Basis, ...], nibbles: int) -> None:
        self.head_dim = bases[0].mean.shape[1]
        if not 0 < nibbles <= STAGES * self.head_dim or nibbles % MULTIPLE:
            most = STAGES * self.head_dim // MULTIPLE * MULTIPLE
            raise InputError(
                f"a vector of head_dim {self.head_dim} takes {MULTIPLE} to {most} learned nibbles in steps of {MULTIPLE}, "
                f"not {nibbles}"
            )
        super().__init__(f"{PREFIX}{nibbles}", f"{nibbles} learned nibbles a vector", BITS, self._at_head_dim)
        self.nibbles, self._bases = nibbles, bases
        self._coordinates = lru_cache(None)(lambda layer: coordinates(bases[layer], nibbles))
        transform = Transform(
            lambda layer, _: bases[layer].forward.to(torch.bfloat16), True, self._coordinates,
            heads=len(bases[0].mean),
        )  # fmt: skip
        book = codebook_on(self.head_dim, torch.device("cpu"))
        self._described = Description(
            head_dim=self.head_dim,
            bits=BITS,
            levels=nibbles,
            transform=transform,
            centroids=tuple(book.centroids.tolist()),
            boundaries=tuple(book.boundaries.tolist()),
        )

    def altered(self, alter: Callable[[Coordinates], Coordinates]) -> LearnedFormat:
        """The same with other coordinates in every layer: what somebody stores and reads who has them wrong."""
        other = LearnedFormat(self._bases, self.nibbles)
        transform = replace(other._described.transform, coordinates=lambda layer: alter(self._coordinates(layer)))
        other._described = replace(other._described, transform=transform)
        return other

    def _at_head_dim(self, head_dim: int) -> Description:
        """The description.

        Raises:
            InputError: it was learned at another head_dim.
        """
        if head_dim != self.head_dim:
            raise InputError(f"{self.name} was learned of vectors of {self.head_dim} numbers, not {head_dim}")
        return self._described

    def _of_levels(self, count: int) -> Description:
        return self._described

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        x = x.float()
        require_finite(x)
        by = self._refinement(layer, x.device)
        y, length = self._values(x, by.of)
        best = by.best(y)
        scale = torch.where(best.kept > 0, length / best.kept.sqrt(), 0.0)
        return {"codes": self.pack(best.levels), "scale": stored_scale(scale)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        stored = self.rotated(fields)
        coordinates = self._refinement(layer, stored.device).of
        return stored @ coordinates.rows + coordinates.mean.unsqueeze(-2)

    def lengths(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        by = self._refinement(layer, fields["scale"].device)
        weighted = by.restored(self.levels(fields)) * by.of.weights.sqrt().unsqueeze(-2)
        return fields["scale"].double() * lengths_of(weighted)

    def choice(self, x: Tensor, layer: int, noise: float | Tensor, levels: Tensor | None = None) -> LevelChoice:
        """What `quantize` chooses the levels of x from.

        Args:
            x, layer, noise: as in `KVFormat.choice`.
            levels: [..., N] uint8 to judge, each refinement of what they leave; what `quantize` chooses unless given.
        """
        x = x.float()
        by = self._refinement(layer, x.device)
        unit, gamma = exact_norm(x - by.of.mean.unsqueeze(-2))
        rho = self._rho(unit.to(torch.bfloat16).float() @ by.of.forward, by.of)
        noise = noise * torch.linalg.vector_norm(x, dim=-1, keepdim=True) / gamma.clamp(min=1e-30)
        reach = bf16_reach(unit, by.of.forward, noise) / rho.clamp(min=1e-30)
        y, _ = self._values(x, by.of)
        chosen = by.best(y).levels if levels is None else levels
        gain = by.judged(y, reach, chosen)
        return LevelChoice(by.left(gain * y, chosen), by.over_steps(gain * reach), by.boundaries)

    def _refinement(self, layer: int, device: torch.device) -> Refinement:
        return _refinement_on(self, layer, device)

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


@cache
def _refinement_on(kv_format: LearnedFormat, layer: int, device: torch.device) -> Refinement:
    described = kv_format.description(kv_format.head_dim)
    assert described.transform.coordinates is not None, "learned formats have coordinates"
    tables = (numbers_on(numbers, device) for numbers in (described.centroids, described.boundaries))
    return Refinement(described.transform.coordinates(layer).to(device), *tables)
