"""Formats that the kernels know one by one: how what is stored becomes numbers, and numbers what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu.library import Cell
from haarkv.tq_ops.formats import PUBLISHED, KVFormat, Side, manthan
from haarkv.tq_ops.formats.ggml import RotatedBlockQ4
from haarkv.tq_ops.formats.hadamard import HadamardTQ3
from haarkv.tq_ops.formats.turboquant import codebook_on

_HOST = torch.device("cpu")
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Known:
    """How the kernels read and write a format that is none of rotated levels.

    Attributes:
        cell: how its codes lie.
        codes, scale, zero: names of its fields; "" of one that it has not.
        bits: of a level, where levels are a stream.
        group: tokens that are stored together.
        table: head_dim -> the number that each level stands for, fp32; None where the codes are numbers.
        back: head_dim -> [D, D] fp32, the vector of the model's own domain that each stored coordinate stands for, a row;
            None where vectors are not rotated.
        restore: (layer, head_dim) -> [D, D] fp32 of BF16 numbers, likewise, where each vector is rotated back by itself.
        most: the append kernel stores vectors without a larger number, and leaves others to the reference; None where the
            reference stores all.
    """

    cell: Cell
    codes: str = "codes"
    scale: str = ""
    zero: str = ""
    bits: int = 0
    group: int = 1
    table: Callable[[int], Tensor] | None = None
    back: Callable[[int], Tensor] | None = None
    restore: Callable[[int, int], Tensor] | None = None
    most: float | None = None

    def numbers(self, head_dim: int) -> Tensor | None:
        """The table, as often one after the other as 16 numbers have room for: registers of 16 are loaded."""
        if self.table is None:
            return None
        table = self.table(head_dim)
        return table.repeat(16 // len(table))


def _whole(first: int, last: int, _head_dim: int) -> Tensor:
    return torch.arange(first, last + 1, dtype=torch.float32)


def _centroids(head_dim: int) -> Tensor:
    return codebook_on(head_dim, _HOST).centroids


def _tq3_0_back(head_dim: int) -> Tensor:
    return HadamardTQ3().rotate_back(torch.eye(head_dim))


def _seed_back(layer: int, head_dim: int) -> Tensor:
    return PUBLISHED.transform.on(layer, head_dim, _HOST).T


def _q4_0_rot(side: Side) -> Iterator[tuple[KVFormat, Known]]:
    rotated = RotatedBlockQ4(whole=side == "k")
    yield (
        formats.get("q4_0_rot", side),
        Known(
            Cell.HALVES, scale="scale", table=partial(_whole, -8, 7), back=lambda head_dim: rotated.rotate(torch.eye(head_dim))
        ),
    )


def _kivi() -> Iterator[tuple[KVFormat, Known]]:
    """A scale overflows where a range does: from half of the largest number on."""
    for bits in (2, 4):
        for name in (f"kivi{bits}", f"kivi{bits}_g64", f"kivi{bits}_g128"):
            keys, values = formats.get(name, "k"), formats.get(name, "v")
            given = {"scale": "scale", "zero": "zero", "bits": bits, "most": _LARGEST / 2}
            table = partial(_whole, 0, 2**bits - 1)
            yield keys, Known(Cell.CHANNELS, **given, table=table, group=keys.group_tokens)
            yield values, Known(Cell.STREAM, **given, table=table)


KNOWN: dict[KVFormat, Known] = {
    formats.get("bf16"): Known(Cell.BF16, "data", most=torch.inf),
    formats.get("fp32"): Known(Cell.FP32, "data", most=torch.inf),
    formats.get("q8_0"): Known(Cell.INT8, scale="scale", most=127 * _LARGEST_HALF),
    formats.get("q4_0"): Known(Cell.HALVES, scale="scale", table=partial(_whole, -8, 7), most=8 * _LARGEST_HALF),
    formats.get("fp8_e4m3"): Known(Cell.FP8, most=_LARGEST),
    formats.get("tq3_0"): Known(
        Cell.STREAM, scale="gamma", bits=2, table=lambda _: torch.tensor(HadamardTQ3.centroids), back=_tq3_0_back
    ),
    formats.get("manthan3"): Known(Cell.STREAM, scale="radius", bits=3, table=lambda d: manthan.centroids_on(d, _HOST)),
    PUBLISHED: Known(Cell.RESTORED, scale="norm", table=_centroids, restore=_seed_back),
    **dict(_q4_0_rot("k")), **dict(_q4_0_rot("v")), **dict(_kivi()),
}  # fmt: skip
"""Each by itself: another object is another format, even of the same class."""
