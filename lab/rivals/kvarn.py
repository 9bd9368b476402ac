"""KVarN: tiles of 128 tokens, rotated by a Hadamard transform, with a scale for each row and each column.

Written here after Müller et al. (arXiv 2606.03458) and the public code of its authors (huawei-csl/KVarN); none of their bytes
were compared.

- Theirs: the rotation over head_dim, without signs; tiles of 128 tokens of one KV head; how a tile is balanced, with its
  limits and 16 rounds; levels from the least to the largest number of a row, K by channel and V by token; what is folded into
  the FP16 scales. They keep the first 128 tokens and those of an unfinished tile in FP16: here `tail=127, sink=128`, in BF16.
- Assumed here: of rounds that are equally good up to 1e-9 the first wins, where theirs is the last. A tile that is even stays
  so while columns grow and rows shrink, so the rest would be decided by rounding. For the same reason a tile is balanced in
  FP64; theirs is FP32.
- Silent: their kernels are made for two and four bits. Three are one bit stream here, as those are.
- K and V have bits of their own: their `k4v2` is `k=kvarn4,v=kvarn2`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import fwht
from haarkv.tq_ops.formats.base import Field, KVFormat, Part, require_finite
from haarkv.tq_ops.formats.compared import to_fp16
from haarkv.tq_ops.formats.packing import pack_stream, unpack_stream

TOKENS = 128
ROUNDS = 16
_DEVIATIONS = (1e-3, 1e3)
_LOGARITHMS = (-0.3, 10.0)
_LEAST_STEP = 1e-10
_LEAST_DEVIATION = 1e-8
_NO_BETTER = 1 - 1e-9


def balance(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of columns and rows that make their standard deviations even.

        16 times:  log c += log std of each column of tile / c / r;  log r += log std of each row of tile / c / r
        imbalance = largest / least std of the columns, plus the same of the rows

    Standard deviations are those of a sample (n - 1). They are limited to 0.001 … 1000, the logarithms to -0.3 … 10. The
    scales of the round with the least imbalance win, the first of equals; no scales at all are round 0.

    Args:
        tile: [..., R, C] fp64.
    Returns:
        c [..., 1, C] and r [..., R, 1], fp64.
    """
    column, row = torch.zeros_like(tile[..., :1, :]), torch.zeros_like(tile[..., :1])
    spread = _deviation(tile, -2)
    best, best_column, best_row = _imbalance(spread, _deviation(tile, -1)), column, row
    for _ in range(ROUNDS):
        column = (column + spread.clamp(*_DEVIATIONS).log()).clamp(*_LOGARITHMS)
        across = _deviation((tile / column.exp()).div_(row.exp()), -1)
        row = (row + across.clamp(*_DEVIATIONS).log()).clamp(*_LOGARITHMS)
        even = (tile / column.exp()).div_(row.exp())
        spread = _deviation(even, -2)
        imbalance = _imbalance(spread, _deviation(even, -1))
        better = imbalance < best * _NO_BETTER
        best = torch.where(better, imbalance, best)
        best_column, best_row = torch.where(better, column, best_column), torch.where(better, row, best_row)
    return best_column.exp(), best_row.exp()


def _deviation(x: Tensor, dim: int) -> Tensor:
    """Standard deviation of a sample along an axis, which stays; a quarter of `torch.std`'s time."""
    return ((x - x.mean(dim, keepdim=True)).square_().sum(dim, keepdim=True) / (x.shape[dim] - 1)).sqrt()


def _imbalance(columns: Tensor, rows: Tensor) -> Tensor:
    """Of the spreads [..., 1, C] and [..., R, 1]: [..., 1, 1]."""
    ratios = [
        s.amax((-2, -1), keepdim=True) / s.amin((-2, -1), keepdim=True).clamp(min=_LEAST_DEVIATION) for s in (columns, rows)
    ]
    return ratios[0] + ratios[1]


