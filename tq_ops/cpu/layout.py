"""How the kernels see a format: its turned domain as two matrices in their own order of coordinates, and its centroids.

The kernels read a packed vector as D / 8 words of 32 bits with eight 4-bit levels each, the first in the lowest bits, and know
no format. Queries come in word order (word, level), sums go out in plane order (level, word); a format's rotation and its way
of packing are folded into the columns and rows of the matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.hadamard import HadamardTBQ4
from haarkv.tq_ops.formats.turboquant import codebook_on, rotation_on
from haarkv.tq_ops.kv.plan import KVPlan

HEAD_DIMS = (64, 128, 256)
LARGEST_LEVEL = 2**13 - 1
"""Of centroids in 16 bits: 3 bits are left so that 32 products with a 16-bit query fit in 32 bits."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """What attention needs of one format and layer.

    Attributes:
        turn: [D, D] fp32, `q @ turn` is the turned query in word order.
        turn_back: [D, D] fp32, from the turned domain in plane order to the model's own.
        centroids: [16] fp32.
        levels: [16] int16, up to `LARGEST_LEVEL` in size: the centroids in units of `unit`, rounded.
        unit: that makes the largest error of a level, `centroids - levels * unit`, least.
    """

    turn: Tensor
    turn_back: Tensor
    centroids: Tensor
    levels: Tensor
    unit: float


def _tq4(layer: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    # A byte holds a coordinate of the vector's first half below one of its second.
    order = torch.arange(head_dim).view(2, -1).T.flatten()
    return rotation_on(layer, head_dim, _CPU), codebook_on(head_dim, _CPU).centroids, order


def _tbq4_0(_layer: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    # One transform for all layers; a byte holds neighbours.
    kv_format = formats.get("tbq4_0")
    assert isinstance(kv_format, HadamardTBQ4)
    return kv_format.turn(torch.eye(head_dim)), torch.tensor(kv_format.centroids), torch.arange(head_dim)


# Of each format: rotation [D, D] with y = x @ rotation, centroids [16], and the coordinate of each nibble, low ones first.
_TURNED: dict[str, Callable[[int, int], tuple[Tensor, Tensor, Tensor]]] = {"tq4": _tq4, "tbq4_0": _tbq4_0}
NAMES = tuple(_TURNED)


@cache
def layout(name: str, layer: int, head_dim: int) -> Layout:
    """The layout of a format by name, one of `NAMES`; made once. Do not write to it."""
    rotation, centroids, order = _TURNED[name](layer, head_dim)
    planes = order.view(-1, 8).T.flatten()
    levels, unit = whole_levels(tuple(centroids.tolist()))
    return Layout(rotation[:, order].contiguous(), rotation.T[planes].contiguous(), centroids.contiguous(), levels, unit)


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


@cache
def unsupported(plan: KVPlan, head_dim: int) -> str | None:
    """None, or in one sentence why the kernels cannot read a cache of this plan; asked by every op, answered once."""
    for kv_format in plan.formats:
        if kv_format.name not in NAMES:
            return f"the CPU kernels read {' and '.join(NAMES)}, not {kv_format.name}; --executor reference runs every format"
    if plan.windowed:
        return "the CPU kernels read packed tokens alone, none in BF16 beside them; leave out the tail and the sinks"
    if head_dim not in HEAD_DIMS:
        return f"the CPU kernels are made for a head_dim of 64, 128 or 256, not {head_dim}"
    return None
