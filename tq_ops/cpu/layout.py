"""A format as the kernels read it: matrices to its levels and back, in the kernels' order of levels, and its centroids.

The kernels know no format. They read a vector of N levels as N / 8 words of eight 4-bit levels, the first in the lowest bits:
queries are in the order of words; sums come back in the order of places: level 0 of every word, then level 1 of every word.
Rotation and packing are folded into the columns and rows of the matrices. Levels of 2 or 3 bits are unpacked to words first.
Levels of 5 to 8 bits, learned keys, BF16 and FP32 keep their own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks.cubic import WIDTHS
from haarkv.codebooks.cubic import boundaries as boundaries_of
from haarkv.codebooks.cubic import centroids as centroids_of
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.packing import Column, planes
from haarkv.tq_ops.formats.rotated import Coordinates, Description, numbers_on
from haarkv.tq_ops.kv.kernel_support import KernelSupport

READS = KernelSupport(
    "the CPU kernels", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), plain=(torch.bfloat16, torch.float32),
    bf16_tokens=True, windows=True, learned=True,
)  # fmt: skip
"""What the kernels read and store."""
LARGEST_LEVEL = 2**13 - 1
"""The largest 16-bit centroid: products with queries and weights must add up in 32 bits."""
_CPU = torch.device("cpu")
_MOST_COLUMNS, _MOST_PARTS = 3, 5


@dataclass(frozen=True)
class Layout:
    """The kernels' tables of one format and layer. H is 1 where all KV heads share a rotation.

    Attributes:
        planes: widths of a level's planes, low bits first, one or two; () of BF16 and FP32, which have no other tables.
        matrix: [H, D, D] bf16, multiplies vectors before they are stored; levels in the format's order.
        rotate: [H, D, D] bf16: `q @ rotate` is the rotated query, in word order up to 4 bits.
        rotate_back: [H, D, D] bf16, from sums in the order of places to the model's domain.
        rotate_pairs, rotate_back_pairs: `in_pairs` of both.
        centroids: [2**bits] fp32; of learned keys, of 1 to 6 bits one after the other.
        boundaries: [2**bits - 1] fp32, likewise.
        along: of `Description`.
        integers: [2**bits] int16 up to `LARGEST_LEVEL` in size, `centroids / unit` rounded, of levels up to 4 bits; of learned
            keys six tables: for 1 to 5 bits 32 entries each, the 2**bits centroids repeated, and 64 entries for 6 bits.
        unit: minimizes the largest `centroids - integers * unit`.
        mean, weights: [H, D] fp32 of learned keys (`Coordinates`).
        gains: fp32, the sizes at which learned keys are quantized.
        columns: int32, `Columns` of kernels.h, of learned keys.
    """

    planes: tuple[int, ...] = ()
    matrix: Tensor | None = None
    rotate: Tensor | None = None
    rotate_back: Tensor | None = None
    rotate_pairs: Tensor | None = None
    rotate_back_pairs: Tensor | None = None
    centroids: Tensor | None = None
    boundaries: Tensor | None = None
    along: bool = False
    integers: Tensor | None = None
    unit: float = 0.0
    mean: Tensor | None = None
    weights: Tensor | None = None
    gains: Tensor | None = None
    columns: Tensor | None = None


def layout(kv_format: KVFormat, layer: int, head_dim: int) -> Layout:
    """The layout of a format in `READS`; cached, not to be written to."""
    if kv_format.plain:
        return Layout()
    description = kv_format.description(head_dim)
    assert description is not None, "unsupported() refuses formats without a description"
    return _layout(description, layer)


@cache
def _layout(description: Description, layer: int) -> Layout:
    if description.transform.coordinates is not None:
        return _learned_layout(description, description.transform.coordinates(layer))
    queries = sums = torch.arange(description.head_dim)
    centroids, integers, unit = numbers_on(description.centroids, _CPU), None, 0.0
    if description.bits <= 4:  # as words of eight levels
        queries = queries.view(2, -1).T.flatten()
        sums = queries.view(-1, 8).T.flatten()
        integers, unit = whole_levels(tuple(centroids.tolist()))
    rotation = description.transform.matrix(layer, description.head_dim)
    inverse = rotation.T.unsqueeze(0)
    rotate, rotate_back = inverse[:, queries].mT.contiguous(), inverse[:, sums].contiguous()
    return Layout(
        tuple(planes(description.bits)), rotation.unsqueeze(0), rotate, rotate_back,
        in_pairs(rotate), in_pairs(rotate_back), centroids, numbers_on(description.boundaries, _CPU), description.along,
        integers, unit,
    )  # fmt: skip


def _learned_layout(description: Description, coordinates: Coordinates) -> Layout:
    """A matrix per KV head."""
    matrix, rotate = coordinates.forward.bfloat16().contiguous(), coordinates.rows.bfloat16().mT.contiguous()
    assert torch.equal(rotate.float(), coordinates.rows.mT), "rows are BF16 numbers"
    assert torch.equal(matrix.float(), coordinates.forward), "coordinates are BF16 numbers"
    integers, unit = _mixed_integers()
    return Layout(
        (), matrix, rotate, None, in_pairs(rotate), None, _every_width(centroids_of),
        _every_width(boundaries_of), False, integers, unit, coordinates.mean.contiguous(), coordinates.weights.contiguous(),
        torch.tensor(GAINS), _columns(description.columns),
    )  # fmt: skip


@cache
def _every_width(table: Callable[[int], Tensor]) -> Tensor:
    """Tables of all widths one after the other."""
    return torch.cat([table(bits) for bits in WIDTHS])


@cache
def _mixed_integers() -> tuple[Tensor, float]:
    """`Layout.integers` of learned keys, and their unit."""
    unit = float(centroids_of(WIDTHS[-1])[-1]) / LARGEST_LEVEL
    tables = [(centroids_of(bits).double() / unit).round().to(torch.int16) for bits in WIDTHS]
    return torch.cat([table.repeat(max(1, 32 // len(table))) for table in tables]), unit


@cache
def _columns(columns: tuple[Column, ...]) -> Tensor:
    """[1 + 3 * (2 + 5 * 3)] int32, `Columns` of kernels.h."""
    table = torch.zeros(_MOST_COLUMNS, 2 + 3 * _MOST_PARTS, dtype=torch.int32)
    for row, column in zip(table, columns, strict=False):
        parts = [number for part in column.parts for number in (part.eighth, part.bits, part.shift)]
        row[: 2 + len(parts)] = torch.tensor([column.nbytes, len(column.parts), *parts])
    return torch.cat([torch.tensor([len(columns)], dtype=torch.int32), table.flatten()])


def in_pairs(matrix: Tensor) -> Tensor:
    """A matrix as BF16 products take it: tiles of 32 inputs by 16 outputs, two inputs of an output beside each other.

    Args:
        matrix: [H, inputs, outputs] bf16, multiples of 32 and of 16.
    Returns:
        [H, inputs / 32, outputs / 16, 16, 16, 2] bf16.
    """
    heads, _, outputs = matrix.shape
    return matrix.view(heads, -1, 16, 2, outputs // 16, 16).permute(0, 1, 4, 2, 5, 3).contiguous()


@cache
def whole_levels(centroids: tuple[float, ...]) -> tuple[Tensor, float]:
    """Centroids (at most 16) as integers [n] int16, at most `LARGEST_LEVEL` in size, and the unit with the least error.

    A symmetric codebook has at most 8 absolute values, and some unit brings all of them near integers: a fifth of the error of
    a random unit, for `tq4` at most 5e-5 of a coordinate's standard deviation.
    """
    exact = torch.tensor(centroids, dtype=torch.float64)
    units = exact.abs().max() / torch.linspace(LARGEST_LEVEL / 2, LARGEST_LEVEL, 2**18, dtype=torch.float64)
    errors = []
    for some in units.view(-1, 2**13):  # all at once would take 100 MB, more than a forward does
        scaled = exact / some.unsqueeze(1)
        errors.append((scaled - scaled.round()).abs().amax(1) * some)
    unit = units[torch.cat(errors).argmin()]
    return (exact / unit).round().to(torch.int16), float(unit)
