"""OSCAR: two bits behind a learned rotation of each layer, side and KV head. What is learned: `codebooks/oscar.py`.

Written here after Zhou et al. (arXiv 2605.17757) and the public code of its authors (FutureMLS-Lab/OSCAR); none of their bytes
were compared.

- Theirs: the rotation; how a vector is clipped, 0.96 of K's numbers and 0.92 of V's staying as they are; four even levels
  between the least and the largest of what is left, with a scale and a zero point for each 128 channels. The first 64 tokens
  and the newest 256 stay in BF16: here `tail=256, sink=64`.
- Assumed here: scale and zero are FP16. Their 2.28 bits at 131,072 tokens count 16 bits for each; their code keeps FP32 unless
  told otherwise, which makes 2.53. A vector is rotated in FP32, theirs in BF16.
- Not taken: their later variant with Lloyd-Max boundaries, and V's rotation absorbed into the weights, which stores the same.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, KVFormat, bytes_of, require_finite
from haarkv.tq_ops.formats.blocks import to_fp16
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.formats.packing import groups_of, pack_parts, unpack_parts

NAME = "oscar2"
_BITS = 2
_GROUP = 128
_KEPT = {"k": 0.96, "v": 0.92}
_LEAST_RANGE = 1e-8
_NOT_ORTHOGONAL = 0.05
"""How far `R.T @ R` may be from 1 in any entry; rounded to BF16, rotations of 256 numbers stay below 0.01."""


class Oscar(KVFormat):
    """One side of every layer. x is [..., Hkv, n, D], or has no heads where all are alike.

        y = x @ R;  t = the |y| at place floor(kept * D), from 0, in ascending order;  y = clamp(y, -t, t)
        scale = max(max y - min y, 1e-8) / 3;  zero = -min y / scale        of each group of 128, or of all D if they are fewer
        level = min(3, trunc(y / scale + zero + 0.5));  restored: ((level - zero) * scale) @ R.T

    Fields of one vector: `codes` [D / 4] uint8, level j, j + D/4, j + D/2 and j + 3D/4 in byte j, low bits first; `scale` and
    `zero` [groups] fp16. A vector too large for an FP16 scale is refused.
    Rounding points: R is BF16; the product, scale, zero and y / scale + zero + 0.5 to FP32; scale and zero to FP16.

    Args:
        bases: of each layer; `forward` is R.
        kept: share of the numbers of a vector that are not clipped.
    Raises:
        InputError: `forward` is no rotation.
    """

    name = NAME
    purpose = "OSCAR, 2 bits: a learned rotation, even levels"
    to_compare = True

    def __init__(self, bases: tuple[Basis, ...], kept: float) -> None:
        self.head_dim, self._bases, self._kept = bases[0].mean.shape[1], bases, kept
        for layer, basis in enumerate(bases):
            off = basis.forward.mT @ basis.forward - torch.eye(self.head_dim)
            if off.abs().max() > _NOT_ORTHOGONAL:
                raise InputError(
                    f"{NAME} takes rotations, and the calibration's coordinates of layer {layer} are none; "
                    "learn them with `haarkv.validation.planning.moments`"
                )

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim != self.head_dim:
            raise InputError(f"{NAME} was learned of vectors of {self.head_dim} numbers, not {head_dim}")
        if head_dim % 4 or (head_dim > _GROUP and head_dim % _GROUP):
            raise InputError(f"{NAME} needs a head_dim that 4 divides, and {_GROUP} beyond that, not {head_dim}")
        numbers = Field(torch.float16, (max(1, head_dim // _GROUP),))
        return {"codes": Field(torch.uint8, (head_dim * _BITS // 8,)), "scale": numbers, "zero": numbers}

    def _measure(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The value [..., groups, G] that is truncated; scale and zero [..., groups]."""
        self.fields(x.shape[-1])
        y = x.float() @ _on(self._bases[layer].forward, x.device)
        place = min(int(self._kept * self.head_dim), self.head_dim - 1)
        limit = y.abs().sort(-1).values[..., place : place + 1]
        groups = groups_of(torch.clamp(y, -limit, limit), min(self.head_dim, _GROUP))
        least = groups.amin(-1)
        scale = (groups.amax(-1) - least).clamp(min=_LEAST_RANGE) / torch.full((), 3.0, device=x.device)
        zero = -least / scale
        return groups / scale.unsqueeze(-1) + zero.unsqueeze(-1) + 0.5, scale, zero

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        require_finite(x.float())
        value, scale, zero = self._measure(x, layer)
        level = value.trunc().clamp(0, 3).to(torch.uint8).flatten(-2)
        return {"codes": pack_parts(level, _BITS), "scale": to_fp16(scale), "zero": to_fp16(zero)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = groups_of(self.levels(fields).float(), min(self.head_dim, _GROUP))
        y = (level - fields["zero"].float().unsqueeze(-1)) * fields["scale"].float().unsqueeze(-1)
        return y.flatten(-2) @ _on(self._bases[layer].back, y.device)

    def to_bytes(self, fields: dict[str, Tensor]) -> Tensor:
        """Codes, scales, zeros, little-endian."""
        return torch.cat([fields["codes"], bytes_of(fields["scale"], 1), bytes_of(fields["zero"], 1)], dim=-1)

    def levels(self, fields: dict[str, Tensor]) -> Tensor:
        return unpack_parts(fields["codes"], _BITS)


@cache
def _on(matrix: Tensor, device: torch.device) -> Tensor:
    return matrix.to(device, torch.float32)


@lru_cache(maxsize=16)
def oscar_format(calibration: Calibration, side: str) -> Oscar:
    """The format of K ("k") or V ("v"), the same object each time.

    Raises:
        InputError: the calibration holds other coordinates than rotations.
    """
    bases = calibration.k if side == "k" else calibration.v
    if not bases:
        raise InputError(f"{NAME} takes rotations of values too, and this calibration is of keys alone")
    return Oscar(bases, _KEPT[side])
