"""How the kernels see a KV format: dense matrices in their own order of levels, its centroids and its boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.packing import Column, eighth_widths, planes
from haarkv.tq_ops.formats.rotated import Coordinates, Description, numbers_on
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, RopeShift
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kernel_support import KernelSupport


def kernel_order(description: Description) -> Tensor:
    """The level in each of the D columns of a kernel's two halves, as `tq_ops.cuda.planes` says: [D] int64."""
    if description.columns:
        eighths = torch.arange(description.head_dim).view(EIGHTHS, -1)
        parts = [eighths[part.eighth] for column in description.columns for part in column.parts]
    else:
        parts = list(torch.arange(description.head_dim).view(8 // min(4, *planes(description.bits), 8), -1))
    return torch.cat([_lace(parts[: len(parts) // 2]), _lace(parts[len(parts) // 2 :])])


def _lace(parts: list[Tensor]) -> Tensor:
    """Pairs of pairs, as `planes.lace`."""
    while len(parts) > 1:
        parts = [torch.stack(two, -1).flatten() for two in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Columns(NamedTuple):
    """Columns of levels as kernels are compiled for them, none of planes.

    Attributes:
        units: of each column the bytes of a unit, where it begins in D / 8 bytes, its first of the eight parts, and how many.
        parts: shift and bits of each part.
    """

    units: tuple[tuple[int, int, int, int], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()


NO_COLUMNS = Columns()


def make_columns(columns: tuple[Column, ...]) -> Columns:
    """Those of a description."""
    units, begin, first = [], 0, 0
    for one in columns:
        units.append((one.nbytes, begin, first, len(one.parts)))
        begin, first = begin + one.nbytes, first + len(one.parts)
    return Columns(tuple(units), tuple((part.shift, part.bits) for one in columns for part in one.parts))


READS = KernelSupport(
    "the GPU kernels", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), bf16_tokens=True, windows=True, learned=True
)
"""What the kernels read and write."""
NO_FAULT = 2**63 - 1
"""What stands where the first refused vector would be noted, as long as there is none."""


STATE = 0xFFFF
"""What stands where the KV head would, if no version of a recurrent state has seen the tokens before."""


def fault_place(key: int) -> tuple[int, str, int, int]:
    """Layer, side ("K", "V" or "state"), token of the batch and KV head of a fault that `append` or `delta.advance` noted."""
    head = key & 0xFFFF
    return key >> 49, "state" if head == STATE else "KV"[(key >> 48) & 1], (key >> 16) & 0xFFFFFFFF, head


@dataclass(frozen=True)
class LearnedTables:
    """What learned coordinates have beside a rotation, coordinates in the kernels' order.

    Kernels hold a key or a query as two halves, and RoPE turns number i of the one together with number i of the other. Where
    it leaves a part of each vector alone, halves are not those of memory: `input_order` says what stands where, and
    `rotate.places` finds it.

    Attributes:
        mean: [H, D] fp32, as in `Coordinates`, numbers in `input_order`.
        forward: [H, D, D] bf16, rows in `input_order`.
        weights: [H, D] fp32.
        widths: [D] int32, bits of each coordinate's level.
        gains: [3] fp32.
        largest: [H, D] fp32, of each row of the rotation its largest number's size.
        cos, sin: [MOST_POSITIONS / STRETCH, D/2] fp32, how the halves' numbers are turned where a stretch begins.
        half: numbers i and i + half of a vector are turned together.
    """

    mean: Tensor
    forward: Tensor
    weights: Tensor
    widths: Tensor
    gains: Tensor
    largest: Tensor
    cos: Tensor
    sin: Tensor
    half: int


@dataclass(frozen=True)
class Layout:
    """A format of 2 to 8 bits a level, or learned keys; one FP16 scale a vector.

    Levels are kept in the order of `kernel_order`. The columns of the rotation are in that order, and nothing else knows how a
    format orders them.

    Attributes:
        bits: of a level, which say how its planes lie; the mean of learned keys.
        rotation: [D, D] bf16, `y = x @ rotation` in the kernels' order. Of learned keys [H, D, D], by which queries are
            multiplied, its rows in `input_order`.
        centroids: [2**bits] fp32; of learned keys those of 1 bit, of 2 bits, and so on to 6.
        words: [n] int32, the same in FP16, cut into bytes for `tq_ops.cuda.lookup`; None where they are not looked up so.
        boundaries: [2**bits - 1] fp32, ascending; of learned keys likewise of each width.
        columns: of learned keys; none where levels lie in planes.
        learned: of learned keys; None of a rotation.
        along: of `Description`.
    """

    bits: int
    rotation: Tensor
    centroids: Tensor
    words: Tensor | None
    boundaries: Tensor
    columns: Columns = NO_COLUMNS
    learned: LearnedTables | None = None
    along: bool = False

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

    Those for learned keys are S times as many: as the keys of each stretch meet them. Of stretches that a query does not see
    they are unset.

    Attributes:
        queries: [T, Hq, D] or [S, T, Hq, D], fp16 in a BF16 model, else fp32.
        gains: [S, T, Hq] fp32, powers of two by which those for learned keys were divided, so that FP16 holds them; None of a
            rotation.
        lacks: [S, T, Hq] fp32, the turned query's product with K's mean; None of a rotation.
    """

    queries: Tensor
    gains: Tensor | None
    lacks: Tensor | None


def unset_queries(
    tokens: int, heads: int, layout: Layout, stretches: int, dtype: torch.dtype, device: torch.device
) -> Rotated:
    """Unset, for queries of a model of this dtype; `stretches` counts for learned keys alone."""
    head_dim = layout.rotation.shape[-1]
    query_dtype = torch.float16 if dtype == torch.bfloat16 else torch.float32
    if not layout.learned:
        return Rotated(torch.empty(tokens, heads, head_dim, dtype=query_dtype, device=device), None, None)
    gains, lacks = (torch.empty(stretches, tokens, heads, dtype=torch.float32, device=device) for _ in range(2))
    return Rotated(torch.empty(stretches, tokens, heads, head_dim, dtype=query_dtype, device=device), gains, lacks)


def stretch_room(batch: Batch, block_size: int) -> int:
    """Stretches of a sequence that a batch's block table has room for.

    Raises:
        InputError: more than there are tables for.
    """
    positions = batch.block_table.shape[1] * block_size
    if positions > MOST_POSITIONS:
        raise InputError(
            f"sequences of up to {positions:,} tokens are longer than learned keys are stored for on a GPU, "
            f"{MOST_POSITIONS:,}; allow fewer tokens, or store K in another format"
        )
    return max(1, -(-positions // STRETCH))


def input_order(head_dim: int, half: int) -> Tensor:
    """The number of a vector in each of the D places of two halves: [D] int64."""
    number = torch.arange(head_dim // 2)
    low = torch.where(number < half, number, number + half)
    return torch.cat([low, torch.where(number < half, number + half, number + head_dim // 2)])


def centroid_words(centroids: Tensor) -> Tensor | None:
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
def to_layout(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Layout:
    """The layout of a format that `READS` takes, its tables on a device; made once. Do not write to it."""
    description = kv_format.description(head_dim)
    assert description is not None, "unsupported() lets formats of rotated levels pass alone"
    return _layout(description, layer, device)


@cache
def into_rotated(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Tensor:
    """What brings vectors into the rotated domain so that the way back is exact: `y = x @ m`, for which `y @ rotation.T = x`.

    It is the rotation itself, but for the rounding of that one's entries to BF16, with which a round trip is off by 3e-3 of
    a vector's length.

    Returns:
        [D, D] fp32, in the kernels' order; made once.
    """
    rotation = to_layout(kv_format, layer, head_dim, torch.device("cpu")).rotation
    inverse: Tensor = torch.linalg.inv(rotation.double().T)
    return inverse.float().contiguous().to(device)


@cache
def _layout(description: Description, layer: int, device: torch.device) -> Layout:
    order = kernel_order(description)
    if description.transform.coordinates:
        return _learned_layout(description, description.transform.coordinates(layer), order, device)
    centroids = numbers_on(description.centroids, device)
    return Layout(
        bits=description.bits,
        rotation=_matrix(description.transform.on(layer, description.head_dim, torch.device("cpu")), order, device),
        centroids=centroids,
        words=centroid_words(centroids),
        boundaries=numbers_on(description.boundaries, device),
        along=description.along,
    )


def _learned_layout(description: Description, coordinates: Coordinates, order: Tensor, device: torch.device) -> Layout:
    assert len(coordinates.gains) == 3, "the kernels try three gains"
    # Keys that nobody knows the turns of are turned by nothing.
    turns = coordinates.rope_shift or RopeShift((0.0,) * (description.head_dim // 2))
    half = len(turns.inv_freq)
    inputs, static_dims = input_order(description.head_dim, half), description.head_dim // 2 - half
    cos, sin = turns.table(MOST_POSITIONS // STRETCH, torch.device("cpu"))
    widths = torch.tensor(eighth_widths(description.columns), dtype=torch.int32).repeat_interleave(
        description.head_dim // EIGHTHS
    )
    return Layout(
        bits=description.bits,
        rotation=_matrix(coordinates.rows.mT[:, inputs], order, device),
        centroids=torch.cat([cubic.centroids(bits) for bits in cubic.WIDTHS]).to(device),
        words=None,
        boundaries=torch.cat([cubic.boundaries(bits) for bits in cubic.WIDTHS]).to(device),
        columns=make_columns(description.columns),
        learned=LearnedTables(
            mean=coordinates.mean[:, inputs].to(device).contiguous(),
            forward=_matrix(coordinates.forward[:, inputs], order, device),
            weights=coordinates.weights[:, order].to(device),
            widths=widths[order].to(device),
            gains=torch.tensor(coordinates.gains, device=device),
            largest=coordinates.rows.abs().amax(1)[:, inputs].to(device),
            cos=torch.nn.functional.pad(cos, (0, static_dims), value=1.0).to(device),
            sin=torch.nn.functional.pad(sin, (0, static_dims)).to(device),
            half=half,
        ),
    )


def _matrix(matrix: Tensor, order: Tensor, device: torch.device) -> Tensor:
    """[..., D, D] bf16, its columns in the kernels' order."""
    permuted = matrix[..., order]
    bf16 = permuted.to(torch.bfloat16)
    assert torch.equal(bf16.float(), permuted), "matrices are of BF16 numbers"
    return bf16.to(device).contiguous()