class KVarN(KVFormat):
    """One side. x is [..., 128, D], the tokens of a tile in order; D is a power of two.

        y = WHT(x) / sqrt(D), as a tile of rows and columns;   c, r = balance(y);   z = y / c / r
        step = max((max z - min z) / (2**bits - 1), 1e-10) of each row;   level = round((z - min z) / step), ties to even
        restored: (level * scale + zero) * across, rotated back;   scale = r * step,  zero = r * min z,  across = c

    K: a row is a channel, a column a token. V: a row is a token, a column a channel. A tile of zeros comes back as zeros; one
    of which a scale rounds to infinity in FP16 is refused.
    Fields of one tile: `codes` [rows, columns * bits / 8] uint8, least significant bit first; `scale` and `zero` [rows] fp16;
    `across` [columns] fp16.
    Rounding points: each FP32 operation of the rotation; (z - min z) / step to FP32; scale, zero and across to FP32, then to
    FP16.
    """

    group_tokens = TOKENS
    to_compare = True

    def __init__(self, bits: int, *, rows_are_tokens: bool, name: str, purpose: str) -> None:
        self.name, self.purpose, self.bits = name, purpose, bits
        self._rows_are_tokens = rows_are_tokens
        numbers = ("across", "scale", "zero") if rows_are_tokens else ("scale", "zero", "across")
        self.layout = Part("codes", torch.uint8, bits, 2), *(Part(name, torch.float16) for name in numbers)

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim < 8 or head_dim & (head_dim - 1):
            raise InputError(f"{self.name} needs a head_dim that is a power of two, 8 or more, not {head_dim}")
        rows, columns = (TOKENS, head_dim) if self._rows_are_tokens else (head_dim, TOKENS)
        return {
            "codes": Field(torch.uint8, (rows, columns * self.bits // 8)),
            "scale": Field(torch.float16, (rows,)),
            "zero": Field(torch.float16, (rows,)),
            "across": Field(torch.float16, (columns,)),
        }

    def _arrange(self, x: Tensor) -> Tensor:
        """[..., 128, D] as rows and columns, or these as that again."""
        return x if self._rows_are_tokens else x.transpose(-1, -2)

    def _measure(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of tokens [..., 128, D] the value that is rounded [..., R, C] fp32; min z and step [..., R, 1]; c; r."""
        tile = self._arrange(_rotate(x.float())).double()
        column, row = balance(tile)
        even = tile / column / row
        zero = even.amin(-1, keepdim=True)
        step = ((even.amax(-1, keepdim=True) - zero) / (2**self.bits - 1)).clamp(min=_LEAST_STEP)
        return ((even - zero) / step).float(), zero, step, column, row

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """Store tiles.

        Args:
            x: [..., 128, D] fp32 or bf16.
            layer: without effect.
        Raises:
            NonFiniteError: with the index [..., token] of a vector, or [...] of a tile that is too large.
            InputError: not 128 tokens, or a head_dim that is no power of two.
        """
        self.fields(x.shape[-1])
        if x.ndim < 2 or x.shape[-2] != TOKENS:
            raise InputError(f"{self.name} takes tiles of {TOKENS} tokens, not {list(x.shape)}")
        require_finite(x)
        value, zero, step, column, row = self._measure(x)
        level = value.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return {
            "codes": pack_stream(level, self.bits),
            "scale": to_fp16((row * step).squeeze(-1).float()),
            "zero": to_fp16((row * zero).squeeze(-1).float()),
            "across": to_fp16(column.squeeze(-2).float()),
        }

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        """[..., 128, D] fp32."""
        level = unpack_stream(fields["codes"], self.bits).float()
        rows = level * fields["scale"].float().unsqueeze(-1) + fields["zero"].float().unsqueeze(-1)
        return _rotate(self._arrange(rows * fields["across"].float().unsqueeze(-2)))

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        """[..., 128, D] uint8."""
        return self._arrange(unpack_stream(fields["codes"], self.bits))


def _rotate(x: Tensor) -> Tensor:
    """WHT(x) / sqrt(D) of the last axis, its own inverse."""
    return fwht(x) * float(x.shape[-1] ** -0.5)


def kvarn_pair(bits: int) -> tuple[KVarN, KVarN]:
    """K's and V's format of `bits` bits."""
    name, purpose = f"kvarn{bits}", "KVarN, tiles of 128 tokens"
    key, value = (KVarN(bits, rows_are_tokens=side, name=name, purpose=purpose) for side in (False, True))
    return key, value
