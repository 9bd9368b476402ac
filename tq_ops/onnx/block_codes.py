"""Weights in the blocks of GGUF files as ONNX Runtime's `MatMulNBits` takes them: codes of four bits, and FP32 scales.

Its CPU kernel restores codes of four bits with whole zero points in registers; otherwise it restores the whole matrix at each
product. So levels of more bits lie in two matrices of codes with the same scales, and minima meet the sums of each group of x:

    level  = centre + lower - 8 + 16 * (upper - 8)          lower - 0 of Q8_0, whose levels fill all bits
    number = scale * (level - centre) + (minimum + centre * scale)

The centre, the middle of levels that begin at 0, leaves little for the minima, so that sums do not cancel. Levels and scales
are exact. A minimum is rounded to FP32 once, as gguf rounds each number, and has no rounding where it fits 24 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.tq_ops.block_levels import GROUP, unpack_levels
from haarkv.tq_ops.formats.packing import pack_stream
from haarkv.tq_ops.weight import Blocks

MIDDLE = 8
"""The operator's zero point of four bits."""
_BYTES = 2**20  # of blocks at a time


@dataclass(frozen=True)
class Codes:
    """How weights of one type lie in codes.

    Attributes:
        type: of the file's blocks.
        group: numbers that share a scale.
        zero: subtracted from lower codes.
        centre: subtracted from levels where there are minima.
        upper, minimum, columns: there are upper codes, minima of groups, scales of columns.
    """

    type: str
    group: int = GROUP
    zero: int = MIDDLE
    centre: int = 0
    upper: bool = False
    minimum: bool = False
    columns: bool = False

    @property
    def name(self) -> str:
        """One name for all that share a scope."""
        return self.type + "_columns" * self.columns

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The tensors of a weight, by name: dtype and shape."""
        groups = inputs // self.group
        codes, scales = (torch.uint8, (outputs, groups, self.group // 2)), (torch.float32, (outputs, groups))
        tensors = {"lower": codes, "scale": scales}
        if self.upper:
            tensors["upper"] = codes
        if self.minimum:
            tensors["minimum"] = scales
        if self.columns:
            tensors["columns"] = (torch.float32, (inputs,))
        return tensors

    @property
    def bytes_in_memory(self) -> float:
        """Of a number, twice, as ONNX Runtime packs codes and copies scales; without scales of columns."""
        return 2 * ((1 + self.upper) / 2 + 4 * (1 + self.minimum) / self.group)


_CODE_TYPES = (
    Codes("Q8_0", zero=0, upper=True), Codes("Q4_0"), Codes("Q4_1", centre=8, minimum=True), Codes("Q5_0", upper=True),
    Codes("Q5_1", centre=16, upper=True, minimum=True), Codes("Q4_K", centre=8, minimum=True),
    Codes("Q5_K", centre=16, upper=True, minimum=True), Codes("Q6_K", group=GROUP // 2, upper=True),
    Codes("IQ4_NL", upper=True), Codes("MXFP4", upper=True),
)  # fmt: skip
CODES = {codes.type: codes for codes in _CODE_TYPES}


def weight_codes(weight: Blocks) -> Codes:
    """The codes of a weight of a type in `CODES`."""
    return replace(CODES[weight.type.name], columns=weight.column_scales is not None)


def in_codes(weight: Blocks) -> dict[str, Tensor]:
    """A weight on the host as new tensors of `Codes.parts`."""
    codes = weight_codes(weight)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in codes.parts(*weight.shape).items()}
    step = max(1, _BYTES // weight.data.shape[1])
    for at in range(0, len(weight), step):
        chunk, rows = weight.data[at : at + step], slice(at, at + step)
        levels = unpack_levels(chunk.view(len(chunk), -1, weight.type.nbytes), weight.type.name)
        code = levels.level.to(torch.int16) + (codes.zero - codes.centre)
        tensors["lower"][rows] = pack_stream((code & 15).to(torch.uint8), 4)
        if codes.upper:
            tensors["upper"][rows] = pack_stream(((code >> 4) + MIDDLE).to(torch.uint8), 4)
        tensors["scale"][rows] = levels.scale
        if levels.minimum is not None:
            tensors["minimum"][rows] = levels.minimum + codes.centre * levels.scale
    if weight.row_scales is not None:
        for name in {"scale", "minimum"} & tensors.keys():
            tensors[name] *= weight.row_scales.float().unsqueeze(-1)
    if weight.column_scales is not None:
        tensors["columns"].copy_(weight.column_scales)
    return tensors
