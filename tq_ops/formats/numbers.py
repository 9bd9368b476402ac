"""How stored fields stand for numbers, coordinate by coordinate, in formats that are not of rotated levels.

What such a format says of itself, as `Description` is what those of rotated levels say. A backend declares which kinds its
kernels read (`tq_ops.kv.reads`), and none asks for a format's name or class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from haarkv.tq_ops.formats.exact import Exact


class Kind(Enum):
    """How the codes of a vector lie, and by which rule a vector becomes such codes where `Numbers.exact` names no other."""

    BF16 = "BF16 numbers, as they are"
    FP32 = "FP32 numbers, as they are"
    FP8 = "E4M3 numbers, rounded ties to even, saturating at 448"
    INT8 = "signed bytes: scale = max |x| / 127 to FP16, code = round(x * (1 / (max |x| / 127))), ties away from zero"
    HALVES = "byte j of a scale's part holds levels j of its first half and of its second; level = trunc(x * (1 / d) + 8.5)"
    STREAM = "a stream of bits, the least first: scale = (max - min) / (2**bits - 1) + 1e-10, zero = min"
    CHANNELS = "the same of each coordinate by itself, over the tokens of a group"
    RESTORED = "a byte a level: x = bf16(bf16(c[level] / sqrt(sum c[level]**2 + least) * scale) @ back)"


@dataclass(frozen=True, eq=False)
class Numbers:
    """Each coordinate is `table[code] * scale + zero`, a vector of the model's own domain `numbers @ back`.

    Attributes:
        kind: how the codes lie.
        codes, scale, zero: names of the stored fields; "" of one that there is not.
        bits: of a level, where levels are a stream.
        group: tokens that are stored together.
        table: the number that each level stands for; () where the codes are numbers.
        back: layer -> [D, D] fp32 on the CPU, what each coordinate stands for, a row; None where nothing is rotated.
        per_layer: whether layers differ in that.
        least: of the kind RESTORED, added to a square.
        exact: how vectors are stored; None if no data says it.
    """

    kind: Kind
    codes: str = "codes"
    scale: str = ""
    zero: str = ""
    bits: int = 0
    group: int = 1
    table: tuple[float, ...] = ()
    back: Callable[[int], Tensor] | None = None
    per_layer: bool = False
    least: float = 0.0
    exact: Exact | None = None
