"""How vectors become bytes where every rounding is fixed, as data: whoever follows it stores the very bytes of the format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """How levels, kept as a stream of bits, and a scale come of a block. Sums of squares are rounded after each addition.

    LENGTH has 16 levels; the others have as many as `Numbers.bits` says.
    """

    LARGEST = "d = max |y| / constant; level = #{b : y * (1 / d) >= b}; sign = (y - c[level] * d >= 0); scale = fp16(d)"
    LENGTH = "r = ||x||, 0 up to constant; y of x * (1 / r); level = #{b : y >= b}; scale = fp16(r / ||c[level]||)"
    RADIUS = "r = ||x||, its squares summed in pairs; level = #{b : x / (r + constant) * sqrt(D) > b}; scale = r"


@dataclass(frozen=True)
class Walsh:
    """`y = WHT(before * x) * factor * after` of every `size` numbers, neighbours first, each operation rounded to FP32.

    Attributes:
        size: a power of two.
        before, after: [size] each 1 or -1; () of ones.
    """

    size: int
    factor: float
    before: tuple[float, ...] = ()
    after: tuple[float, ...] = ()


@dataclass(frozen=True)
class Exact:
    """How a vector is stored by FP32 operations in a fixed order, each rounded by itself.

    Attributes:
        largest: none is refused of vectors of which no number is larger.
        rule: None of a format that is stored by the rule of its `Kind`.
        constant: of the rule.
        boundaries, centroids: of the rule, ascending.
        walsh: what y is of x, in Kind's rules too; None where y is x.
        signs: name of the stored field that holds `sign`; "" where there is none.
    """

    largest: float
    rule: Rule | None = None
    constant: float = 0.0
    boundaries: tuple[float, ...] = ()
    centroids: tuple[float, ...] = ()
    walsh: Walsh | None = None
    signs: str = ""
