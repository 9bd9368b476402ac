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
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.packing import Column, eighth_widths, planes
from haarkv.tq_ops.formats.rotated import Coordinates, Description, numbers_on
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, RopeShift
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.kv.kernel_support import KernelSupport


def kernel_order(description: Description) -> Tensor:
    """[D] int64, the coordinate in each column: those of the kernel's low half, then of its high half (`cuda.planes`)."""
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
    """Columns of learned keys' levels as kernels are compiled for them; empty of planes.

    Attributes:
        units: of each column: bytes of a unit, its begin in D / 8 bytes, its first of the eight parts, and its parts.
        parts: shift and bits of each part.
    """

    units: tuple[tuple[int, int, int, int], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()


def make_columns(columns: tuple[Column, ...]) -> Columns:
    """A description's columns for kernels."""
    units, begin, first = [], 0, 0
    for one in columns:
        units.append((one.nbytes, begin, first, len(one.parts)))
        begin, first = begin + one.nbytes, first + len(one.parts)
    return Columns(tuple(units), tuple((part.shift, part.bits) for one in columns for part in one.parts))


READS = KernelSupport(
    "the GPU kernels", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), bf16_tokens=True, windows=True, learned=True
)
NO_FAULT = 2**63 - 1
"""A fault's value while there is none."""
STATE = 0xFFFF
"""In place of a fault's KV head: no version of a recurrent state has seen the tokens before."""


def fault_place(key: int) -> tuple[int, str, int, int]:
    """Layer, side ("K", "V" or "state"), token of the batch and KV head of a fault."""
    head = key & 0xFFFF
    return key >> 49, "state" if head == STATE else "KV"[(key >> 48) & 1], (key >> 16) & 0xFFFFFFFF, head


class LearnedTables(NamedTuple):
    """What learned keys have beside a rotation, coordinates in the kernels' order, numbers in `input_order` (`rotate.places`).

    Attributes:
        mean: [H, D] fp32.
        forward: [H, D, D] bf16.
        weights: [H, D] fp32.
        widths: [D] int32, bits of each coordinate's level.
        gains: [3] fp32.
        largest: [H, D] fp32, of each row of the rotation its largest number's size.
        cos, sin: [MOST_POSITIONS / STRETCH, D/2] fp32, where a stretch begins.
        half: RoPE turns numbers i and i + half together.
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
    """A format of 2 to 8 bits a level, or learned keys; one FP16 scale a vector. Levels are in `kernel_order`.

    Attributes:
        bits: of a level; the mean of learned keys.
        rotation: [D, D] bf16, `y = x @ rotation` in the kernels' order. Of learned keys [H, D, D], by which queries are
            multiplied, its rows in `input_order`.
        centroids: [2**bits] fp32; of learned keys those of 1 bit, of 2 bits, and so on to 6.
        words: of `centroid_words`.
        boundaries: [2**bits - 1] fp32, ascending; of learned keys likewise of each width.
        columns: of learned keys; empty where levels lie in planes.
        learned: None of a rotation.
        along: of `Description`.
    """

    bits: int
    rotation: Tensor
    centroids: Tensor
    words: Tensor | None
    boundaries: Tensor
    columns: Columns
    learned: LearnedTables | None = None
    along: bool = False

    @property
    def matrices(self) -> int:
        """1, or H where every KV head has its own."""
        return self.rotation.shape[0] if self.learned else 1

    @property
    def forward(self) -> Tensor:
        """The matrix for K or V before levels are chosen."""
        return self.learned.forward if self.learned else self.rotation


def stretch_room(batch: Batch, block_size: int) -> int:
    """Stretches of a sequence that a batch's block table has room for; InputError if there are tables for fewer."""
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
    """What `lookup` permutes: int32, high bytes of FP16 centroids, then low bytes. Of 16 centroids: of the upper eight, then
    four bytes 0x40, an FP16 sign bit shifted right by one.

    None of more than 16, or of 16 that are not antisymmetric. Not compiled in as constants: the compiler would load them at
    every use.
    """
    half = centroids.to(torch.float16)
    if len(half) > 16 or (len(half) == 16 and not torch.equal(half[:8].flip(0), -half[8:])):
        return None
    sign = torch.full((4 * (len(half) == 16),), 0x40, dtype=torch.uint8, device=centroids.device)
    low, high = half[-8:].view(torch.uint8).view(-1, 2).unbind(-1)
    return torch.cat([high, low, sign]).view(torch.int32)


def both_layouts(at: LayerView, device: torch.device) -> tuple[Layout, Layout]:
    """`to_layout` of a layer's K and V."""
    k, v = (to_layout(kv_format, at.layer, at.kv.shape.head_dim, device) for kv_format in at.kv.formats)
    return k, v


@cache
def to_layout(kv_format: KVFormat, layer: int, head_dim: int, device: torch.device) -> Layout:
    """The layout of a format that `READS` takes, its tables on a device; cached, so do not write to it."""
    description = kv_format.description(head_dim)
    assert description is not None, "unsupported() lets formats of rotated levels pass alone"
    order = kernel_order(description)
    if description.transform.coordinates:
        return _learned_layout(description, description.transform.coordinates(layer), order, device)
    centroids = numbers_on(description.centroids, device)
    return Layout(
        bits=description.bits,
        rotation=_matrix(description.transform.on(layer, head_dim, torch.device("cpu")), order, device),
        centroids=centroids,
        words=centroid_words(centroids),
        boundaries=numbers_on(description.boundaries, device),
        columns=make_columns(description.columns),
        along=description.along,
    )


def _learned_layout(description: Description, coordinates: Coordinates, order: Tensor, device: torch.device) -> Layout:
    assert len(GAINS) == 3, "the kernels try three gains"
    # Keys of unknown turns are not turned.
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
            gains=torch.tensor(GAINS, device=device),
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
