"""How the kernels see a format: its rotated domain as two matrices in their own order of coordinates, and its centroids.

The kernels read a packed vector as D / 8 words of 32 bits with eight 4-bit levels each, the first in the lowest bits, and know
no format. Queries come in word order (word, level), sums go out in plane order (level, word); a format's rotation and its way
of packing are folded into the columns and rows of the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.rotated import Description, Quantizer, in_parts, numbers_on
from haarkv.tq_ops.kv.reads import Reads, misfit

READS = Reads("the CPU kernels", head_dims=(64, 128, 256))
"""What the attention kernels read."""
APPENDS = Reads(
    "the CPU kernels", head_dims=READS.head_dims, most_scales=1, order=in_parts, matrix_dtype=torch.bfloat16,
    quantizer=Quantizer(rounds_unit=True, smallest=0.0, saturates=True),
)  # fmt: skip
"""What the append kernel quantizes; the reference stores the rest of what they read."""
LARGEST_LEVEL = 2**13 - 1
"""Of centroids in 16 bits: 3 bits are left so that 32 products with a 16-bit query fit in 32 bits."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """What attention needs of one format and layer.

    Attributes:
        rotate: [D, D] fp32, `q @ rotate` is the rotated query in word order.
        rotate_back: [D, D] fp32, from the rotated domain in plane order to the model's own.
        centroids: [16] fp32.
        rotation: [D, D] of the format's own dtype and order of coordinates, which vectors are quantized by.
        boundaries: [15] fp32, likewise.
        levels: [16] int16, up to `LARGEST_LEVEL` in size: the centroids in units of `unit`, rounded.
        unit: that makes the largest error of a level, `centroids - levels * unit`, least.
    """

    rotate: Tensor
    rotate_back: Tensor
    centroids: Tensor
    rotation: Tensor
    boundaries: Tensor
    levels: Tensor
    unit: float


def layout(kv_format: KVFormat, layer: int, head_dim: int) -> Layout:
    """The layout of a format that `READS` takes; made once. Do not write to it."""
    described = kv_format.description(head_dim)
    assert described is not None, "unsupported() lets formats of rotated levels pass alone"
    return _layout(described, layer if described.transform.per_layer else 0)


def one_quantizer(pair: tuple[KVFormat, KVFormat], head_dim: int) -> bool:
    """Whether the append kernel stores K and V of these formats: it quantizes both by the same tables."""
    keys, values = pair
    return misfit(APPENDS, keys, head_dim) is None and keys.description(head_dim) == values.description(head_dim)


@cache
def _layout(described: Description, layer: int) -> Layout:
    rotation = described.transform.on(layer, described.head_dim, _CPU)
    order = torch.tensor(described.planes[0].order)
    planes = order.view(-1, 8).T.flatten()
    centroids = numbers_on(described.centroids, _CPU)
    levels, unit = whole_levels(tuple(centroids.tolist()))
    return Layout(
        rotate=rotation[:, order].contiguous(),
        rotate_back=rotation.T[planes].contiguous(),
        centroids=centroids,
        rotation=rotation.to(described.transform.dtype),
        boundaries=numbers_on(described.boundaries, _CPU),
        levels=levels,
        unit=unit,
    )


@cache
def whole_levels(centroids: tuple[float, ...]) -> tuple[Tensor, float]:
    """Centroids as integers and their unit: `levels * unit` comes as near to all of them as any unit allows.

    A codebook is 16 fixed numbers, 8 in size, so that a unit can be found in which all of them lie near integers: a fifth of
    the error that the same bits cost with any unit. For `tq4` at most 5e-5 of a Gaussian coordinate's standard deviation.

    Args:
        centroids: 16 of them, not all zero.
    Returns:
        levels: [16] int16, at most `LARGEST_LEVEL` in size; and their unit.
    """
    exact = torch.tensor(centroids, dtype=torch.float64)
    units = exact.abs().max() / torch.linspace(LARGEST_LEVEL / 2, LARGEST_LEVEL, 2**18, dtype=torch.float64)
    scaled = exact / units.unsqueeze(1)
    errors = ((scaled - scaled.round()).abs().amax(1)) * units
    best = int(errors.argmin())
    return scaled[best].round().to(torch.int16), float(units[best])
