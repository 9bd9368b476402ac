"""How the kernels see a KV format: one dense rotation, sixteen centroids, and where the two halves of a byte belong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.rotated import Description, numbers_on
from haarkv.tq_ops.kv.reads import Reads

READS = Reads("the GPU kernels", head_dims=(64, 128, 256), most_scales=1, mirrored=True)
"""What the kernels read and write."""
NO_FAULT = 2**63 - 1
"""What stands where the first refused vector would be noted, as long as there is none."""


@dataclass(frozen=True)
class Layout:
    """A format of 16 levels, two a byte, one FP16 scale a vector.

    The rotated vector is kept as the bytes hold it: coordinate j < D/2 is the low half of byte j, coordinate D/2 + j its high
    half. A format that packs otherwise has the columns of its rotation in that order, and nothing else knows of it.

    Attributes:
        rotation: [D, D], `y = x @ rotation` in the order of the bytes; bf16 where its numbers are, which is exact, or fp32.
        centroids: [16] fp32.
        words: [5] int32, the same in FP16, cut into bytes for `tq_ops.cuda.lookup`.
        boundaries: [15] fp32, ascending.
        rounds_unit: whether x / norm is rounded to BF16 before it is rotated.
        smallest: norms up to this are stored as zeros.
        saturates: whether a scale above FP16 is stored as the largest finite one, or refused.
    """

    bits: int
    rotation: Tensor
    centroids: Tensor
    words: Tensor
    boundaries: Tensor
    rounds_unit: bool
    smallest: float
    saturates: bool


def words_of(centroids: Tensor) -> Tensor:
    """What `tq_ops.cuda.lookup` permutes: [5] int32, the eight magnitudes' high bytes, their low bytes, and the halved sign.

    They are data and not constants of the kernel, or the compiler would load them anew into registers for every use.

    Args:
        centroids: [16] fp32, ascending, each half the other's negative in FP16.
    Raises:
        ValueError: they are not antisymmetric, which eight magnitudes and a sign ask for.
    """
    half = centroids.to(torch.float16)
    if not torch.equal(half[:8].flip(0), -half[8:]):
        raise ValueError("centroids must be antisymmetric in FP16")
    low, high = half[8:].view(torch.uint8).view(8, 2).unbind(-1)
    sign = torch.full((4,), 0x40, dtype=torch.uint8, device=centroids.device)
    return torch.cat([high, low, sign]).view(torch.int32)


@cache
def layout_of(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Layout:
    """The layout of a format that `READS` takes, its tables on a device; made once. Do not write to it."""
    described = kv_format.description(head_dim)
    assert described is not None, "unsupported() lets formats of rotated levels pass alone"
    return _layout(described, layer if described.transform.per_layer else 0, device)


@cache
def _layout(described: Description, layer: int, device: torch.device) -> Layout:
    # The bytes' low halves first, then their high halves.
    order = torch.tensor(described.planes[0].order).view(-1, 2).T.flatten()
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
