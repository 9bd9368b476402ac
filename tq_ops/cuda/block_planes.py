"""Weights in the blocks of GGUF files, reordered for a GPU: each row as planes.

A file has the levels of a block beside its scales, in 18, 34 or 210 bytes that begin anywhere. Here a row of n blocks of 32
numbers, or of n/8 blocks of 256, is

    codes     the lower four bits of each level: byte i of a block's 16 has numbers i and 16 + i. Q8_0: 32 signed bytes
    high      bits above them, one or two of each level, number after number
    scales    whole numbers that the halves below are multiplied with, a byte a block of 32, or of 16 in Q6_K
    minima    the same of minima
    d, m      FP16 of each block

so codes begin at multiples of 16 bytes, and the threads of a warp read adjacent bytes. Scales of six bits take a byte:
148 bytes in place of 144 for Q4_K, 180 in place of 176 for Q5_K; other types take their bytes of the file.

    number i of block b = D[b] * (level[b][i] - shift) + M[b];  D = d * scale, M = m, or -(m * minimum)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.block_levels import GROUP, q4_lower_bits, q5_fifth_bits, q6_bits, six_bits
from haarkv.tq_ops.formats.packing import pack_parts, pack_stream
from haarkv.tq_ops.weight import Blocks, BlockType, Weight, dense

BLOCK = GROUP
"""Numbers of a block, or of an eighth of one of 256."""
_CHUNK = 2**24  # bytes that are reordered at a time


@dataclass(frozen=True)
class Planes:
    """How one type lies in planes.

    Attributes:
        low: bits of a level in `codes`: 4, or 8 of signed bytes.
        high: bits of a level in `high`: 0, 1 or 2.
        shift: subtracted from levels.
        scales: bytes of `scales` of 32 numbers: 0, 1 or 2; two are signed, of 16 numbers each.
        minimum: whether there are minima.
        together: blocks of 32 that share d and m: 1 or 8.
        numbers, nbytes: of a whole block, in planes.
    """

    low: int = 4
    high: int = 0
    shift: int = 0
    scales: int = 0
    minimum: bool = False
    together: int = 1

    @property
    def numbers(self) -> int:
        return self.together * BLOCK

    @property
    def nbytes(self) -> int:
        block_bytes = BLOCK // 8 * (self.low + self.high) + self.scales * (1 + self.minimum)
        return self.together * block_bytes + 2 * (1 + self.minimum)

    def places(self, blocks: int) -> tuple[int, int, int, int, int]:
        """Offsets of `high`, `scales`, `minima`, d and m within a row of `blocks` blocks of 32, in bytes."""
        high = blocks * BLOCK // 8 * self.low
        scales = high + blocks * BLOCK // 8 * self.high
        minima = scales + blocks * self.scales
        d = minima + blocks * self.scales * self.minimum
        return high, scales, minima, d, d + 2 * (blocks // self.together)


PLANES = {
    "Q8_0": Planes(low=8), "Q4_0": Planes(shift=8), "Q4_1": Planes(minimum=True),
    "Q5_0": Planes(high=1, shift=16), "Q5_1": Planes(high=1, minimum=True),
    "Q4_K": Planes(scales=1, minimum=True, together=8), "Q5_K": Planes(high=1, scales=1, minimum=True, together=8),
    "Q6_K": Planes(high=2, shift=32, scales=2, together=8),
}  # fmt: skip
"""By the type of the file."""


@dataclass(frozen=True, eq=False)
class PlaneBlocks(Blocks):
    """A weight [out, in] in planes; `data` is [out, bytes of a row] uint8."""

    planes: Planes = PLANES["Q8_0"]

    def rows(self, index: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `Blocks.rows`, in one launch."""
        from haarkv.tq_ops.cuda.block_products import gather_rows

        numbers = torch.arange(len(self), device=self.device)[index] if isinstance(index, slice) else index
        return gather_rows(self, numbers, dtype or self.dtype)


def placed(weight: Weight, device: torch.device) -> Tensor | PlaneBlocks:
    """A weight on a device, its blocks in planes, in new memory, or restored where `PLANES` lacks their type."""
    if isinstance(weight, Blocks) and not isinstance(weight, PlaneBlocks):
        return by_planes(weight, device) if weight.type.name in PLANES else dense(weight).to(device)
    return weight if weight.device == device else weight.to(device)


def by_planes(weight: Blocks, device: torch.device) -> PlaneBlocks:
    """A weight of a type in `PLANES` on a device, in planes, in new memory."""
    planes = PLANES[weight.type.name]
    blocks = weight.shape[1] // BLOCK
    data = torch.empty(len(weight), blocks // planes.together * planes.nbytes, dtype=torch.uint8, device=device)
    step = max(1, _CHUNK // weight.data.shape[1])
    for at in range(0, len(weight), step):
        chunk = weight.data[at : at + step].to(device)
        data[at : at + step] = _in_planes(chunk.view(len(chunk), -1, weight.type.nbytes), weight.type.name)
    rows, columns = (scales if scales is None else scales.to(device) for scales in (weight.row_scales, weight.column_scales))
    return PlaneBlocks(data, _plane_type(weight.type.name), weight.dtype, rows, columns, planes=planes)


@cache
def _plane_type(name: str) -> BlockType:
    return BlockType(f"{name} in planes", PLANES[name].numbers, PLANES[name].nbytes, _restore_planes)


def _restore_planes(rows: Tensor) -> Tensor:
    raise NotImplementedError("a kernel restores planes")


_FILE_BYTES = {
    "Q8_0": ((2, None), (0, 2)), "Q4_0": ((2, None), (0, 2)), "Q4_1": ((4, None), (0, 2), (2, 4)),
    "Q5_0": ((6, None), (2, 6), (0, 2)), "Q5_1": ((8, None), (4, 8), (0, 2), (2, 4)),
}  # fmt: skip
"""Where a file's block has the parts of a row, in the order of planes."""


def _in_planes(blocks: Tensor, name: str) -> Tensor:
    """[R, blocks, bytes] as the file has them -> [R, bytes of planes]."""
    if name in _FILE_BYTES:
        parts = [blocks[..., begin:end] for begin, end in _FILE_BYTES[name]]
    elif name == "Q6_K":
        lower, upper = q6_bits(blocks)
        parts = [pack_parts(lower, 4), pack_stream(upper, 2), blocks[..., 192:208], blocks[..., 208:]]
    else:
        lower = q4_lower_bits(blocks, 16 if name == "Q4_K" else 48)
        high = [] if name == "Q4_K" else [pack_stream(q5_fifth_bits(blocks), 1)]
        parts = [pack_parts(lower, 4), *high, *six_bits(blocks), blocks[..., :2], blocks[..., 2:4]]
    return torch.cat([part.flatten(1) for part in parts], 1)
