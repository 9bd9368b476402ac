"""Learned keys as the programs take them: their coordinates, and how levels lie. No PyPTO here.

What differs between layers and heads is data, so one program serves every layer; a format's columns are built into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.packing import Column, eighth_widths
from haarkv.tq_ops.formats.rotated import Coordinates

MEAN, WEIGHTS, LIFT, SHARED = range(4)
"""Order of the rows of `numbers`: H means, weights and lifts, then `LEVEL_ROWS`, which all heads share."""
TRIES = len(GAINS)
"""Sizes at which a vector is tried: a row of `numbers` repeats itself so often."""
SPAN = 8.0
"""What the levels of a coordinate span in a program before they become centroids. FP16 holds its cube."""
_BYTE = 8
_MOST_ROWS = 64  # of a part, of 128 tokens
_POWERS = 4
_HEADROOM = 256.0
"""How many times its typical size the product of a row with a query of length 1 may be, before it exceeds 1."""


def learned_coordinates(kv_format: KVFormat, head_dim: int, layer: int) -> Coordinates | None:
    """Learned coordinates of a format in a layer, None for a fixed format."""
    description = kv_format.description(head_dim)
    coordinates = description.transform.coordinates if description else None
    return coordinates(layer) if coordinates else None


# -- How levels lie --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """`bits` of an eighth's level in one byte, from bit `shift` on; of `whole` bits in both bytes that share it."""

    eighth: int
    bits: int
    shift: int
    whole: int


