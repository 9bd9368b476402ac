"""How the kernels see a KV format: dense matrices in their own order of levels, its centroids and its boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.packing import planes
from haarkv.tq_ops.formats.rotated import Coordinates, Description, numbers_on
from haarkv.tq_ops.kv.reads import Reads


def kernel_order(described: Description) -> Tensor:
    """The level in each of the N columns of a kernel's two halves, as `tq_ops.cuda.planes` says: [N] int64."""
    narrow = min(4, *planes(described.bits), 8)
    parts = list(torch.arange(described.levels).view(8 // narrow, -1))
    return torch.cat([_laced(parts[: len(parts) // 2]), _laced(parts[len(parts) // 2 :])])


def _laced(parts: list[Tensor]) -> Tensor:
    """Pairs of pairs, as `planes.lace`."""
    while len(parts) > 1:
        parts = [torch.stack(two, -1).flatten() for two in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


_FEWEST, _MOST = 32, 256
"""Learned nibbles of a vector: half of them fill a tensor core's operand, and twice as many would not fit in registers."""


def _learned(head_dim: int) -> range:
    return range(_FEWEST, min(_MOST, 3 * head_dim) + 1, 16)


READS = Reads("the GPU kernels", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), kept=True, windows=True, learned=_learned)
"""What the kernels read and write."""
NO_FAULT = 2**63 - 1
"""What stands where the first refused vector would be noted, as long as there is none."""


def fault_place(key: int) -> tuple[int, str, int, int]:
    """Layer, side ("K" or "V"), token of the batch and KV head of a fault that `append` noted."""
    return key >> 49, "KV"[(key >> 48) & 1], (key >> 16) & 0xFFFFFFFF, key & 0xFFFF


@dataclass(frozen=True)
class Learned:
    """What learned coordinates have beside a rotation, in the kernels' order; columns without a level hold zeros.

    Attributes:
        mean: [H, D] fp32, as in `Coordinates`.
        forward: [H, D, W] bf16, for each level the coordinate that it belongs to.
        numbers: [H, 4 * W + 5] fp32. For each level: its coordinate's share and weight where it is that one's first level,
            else 0; the weight where no later level refines it, else 0; its stage. Then the second and the third stage's step,
            and the three gains.
        largest: [H, D] fp32, of each row of the rotation its largest number's size.
    """

    mean: Tensor
    forward: Tensor
    numbers: Tensor
    largest: Tensor


@dataclass(frozen=True)
class Layout:
    """A format of 2 to 8 bits a level, one FP16 scale a vector.

    Levels are kept in the order of `kernel_order`. The columns of the rotation are in that order, and nothing else knows how a
    format orders them. Each half of the N levels is as wide as a power of two, so N = 96 takes W = 128 columns, of which those
    beyond either half stand for nothing.

    Attributes:
        bits: of a level, which say how its planes lie.
        levels: N, levels of a vector; D of a rotation.
        rotation: [D, D] bf16, `y = x @ rotation` in the kernels' order. Of learned
            coordinates [H, D, W], by which queries are multiplied, and transposed the sums of V.
        centroids: [2**bits] fp32.
        words: [n] int32, the same in FP16, cut into bytes for `tq_ops.cuda.lookup`; None where they can only be loaded.
        boundaries: [2**bits - 1] fp32, ascending.
        learned: of learned coordinates; None of a rotation.
    """

    bits: int
    levels: int
    rotation: Tensor
    centroids: Tensor
    words: Tensor | None
    boundaries: Tensor
    learned: Learned | None = None

    @property
    def width(self) -> int:
        """W, columns in which the levels lie."""
        return self.rotation.shape[-1]

    @property
    def matrices(self) -> int:
        """1, or H where every KV head has its own."""
        return self.rotation.shape[0] if self.learned else 1

    @property
    def forward(self) -> Tensor:
        """What K or V is multiplied by before levels are chosen."""
        return self.learned.forward if self.learned else self.rotation


class Rotated(NamedTuple):
    """Queries in the domain of the codes.

    Attributes:
        queries: [T, Hq, W] fp16 in a BF16 model, else fp32.
        gains: [T, Hq] fp32, powers of two by which those of learned coordinates were divided, so that FP16 holds them; None of
            a rotation.
    """

    queries: Tensor
    gains: Tensor | None


def unset_queries(tokens: int, heads: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> Rotated:
    """Unset, for queries of a model of this dtype."""
    kept = torch.float16 if dtype == torch.bfloat16 else torch.float32
    gains = torch.empty(tokens, heads, dtype=torch.float32, device=device) if layout.learned else None
    return Rotated(torch.empty(tokens, heads, layout.width, dtype=kept, device=device), gains)


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
    learned = None
    if described.transform.coordinates:
        coordinates = described.transform.coordinates(layer)
        rotation, learned = _spread(coordinates.rows.mT, order), _learned_of(coordinates, order, device)
    else:
        rotation = described.transform.on(layer, described.head_dim, torch.device("cpu"))[:, order]
    centroids = numbers_on(described.centroids, device)
    return Layout(
        bits=described.bits,
        levels=described.levels,
        rotation=rotation.to(device, torch.bfloat16).contiguous(),
        centroids=centroids,
        words=words_of(centroids),
        boundaries=numbers_on(described.boundaries, device),
        learned=learned,
    )


def width_of(levels: int) -> int:
    """W, columns in which N levels lie: twice a power of two."""
    return 2 << (levels // 2 - 1).bit_length()


def _spread(of_levels: Tensor, order: Tensor) -> Tensor:
    """[..., N] of levels -> [..., W] of the kernels' columns, zeros in those that stand for none."""
    low, high = of_levels[..., order].chunk(2, dim=-1)
    half = width_of(of_levels.shape[-1]) // 2
    return torch.cat([torch.nn.functional.pad(part, (0, half - part.shape[-1])) for part in (low, high)], dim=-1)


def _learned_of(of: Coordinates, order: Tensor, device: torch.device) -> Learned:
    heads, dim = of.mean.shape
    assert len(of.steps) == len(of.gains) == 3, "the kernels go through three stages at three gains"
    stage, owner = of.owners // dim, of.owners % dim
    first, weight = stage == 0, of.weights.gather(1, owner)
    last = torch.zeros(heads, dim, dtype=torch.int64).scatter_reduce_(1, owner, stage, "amax").gather(1, owner) == stage
    of_levels = (of.shares.gather(1, owner) * first, weight * first, weight * last, stage.float())
    numbers = (
        *(_spread(part, order) for part in of_levels),
        *(torch.tensor(part).expand(heads, -1) for part in (of.steps[1:], of.gains)),
    )  # fmt: skip
    forward = _spread(of.forward.gather(2, owner.unsqueeze(1).expand(heads, dim, -1)), order)
    assert torch.equal(forward.bfloat16().float(), forward), "coordinates are BF16 numbers"
    return Learned(
        mean=of.mean.to(device).contiguous(),
        forward=forward.to(device, torch.bfloat16).contiguous(),
        numbers=torch.cat(numbers, dim=1).to(device).contiguous(),
        largest=of.rows.abs().amax(1).to(device),
    )
