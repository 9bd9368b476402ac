"""How stored fields stand for numbers, coordinate by coordinate, in formats that are not of rotated levels.

What such a format says of itself, as `Description` is what those of rotated levels say. A backend declares which kinds its
kernels read (`tq_ops.kv.reads`), and none asks for a format's name or class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class Kind(Enum):
    """How the codes of a vector lie, and by which rule a vector becomes such codes."""

    BF16 = "BF16 numbers, as they are"
    FP32 = "FP32 numbers, as they are"
    INT8 = "signed bytes: scale = max |x| / 127 to FP16, code = round(x * (1 / (max |x| / 127))), ties away from zero"
    RESTORED = "a byte a level: x = bf16(bf16(c[level] / sqrt(sum c[level]**2 + least) * scale) @ back)"


@dataclass(frozen=True)
class Exact:
    """A vector is stored by the rule of its `Kind`, each FP32 operation rounded by itself: the bytes are the same everywhere.

    Attributes:
        largest: none is refused of vectors of which no number is larger.
    """

    largest: float


@dataclass(frozen=True, eq=False)
class Numbers:
    """Each coordinate is `table[code] * scale`, a vector of the model's own domain `numbers @ back`.

    Attributes:
        kind: how the codes lie.
        codes, scale: names of the stored fields; "" of one that there is not.
        table: the number that each level stands for; () where the codes are numbers.
        back: layer -> [D, D] fp32 on the CPU, what each coordinate stands for, a row; None where nothing is rotated.
        per_layer: whether layers differ in that.
        least: of the kind RESTORED, added to a square.
        exact: how vectors are stored; None if no data says it.
    """

    kind: Kind
    codes: str = "codes"
    scale: str = ""
    table: tuple[float, ...] = ()
    back: Callable[[int], Tensor] | None = None
    per_layer: bool = False
    least: float = 0.0
    exact: Exact | None = None
