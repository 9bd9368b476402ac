"""How the kernels see a format: matrices to its levels and back, in their own order of levels, and its centroids.

The kernels read a packed vector of N levels as N / 8 words of 32 bits with eight 4-bit levels each, the first in the lowest
bits, and know no format. Queries come in word order (word, level), sums go out in plane order (level, word); a format's
rotation, or its learned coordinates, and its way of packing are folded into the columns and rows of the matrices. Levels of 2
or 3 bits are unpacked to such words first; those of 5 to 8 bits, and plain BF16 and FP32, become numbers in their own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.packing import planes
from haarkv.tq_ops.formats.rotated import Description, numbers_on
from haarkv.tq_ops.kv.reads import Reads


def _learned(head_dim: int) -> range:
    return range(32, 3 * head_dim + 1, 16)


READS = Reads(
    "the CPU kernels", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), plain=(torch.bfloat16, torch.float32),
    kept=True, windows=True, learned=_learned,
)  # fmt: skip
"""What the kernels read and store."""
LARGEST_LEVEL = 2**13 - 1
"""Of centroids in 16 bits: what they leave of 32 is for queries and weights, whose products are summed there."""
_CPU = torch.device("cpu")
_COLUMNS = 16  # that the kernels take at once


@dataclass(frozen=True)
class Layout:
    """What attention needs of one format and layer. A rotation serves all KV heads: H is 1 then.

    Attributes:
        levels: N, of a vector.
        planes: widths of a level's planes, low bits first, one or two; () of plain numbers, which have nothing below.
        rotate: [H, D, N] fp32 or bf16, `q @ rotate` is the rotated query in word order, of levels above 4 bits in their own.
        rotate_back: [H, N, D] likewise, from the rotated domain in plane order (or that of the levels) to the model's own.
        rotate_pairs, rotate_back_pairs: the same as `in_pairs` has them.
        mean: [H, D] fp32, what vectors come back with beside that; None of a rotation.
        centroids: [2**bits] fp32.
        integers: [2**bits] int16, up to `LARGEST_LEVEL` in size: the centroids in units of `unit`, rounded. Of words alone.
        unit: that makes the largest error of a level, `centroids - integers * unit`, least.
    """

    levels: int
    planes: tuple[int, ...] = ()
    rotate: Tensor | None = None
    rotate_back: Tensor | None = None
    rotate_pairs: Tensor | None = None
    rotate_back_pairs: Tensor | None = None
    mean: Tensor | None = None
    centroids: Tensor | None = None
    integers: Tensor | None = None
    unit: float = 0.0


@dataclass(frozen=True)
class Refinement:
    """What the append kernel takes of learned coordinates beside their matrices.

    Attributes:
        mean, shares, weights: [H, D] fp32, as in `Coordinates`.
        gains: fp32, the sizes at which a vector is quantized.
        counts: [H, stages] int32: so many coordinates own a level of each stage, the first ones.
        steps: [stages] fp32.
    """

    mean: Tensor
    shares: Tensor
    weights: Tensor
    gains: Tensor
    counts: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Tables:
    """What vectors are stored by, of one format and layer, in the format's own order of coordinates.

    Attributes:
        planes: widths of a level's planes, low bits first; () of plain numbers, which have nothing below.
        matrix: [H, D, D] bf16; H is 1 of a rotation. Of learned coordinates [H, D, C], those that own a level in some head.
        boundaries: [2**bits - 1] fp32.
        centroids: [2**bits] fp32.
        refinement: of learned coordinates; None of a rotation.
    """

    planes: tuple[int, ...] = ()
    matrix: Tensor | None = None
    boundaries: Tensor | None = None
    centroids: Tensor | None = None
    refinement: Refinement | None = None


def layout(kv_format: KVFormat, layer: int, head_dim: int) -> Layout:
    """The layout of a format that `READS` takes; made once. Do not write to it."""
    return Layout(head_dim) if kv_format.plain else _layout(*_described(kv_format, layer, head_dim))


def tables(kv_format: KVFormat, layer: int, head_dim: int) -> Tables:
    """What the append kernel stores a format by that `READS` takes. Do not write to it."""
    return Tables() if kv_format.plain else _tables(*_described(kv_format, layer, head_dim))


def _described(kv_format: KVFormat, layer: int, head_dim: int) -> tuple[Description, int]:
    described = kv_format.description(head_dim)
    assert described is not None, "misfit() lets formats of rotated levels pass alone"
    return described, layer if described.transform.per_layer else 0


@cache
def _layout(described: Description, layer: int) -> Layout:
    queries = sums = torch.arange(described.levels)
    centroids, integers, unit = numbers_on(described.centroids, _CPU), None, 0.0
    if described.bits <= 4:  # as words of eight levels
        queries = queries.view(2, -1).T.flatten()
        sums = queries.view(-1, 8).T.flatten()
        integers, unit = whole_levels(tuple(centroids.tolist()))
    if described.transform.coordinates is None:
        back, mean = described.transform.on(layer, described.head_dim, _CPU).T.unsqueeze(0), None
    else:
        # Of each KV head another: in BF16, which they are, only half of the bytes are fetched.
        coordinates = described.transform.coordinates(layer)
        back, mean = coordinates.rows.bfloat16(), coordinates.mean.contiguous()
        assert torch.equal(back.float(), coordinates.rows), "rows are BF16 numbers"
    rotate, rotate_back = back[:, queries].mT.contiguous(), back[:, sums].contiguous()
    return Layout(
        described.levels, tuple(planes(described.bits)), rotate, rotate_back, in_pairs(rotate), in_pairs(rotate_back),
        mean, centroids, integers, unit,
    )  # fmt: skip


@cache
def _tables(described: Description, layer: int) -> Tables:
    boundaries, centroids = numbers_on(described.boundaries, _CPU), numbers_on(described.centroids, _CPU)
    widths = tuple(planes(described.bits))
    if described.transform.coordinates is None:
        rotation = described.transform.on(layer, described.head_dim, _CPU).bfloat16().unsqueeze(0)
        return Tables(widths, rotation, boundaries, centroids)
    coordinates = described.transform.coordinates(layer)
    stage = torch.arange(len(coordinates.steps))
    counts = (coordinates.owners.unsqueeze(-1) // described.head_dim == stage).sum(1)  # [H, stages]
    expected = [[s * described.head_dim + i for s, n in enumerate(row) for i in range(n)] for row in counts.tolist()]
    assert coordinates.owners.tolist() == expected, "the owners of each stage are the first coordinates"
    matrix = coordinates.forward.bfloat16()
    assert torch.equal(matrix.float(), coordinates.forward), "coordinates are BF16 numbers"
    owning = -(-int(counts[:, 0].max()) // _COLUMNS) * _COLUMNS
    refinement = Refinement(
        coordinates.mean.contiguous(), coordinates.shares.contiguous(), coordinates.weights.contiguous(),
        torch.tensor(coordinates.gains), counts.int().contiguous(), torch.tensor(coordinates.steps),
    )  # fmt: skip
    return Tables(widths, matrix[..., :owning].contiguous(), boundaries, centroids, refinement)


def in_pairs(matrix: Tensor) -> Tensor:
    """A matrix as AMX multiplies by it, in tiles of 32 inputs by 16 outputs: two inputs of an output lie beside each other.

    Args:
        matrix: [H, inputs, outputs] of BF16 numbers, outputs a multiple of 16.
    Returns:
        [H, inputs / 32, outputs / 16, 16, 16, 2] bf16, zeros after the last input.
    """
    exact = matrix.bfloat16()
    assert torch.equal(exact.to(matrix.dtype), matrix), "rotations and coordinates are BF16 numbers"
    heads, inputs, outputs = matrix.shape
    padded = torch.nn.functional.pad(exact, (0, 0, 0, -inputs % 32))
    return padded.view(heads, -1, 16, 2, outputs // 16, 16).permute(0, 1, 4, 2, 5, 3).contiguous()


@cache
def whole_levels(centroids: tuple[float, ...]) -> tuple[Tensor, float]:
    """Centroids as integers and their unit: `levels * unit` comes as near to all of them as any unit allows.

    A codebook is 16 fixed numbers at most, 8 in size, so that a unit can be found in which all of them lie near integers: a
    fifth of the error that the same bits cost with any unit. For `tq4` at most 5e-5 of a Gaussian coordinate's standard
    deviation.

    Args:
        centroids: 16 of them at most, not all zero.
    Returns:
        levels: [n] int16, at most `LARGEST_LEVEL` in size; and their unit.
    """
    exact = torch.tensor(centroids, dtype=torch.float64)
    units = exact.abs().max() / torch.linspace(LARGEST_LEVEL / 2, LARGEST_LEVEL, 2**18, dtype=torch.float64)
    errors = []
    for some in units.view(-1, 2**13):  # all at once would take 100 MB, more than a forward does
        scaled = exact / some.unsqueeze(1)
        errors.append((scaled - scaled.round()).abs().amax(1) * some)
    unit = units[torch.cat(errors).argmin()]
    return (exact / unit).round().to(torch.int16), float(unit)