@dataclass(frozen=True)
class Layout:
    """The columns of a format, as a program unpacks them. Widths descend by eighth; units of the last column are bytes."""

    columns: tuple[Column, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bits of a level of each eighth."""
        return eighth_widths(self.columns)

    def nbytes(self, head_dim: int) -> int:
        """Bytes of a vector's codes."""
        return head_dim // EIGHTHS * sum(column.nbytes for column in self.columns)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of each eighth, rows of a tile between its units: the bytes of a unit. Rows between are not used."""
        by_eighth = {part.eighth: column.nbytes for column in self.columns for part in column.parts}
        return tuple(by_eighth[eighth] for eighth in range(EIGHTHS))

    def width(self, head_dim: int) -> int:
        """Rows of a tile."""
        return head_dim // EIGHTHS * sum(self.strides)

    def rows(self, head_dim: int) -> Tensor:
        """[D] int64, the row of each coordinate in a tile."""
        units = torch.arange(head_dim // EIGHTHS)
        parts, first = [], 0
        for stride in self.strides:
            parts.append(first + stride * units)
            first += stride * len(units)
        return torch.cat(parts)

    def parts(self, head_dim: int) -> tuple[tuple[int, ...], ...]:
        """Eighths that become centroids together: of one width, and few enough for the unified buffer."""
        parts: list[list[int]] = []
        most = _MOST_ROWS // (head_dim // EIGHTHS)
        for eighth in range(EIGHTHS):
            last = parts[-1] if parts else []
            room = most - sum(self.strides[other] for other in last)
            if last and self.widths[last[0]] == self.widths[eighth] and self.strides[eighth] <= room:
                last.append(eighth)
            else:
                parts.append([eighth])
        return tuple(map(tuple, parts))

    @cached_property
    def lower_pieces(self) -> tuple[Piece, ...]:
        """The lower parts of levels that two bytes share."""
        all_pieces = (piece for column in self.columns for byte in pieces(column) for piece in byte)
        return tuple(piece for piece in all_pieces if piece.bits < piece.whole and piece.shift)


def pieces(column: Column) -> list[list[Piece]]:
    """The pieces in each byte of a column's unit, from the lowest bits on."""
    byte_pieces: list[list[Piece]] = [[] for _ in range(column.nbytes)]
    for part in column.parts:
        at, end = part.shift, part.shift + part.bits
        while at < end:
            byte, shift = divmod(at, _BYTE)
            bits = min(end - at, _BYTE - shift)
            byte_pieces[byte].append(Piece(part.eighth, bits, shift, part.bits))
            at += bits
    return byte_pieces


# -- Centroids ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cubic:
    """A restored centroid: `factor * u * (u**2 + rise)`, where levels u lie `SPAN / 2**bits` apart, about 0."""

    factor: float
    rise: float


def level_cubic(bits: int) -> Cubic:
    """The cubic of a width. With 1 bit many go through the two centroids."""
    a, b = cubic.FACTORS[bits]
    if b == 0:
        b = a / 16
        a -= b
    unit = SPAN / 2 ** (bits + 1)
    return Cubic(b / unit**3, a / b * unit**2)


# -- What a program takes ----------------------------------------------------------------------------------------------------


LEVEL_ROWS = ("shrink", "inverse0", "inverse1", "inverse2", "inverse3", "linear", "cubed", "most", "a", "b", "upper")
"""Order of the rows of `numbers` by which a program chooses levels of values v, a number a coordinate.

    s = clip(v * shrink, -1, 1);  k = round(s * (inverse0 + inverse1 * s**2 + inverse2 * s**4 + inverse3 * s**6))
    j = k + (v >= k * (linear + cubed * k**2));  level = j + most;  centroid = m * (a + b * m**2), m = 2 j - 1

Boundaries are k = -most ... most. The rounded k is the one next to v or the next but one, which the comparison then settles.
`upper` is 2**-r of a level whose lower r bits lie in another byte than its upper ones, 0 of any other.
"""


def level_rows(layout: Layout, head_dim: int) -> Tensor:
    """[len(LEVEL_ROWS), D] fp32."""
    eighths = torch.tensor([_level_numbers(bits) for bits in layout.widths], dtype=torch.float64).T
    upper = torch.zeros(1, EIGHTHS, dtype=torch.float64)
    for piece in layout.lower_pieces:
        upper[0, piece.eighth] = 2.0**-piece.bits
    return torch.cat([eighths, upper]).repeat_interleave(head_dim // EIGHTHS, 1).float()


@cache
def _level_numbers(bits: int) -> tuple[float, ...]:
    """The `LEVEL_ROWS` of one width, without `upper`. The inverse is off by a quarter of a level at most; half would do."""
    a, b = cubic.FACTORS[bits]
    most = 2 ** (bits - 1) - 1
    # The middle of m = 2 k - 1 and m = 2 k + 1.
    linear, cubic_term = 2 * (a + 3 * b), 8 * b
    if not most:
        return (0.0,) * (1 + _POWERS) + (linear, cubic_term, 0.0, a, b)
    top = most * (linear + cubic_term * most**2)
    k = most * np.sin(np.linspace(0, np.pi / 2, 400)[1:])  # dense at the end, where the curve bends most
    s = k * (linear + cubic_term * k**2) / top
    inverse = np.linalg.lstsq(np.stack([s ** (2 * i + 1) for i in range(_POWERS)], 1), k, rcond=None)[0]
    return (1 / top, *inverse.tolist(), linear, cubic_term, float(most), a, b)


def byte_places(layout: Layout, head_dim: int) -> Tensor:
    """[D or 2 D, bytes] fp16: levels (and their upper parts, where there are any) times this matrix are bytes."""
    units = head_dim // EIGHTHS
    places = torch.zeros(2, EIGHTHS, units, layout.nbytes(head_dim))
    unit, first = torch.arange(units), 0
    for column in layout.columns:
        for byte, byte_pieces in enumerate(pieces(column)):
            at = first + unit * column.nbytes + byte
            for piece in byte_pieces:
                lower = piece in layout.lower_pieces
                if lower or piece.bits == piece.whole:
                    places[0, piece.eighth, unit, at] = 2.0**piece.shift
                if lower or piece.bits < piece.whole:
                    # The upper byte's part, which the lower byte must not hold.
                    places[1, piece.eighth, unit, at] = -(2.0**_BYTE) if lower else 1.0
        first += units * column.nbytes
    return places[: 2 if layout.lower_pieces else 1].view(-1, layout.nbytes(head_dim)).half()


@cache
def domain_tensors(kv_format: KVFormat, head_dim: int, layer: int, device: torch.device) -> dict[str, Tensor]:
    """A layer's learned coordinates as a program takes them; the same tensors each time.

    Returns:
        forward: [H * D, D] bf16.
        numbers: [3 * H + 11, TRIES * D] fp32: means, weights, lifts (each the same in all columns), and `LEVEL_ROWS`.
        places: `byte_places`.
        rows: [H * width, D] fp32, by rows of a tile, each coordinate times its centroids' factor, over the head's `_lifts`.
    """
    coordinates = learned_coordinates(kv_format, head_dim, layer)
    assert coordinates is not None, f"{kv_format.name} has no learned coordinates"
    layout = learned_layout(kv_format, head_dim)
    factors = torch.tensor([level_cubic(bits).factor for bits in layout.widths]).repeat_interleave(head_dim // EIGHTHS)
    rows = torch.zeros(len(coordinates.rows), layout.width(head_dim), head_dim)
    rows[:, layout.rows(head_dim)] = coordinates.rows * factors.unsqueeze(-1)
    lift = _lifts(coordinates, rows, factors).unsqueeze(1)
    tensors = {
        "forward": coordinates.forward.flatten(0, 1).to(torch.bfloat16),
        "numbers": torch.cat(
            [coordinates.mean, coordinates.weights, lift.expand(-1, head_dim), level_rows(layout, head_dim)]
        ).repeat(1, TRIES),
        "places": byte_places(layout, head_dim),
        "rows": (rows / lift.unsqueeze(-1)).flatten(0, 1),
    }
    return {name: tensor.to(device).contiguous() for name, tensor in tensors.items()}


def _lifts(coordinates: Coordinates, rows: Tensor, factors: Tensor) -> Tensor:
    """[H] fp32, powers of two by which queries by rows [H, width, D] are divided, so that FP16 holds them.

    At most the longest row, and `_HEADROOM` times the typical product: rows are very long where queries hardly have numbers.
    E[q q^T] is F diag(weights) F^T, F being `forward`: a query as long as its trace's root meets row i with sqrt(weights[i]).
    """
    length = (coordinates.forward.square() * coordinates.weights.unsqueeze(1)).sum((1, 2)).sqrt()
    typical = (coordinates.weights.sqrt() * factors).amax(1) / length
    most = torch.minimum(rows.norm(dim=-1).amax(1), _HEADROOM * typical)
    return torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent)


def learned_layout(kv_format: KVFormat, head_dim: int) -> Layout:
    """How the levels of a learned format lie."""
    description = kv_format.description(head_dim)
    assert description is not None, f"{kv_format.name} has no learned coordinates"
    return Layout(description.columns)
