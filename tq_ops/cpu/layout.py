"""How the kernels see a format: matrices to its levels and back, in their own order of levels, and its centroids.

The kernels read a packed vector of N levels as N / 8 words of 32 bits with eight 4-bit levels each, the first in the lowest
bits, and know no format. Queries come in word order (word, level), sums go out in plane order (level, word); a format's
rotation, or its learned coordinates, and its way of packing are folded into the columns and rows of the matrices. Levels of 2
or 3 bits are unpacked to such words first; those of 5 to 8 bits become numbers, in the order of `places`. Formats of other
kinds become numbers in the order of their own coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.numbers import Exact, Kind, Numbers
from haarkv.tq_ops.formats.rotated import Description, Quantizer, in_parts, numbers_on
from haarkv.tq_ops.kv.reads import Reads, misfit


def _learned(head_dim: int) -> range:
    return range(32, 3 * head_dim + 1, 16)


def places(described: Description) -> tuple[int, ...] | None:
    """The coordinate of each level as the kernels unpack a vector: part after part of a plane, each in the order of its bytes.

    Returns:
        [N]; None if the planes of a level lie in different orders.
    """
    found = {tuple(torch.tensor(plane.order).view(-1, 8 // plane.bits).T.flatten().tolist()) for plane in described.planes}
    return found.pop() if len(found) == 1 else None


READS = Reads(
    "the CPU kernels", head_dims=(64, 128, 256), planes=((2,), (2, 1), (4,), (4, 1), (4, 2), (8,)),
    in_one_order=lambda described: places(described) is not None, numbers=frozenset(Kind), kept=True, windows=True,
    learned=_learned,
)  # fmt: skip
"""What the attention kernels read."""
APPENDS = Reads(
    "the CPU kernels", head_dims=READS.head_dims, planes=READS.planes, order=in_parts,
    matrix_dtype=torch.bfloat16, quantizer=Quantizer(rounds_unit=True, smallest=0.0, saturates=True), learned=READS.learned,
)  # fmt: skip
"""What the append kernel quantizes beside what `Exact` describes. The reference stores the rest of what they read."""
LARGEST_LEVEL = 2**13 - 1
"""Of centroids in 16 bits: what they leave of 32 is for queries and weights, whose products are summed there."""
_CPU = torch.device("cpu")
_COLUMNS = 16  # that the kernels take at once


@dataclass(frozen=True)
class Layout:
    """What attention needs of one format and layer. A rotation serves all KV heads: H is 1 then.

    Attributes:
        levels: N, of a vector.
        planes: widths of a level's planes, low bits first, one or two; () of `numbers`.
        rotate: [H, D, N] fp32 or bf16, `q @ rotate` is the rotated query in word order, or of levels above 4 bits in that of
            `places`; None where the vectors are not rotated.
        rotate_back: [H, N, D] likewise, from the rotated domain in plane order (or that of `places`) to the model's own.
        rotate_pairs, rotate_back_pairs: the same as `in_pairs` has them; None where they are not BF16 numbers.
        mean: [H, D] fp32, what vectors come back with beside that; None of a rotation.
        centroids: [2**bits] fp32; of `numbers` their table, as often as 16 have room; None where codes are numbers.
        integers: [2**bits] int16, up to `LARGEST_LEVEL` in size: the centroids in units of `unit`, rounded. Of words alone.
        unit: that makes the largest error of a level, `centroids - integers * unit`, least.
        numbers: how a format is read that is none of rotated levels.
        restore: [D, D] bf16, by which each vector is rotated back by itself, of such a format.
    """

    levels: int
    planes: tuple[int, ...]
    rotate: Tensor | None
    rotate_back: Tensor | None
    rotate_pairs: Tensor | None
    rotate_back_pairs: Tensor | None
    mean: Tensor | None
    centroids: Tensor | None
    integers: Tensor | None
    unit: float
    numbers: Numbers | None = None
    restore: Tensor | None = None


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
        planes: widths of a level's planes, low bits first.
        matrix: [H, D, D] bf16; H is 1 of a rotation. Of learned coordinates [H, D, C], those that own a level in some head.
            None where `exact` says how vectors are stored.
        boundaries: [2**bits - 1] fp32; None where there are none, and so are the next three.
        centroids: [2**bits] fp32.
        refinement: of learned coordinates; None of a rotation.
        numbers: how a format is read that is none of rotated levels.
        exact: how vectors are stored without a matrix.
    """

    planes: tuple[int, ...]
    matrix: Tensor | None
    boundaries: Tensor | None
    centroids: Tensor | None
    refinement: Refinement | None = None
    numbers: Numbers | None = None
    exact: Exact | None = None


def layout(kv_format: KVFormat, layer: int, head_dim: int) -> Layout:
    """The layout of a format that `READS` takes; made once. Do not write to it."""
    if numbers := kv_format.numbers(head_dim):
        return _layout_of_numbers(kv_format, layer if numbers.per_layer else 0, head_dim)
    return _layout(*_described(kv_format, layer, head_dim))


