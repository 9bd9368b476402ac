"""`q4_0_rot`: `q4_0` behind llama.cpp's rotation (its pull request 21038)."""

from __future__ import annotations

from torch import Tensor

from haarkv.tq_ops.formats.arithmetic import fwht
from haarkv.tq_ops.formats.compared import BlockQ4
from haarkv.tq_ops.formats.packing import split_groups


class RotatedBlockQ4(BlockQ4):
    """`q4_0` of vectors that were rotated by a Hadamard matrix, as llama.cpp's attention rotation stores K and V.

        y = WHT(x) / sqrt(n) of each n numbers;  then q4_0 of y;  restored: WHT(q4_0's) / sqrt(n)

    llama.cpp rotates every quantized cache whose head_dim 64 divides, unless told not to: K by the largest power of two that
    divides head_dim, V by 64. It rotates q too, and the output back, which is the same in exact arithmetic. Where 64 does not
    divide head_dim it stores plain q4_0; here that is refused. Written here after its code, and none of its bytes were
    compared: it multiplies by the matrix, in an order of sums that differs by backend; here it is the fast transform.
    Rounding points: each stage of the transform and its factor to FP32; then q4_0's.

    Args:
        whole: rotate by the largest power of two, as K is; by 64 else, as V is.
    """

    name = "q4_0_rot"
    purpose = "llama.cpp's, rotated first"
    smallest = multiple = 64
    cuts = "rotates 64 values at a time"

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole

    def _rotate(self, x: Tensor) -> Tensor:
        """[..., D] fp32, its own inverse."""
        head_dim = x.shape[-1]
        size = head_dim & -head_dim if self._whole else self.smallest
        return (fwht(split_groups(x, size)) * float(size**-0.5)).flatten(-2)

    def split(self, x: Tensor) -> Tensor:
        self.fields(x.shape[-1])
        return super().split(self._rotate(x.float()))

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return self._rotate(super().dequantize(fields, layer))
