"""How the kernels see a KV format: one dense rotation in their own order of coordinates, its centroids and its boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.rotated import Description, numbers_on
from haarkv.tq_ops.kv.reads import Reads


def kernel_order(described: Description) -> Tensor | None:
    """The coordinate in each of the D columns of a kernel's two halves, as `tq_ops.cuda.planes` says: [D] int64.

    Returns:
        None if the planes of a level lie in different orders.
    """
    narrow = min(4, *(plane.bits for plane in described.planes))
    parts, width = 8 // narrow, described.head_dim * narrow // 8
    found = {_coordinates_of_parts(plane.order, plane.bits, parts, width) for plane in described.planes}
    if len(found) > 1:
        return None
    coordinates = list(torch.tensor(found.pop()).view(parts, width))
    halves = [_laced(coordinates[: parts // 2]), _laced(coordinates[parts // 2 :])]
    return torch.cat(halves)


def _coordinates_of_parts(order: tuple[int, ...], bits: int, parts: int, width: int) -> tuple[int, ...]:
    """The coordinate of a plane's stream that each part holds at each of its places, part after part."""
    tiles = len(order) * bits // 8 // width
    a_byte = 8 // bits
    places = ((part % tiles * width + j) * a_byte + part // tiles for part in range(parts) for j in range(width))
    return tuple(order[place] for place in places)


def _laced(parts: list[Tensor]) -> Tensor:
    """Pairs of pairs, as `planes.lace`."""
    while len(parts) > 1:
        parts = [torch.stack(two, -1).flatten() for two in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


READS = Reads(
    "the GPU kernels", head_dims=(64, 128, 256), planes=((2,), (2, 1), (4,), (4, 1), (4, 2), (8,)), most_scales=1,
    in_one_order=lambda described: kernel_order(described) is not None, windows=True,
)  # fmt: skip
"""What the kernels read and write."""
NO_FAULT = 2**63 - 1
"""What stands where the first refused vector would be noted, as long as there is none."""


@dataclass(frozen=True)
class Layout:
    """A format of 2 to 8 bits a level, one FP16 scale a vector.

    The rotated vector is kept in the order of `kernel_order`. The columns of the rotation are in that order, and nothing else
    knows how a format orders its coordinates.

    Attributes:
        bits: of a level, which say how its planes lie.
        rotation: [D, D], `y = x @ rotation` in the kernels' order; bf16 where its numbers are, which is exact, or fp32.
        centroids: [2**bits] fp32.
        words: [n] int32, the same in FP16, cut into bytes for `tq_ops.cuda.lookup`; None where they can only be loaded.
        boundaries: [2**bits - 1] fp32, ascending.
        rounds_unit: whether x / norm is rounded to BF16 before it is rotated.
        smallest: norms up to this are stored as zeros.
        saturates: whether a scale above FP16 is stored as the largest finite one, or refused.
    """

    bits: int
    rotation: Tensor
    centroids: Tensor
    words: Tensor | None
    boundaries: Tensor
    rounds_unit: bool
    smallest: float
    saturates: bool


def words_of(centroids: Tensor) -> Tensor | None:
    """What `tq_ops.cuda.lookup` permutes: int32, the high bytes of the centroids in FP16, then their low bytes.

    Of 4 or 8 centroids that is all of them, [2] or [4]. Of 16 it is the upper eight, which are magnitudes, and the halved
    sign, [5]. They are data and not constants of the kernel, or the compiler would load them into registers for every use.

    Args:
        centroids: [levels] fp32, ascending.
    Returns:
        None of more than 16 levels, and of 16 whose lower half is not the upper one's negative.
    """
    half = centroids.to(torch.float16)
    if len(half) > 16 or (len(half) == 16 and not torch.equal(half[:8].flip(0), -half[8:])):
        return None
    sign = torch.full((4 * (len(half) == 16),), 0x40, dtype=torch.uint8, device=centroids.device)
    low, high = half[-8:].view(torch.uint8).view(-1, 2).unbind(-1)
    return torch.cat([high, low, sign]).view(torch.int32)


@cache
def layout_of(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Layout:
    """The layout of a format that `READS` takes, its tables on a device; made once. Do not write to it."""
    described = kv_format.description(head_dim)
    assert described is not None, "unsupported() lets formats of rotated levels pass alone"
    return _layout(described, layer if described.transform.per_layer else 0, device)


@cache
def into_rotated(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Tensor:
    """What brings vectors into the rotated domain so that the way back is exact: `y = x @ m`, for which `y @ rotation.T = x`.

    It is the rotation itself, but for the rounding of that one's entries to BF16, with which a round trip is off by 3e-3 of
    a vector's length.

    Returns:
        [D, D] fp32, in the kernels' order; made once.
    """
    rotation = layout_of(kv_format, layer, head_dim, torch.device("cpu")).rotation
    inverse: Tensor = torch.linalg.inv(rotation.double().T)
    return inverse.float().contiguous().to(device)


@cache
def _layout(described: Description, layer: int, device: torch.device) -> Layout:
    order = kernel_order(described)
    assert order is not None, "unsupported() lets planes of one order pass alone"
    rotation = described.transform.on(layer, described.head_dim, torch.device("cpu"))[:, order]
    centroids = numbers_on(described.centroids, device)
    quantizer = described.quantizer
    return Layout(
        bits=described.bits,
        rotation=rotation.to(device, described.transform.dtype).contiguous(),
        centroids=centroids,
        words=words_of(centroids),
        boundaries=numbers_on(described.boundaries, device),
        rounds_unit=quantizer.rounds_unit,
        smallest=quantizer.smallest,
        saturates=quantizer.saturates,
    )