def tables(kv_format: KVFormat, layer: int, head_dim: int) -> Tables | None:
    """What the append kernel stores a format by; None if it cannot. Do not write to it."""
    numbers = kv_format.numbers(head_dim)
    if numbers and numbers.exact:
        return Tables((), None, None, None, numbers=numbers, exact=numbers.exact)
    if numbers or misfit(APPENDS, kv_format, head_dim) is not None:
        return None
    return _tables(*_described(kv_format, layer, head_dim))


def _described(kv_format: KVFormat, layer: int, head_dim: int) -> tuple[Description, int]:
    described = kv_format.description(head_dim)
    assert described is not None, "unsupported() lets formats of rotated levels pass alone"
    return described, layer if described.transform.per_layer else 0


@cache
def _layout_of_numbers(kv_format: KVFormat, layer: int, head_dim: int) -> Layout:
    numbers = kv_format.numbers(head_dim)
    assert numbers is not None, "the caller has looked"
    table = torch.tensor(numbers.table)
    back = numbers.back(layer) if numbers.back else None
    restore = rotate_back = None
    if numbers.kind is Kind.RESTORED and back is not None:
        restore = back.bfloat16().contiguous()
    elif back is not None:
        rotate_back = back.unsqueeze(0).contiguous()
    return Layout(
        levels=head_dim,
        planes=(),
        rotate=None if rotate_back is None else rotate_back.mT.contiguous(),
        rotate_back=rotate_back,
        rotate_pairs=None if rotate_back is None else in_pairs(rotate_back.mT),
        rotate_back_pairs=None if rotate_back is None else in_pairs(rotate_back),
        mean=None,
        centroids=table.repeat(16 // len(table)) if numbers.table else None,
        integers=None,
        unit=0.0,
        numbers=numbers,
        restore=restore,
    )


@cache
def _layout(described: Description, layer: int) -> Layout:
    unpacked = places(described)
    assert unpacked is not None, "unsupported() lets planes of one order pass alone"
    queries = sums = torch.tensor(unpacked)
    if described.bits <= 4:  # as words of eight levels
        queries = queries[list(in_parts(described.levels, 4))]
        sums = queries.view(-1, 8).T.flatten()
    centroids, integers, unit = numbers_on(described.centroids, _CPU), None, 0.0
    if described.bits <= 4:
        integers, unit = whole_levels(tuple(centroids.tolist()))
    if described.transform.coordinates is None:
        back, mean = described.transform.on(layer, described.head_dim, _CPU).T.unsqueeze(0), None
    else:
        # Of each KV head another: in BF16, which they are, only half of the bytes are fetched.
        of = described.transform.coordinates(layer)
        back, mean = of.rows.bfloat16(), of.mean.contiguous()
        assert torch.equal(back.float(), of.rows), "rows are BF16 numbers"
    rotate, rotate_back = back[:, queries].mT.contiguous(), back[:, sums].contiguous()
    return Layout(
        levels=described.levels,
        planes=tuple(plane.bits for plane in described.planes),
        rotate=rotate,
        rotate_back=rotate_back,
        rotate_pairs=in_pairs(rotate),
        rotate_back_pairs=in_pairs(rotate_back),
        mean=mean,
        centroids=centroids,
        integers=integers,
        unit=unit,
    )


@cache
def _tables(described: Description, layer: int) -> Tables:
    boundaries, centroids = numbers_on(described.boundaries, _CPU), numbers_on(described.centroids, _CPU)
    planes = tuple(plane.bits for plane in described.planes)
    if described.transform.coordinates is None:
        rotation = described.transform.on(layer, described.head_dim, _CPU).bfloat16().unsqueeze(0)
        return Tables(planes, rotation, boundaries, centroids)
    of = described.transform.coordinates(layer)
    stage = torch.arange(len(of.steps))
    counts = (of.owners.unsqueeze(-1) // described.head_dim == stage).sum(1)  # [H, stages]
    expected = [[s * described.head_dim + i for s, n in enumerate(row) for i in range(n)] for row in counts.tolist()]
    assert of.owners.tolist() == expected, "the owners of each stage are the first coordinates"
    matrix = of.forward.bfloat16()
    assert torch.equal(matrix.float(), of.forward), "coordinates are BF16 numbers"
    owning = -(-int(counts[:, 0].max()) // _COLUMNS) * _COLUMNS
    refinement = Refinement(
        of.mean.contiguous(), of.shares.contiguous(), of.weights.contiguous(), torch.tensor(of.gains),
        counts.int().contiguous(), torch.tensor(of.steps),
    )  # fmt: skip
    return Tables(planes, matrix[..., :owning].contiguous(), boundaries, centroids, refinement=refinement)


def in_pairs(matrix: Tensor) -> Tensor | None:
    """A matrix as AMX multiplies by it, in tiles of 32 inputs by 16 outputs: two inputs of an output lie beside each other.

    Args:
        matrix: [H, inputs, outputs], outputs a multiple of 16.
    Returns:
        [H, inputs / 32, outputs / 16, 16, 16, 2] bf16, zeros after the last input; None if that would round a number.
    """
    exact = matrix.bfloat16()
    if not torch.equal(exact.to(matrix.dtype), matrix):
        return None
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
