"""How the kernels see a KV format: one dense rotation, sixteen centroids, and where the two halves of a byte belong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.hadamard import HadamardTBQ4
from haarkv.tq_ops.formats.turboquant import codebook_on, rotation_on
from haarkv.tq_ops.kv.plan import KVPlan

NAMES = ("tq4", "tbq4_0")
HEAD_DIMS = (64, 128, 256)
NO_FAULT = 2**63 - 1
"""What stands where the first refused vector would be noted, as long as there is none."""


@dataclass(frozen=True)
class Layout:
    """A format of 16 levels, two a byte, one FP16 scale a vector.

    The turned vector is kept as the bytes hold it: coordinate j < D/2 is the low half of byte j, coordinate D/2 + j its high
    half. A format that packs otherwise has the columns of its rotation in that order, and nothing else knows of it.

    Attributes:
        rotation: [D, D], `y = x @ rotation` in the order of the bytes; bf16 where its numbers are, which is exact, or fp32.
        centroids: [16] fp32.
        words: [5] int32, the same in FP16, cut into bytes for `tq_ops.cuda.lookup`.
        boundaries: [15] fp32, ascending.
        rounds_unit: whether x / norm is rounded to BF16 before it is turned.
        smallest: norms up to this are stored as zeros.
        saturates: whether a scale above FP16 is stored as the largest finite one, or refused.
    """

    rotation: Tensor
    centroids: Tensor
    words: Tensor
    boundaries: Tensor
    rounds_unit: bool
    smallest: float
    saturates: bool


def unsupported(plan: KVPlan, head_dim: int) -> str | None:
    """None, or in one sentence why the kernels cannot read such a cache."""
    for kv_format in plan.formats:
        if kv_format.name not in NAMES:
            return f"its kernels read and write {' and '.join(NAMES)}, not {kv_format.name}"
        if kv_format.name == "tbq4_0" and head_dim != HadamardTBQ4.block:
            return f"its kernels take one scale a vector, and tbq4_0 at head_dim {head_dim} has several"
    if plan.windowed:
        return "its kernels read packed codes alone, no tokens in BF16 beside them; leave out the tail and the sinks"
    if head_dim not in HEAD_DIMS:
        return f"its kernels are built for a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    return None


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
def _of_tq4(layer: int, head_dim: int, device: torch.device) -> Layout:
    book = codebook_on(head_dim, device)
    rotation = rotation_on(layer, head_dim, device).to(torch.bfloat16)
    return Layout(rotation, book.centroids, words_of(book.centroids), book.boundaries, True, 0.0, True)


@cache
def _of_tbq4(device: torch.device) -> Layout:
    turn = HadamardTBQ4().turn(torch.eye(HadamardTBQ4.block))
    # Byte j / 2 holds the even j in its low half.
    in_order = torch.cat([turn[:, 0::2], turn[:, 1::2]], dim=1).contiguous().to(device)
    centroids, boundaries = (torch.tensor(x, device=device) for x in (HadamardTBQ4.centroids, HadamardTBQ4.boundaries))
    return Layout(in_order, centroids, words_of(centroids), boundaries, False, HadamardTBQ4.smallest, False)


def layout_of(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Layout:
    """The layout of a format that `unsupported` lets pass, its tables on a device; do not write to them."""
    return _of_tbq4(device) if kv_format.name == "tbq4_0" else _of_tq4(layer, head_dim, device)
