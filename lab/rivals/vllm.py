"""`vllm_nc4`: the maths of vLLM's cache type `turboquant_4bit_nc`, to compare with. Its V is that of `turboquant_k8v4` too.

Written here after vLLM's `triton_turboquant_store.py` and `turboquant/config.py`; none of its bytes were compared.

- Theirs: K behind a Hadamard matrix without signs, 16 Lloyd-Max levels of N(0, 1 / D), and the vector's length; centroids
  are brought to length 1 before they are turned back (their "norm correction"). V in 16 even steps between its least and its
  largest number, nothing turned. `turboquant_k8v4` keeps K in FP8 without a scale: `k=fp8_e4m3,v=vllm_nc4`.
- Not theirs: their Lloyd-Max solver sums by trapezoids, ours is the published one; they divide K by its length plus a small
  number. A head_dim that is no power of two is refused, and a vector whose length or range is beyond FP16.
- Not taken: they leave the first two and the last two layers in BF16 unless told otherwise, and store no windowed layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.arithmetic import divide, fwht, reciprocal, square_root, sum_in_order
from haarkv.tq_ops.formats.base import Field, KVFormat, Part, require_finite
from haarkv.tq_ops.formats.compared import to_fp16
from haarkv.tq_ops.formats.packing import pack_stream, unpack_stream
from haarkv.tq_ops.formats.rotated import centroids_at, codebook_on

NAME = "vllm_nc4"
_BITS, _STEPS, _LEAST_SCALE = 4, 15, 1e-8


class _Nibbles(KVFormat):
    """What K and V have in common: 16 levels, the even coordinate in the low half of its byte."""

    name = NAME
    purpose = "vLLM's turboquant_4bit_nc: K Hadamard, V even steps"
    unpack = staticmethod(partial(unpack_stream, bits=_BITS))
    to_compare = True


class NormCorrectedKeys(_Nibbles):
    """K.

        y = WHT(x / ||x||) / sqrt(D);  level = number of boundaries that y reaches;  norm = fp16(||x||)
        restored: WHT(c[level] / ||c[level]||) / sqrt(D) * norm

    A zero vector comes back as zeros. `codes` [D / 2] uint8 and `norm` fp16: D / 2 + 2 bytes.
    Rounding points: the sum of squares in order, and each operation, to FP32; norm to FP16.
    """

    layout = (Part("codes", torch.uint8, _BITS), Part("norm", torch.float16, axes=0))

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim < 2 or head_dim & (head_dim - 1):
            raise InputError(f"{NAME} needs a head_dim that is a power of two, not {head_dim}")
        return super().fields(head_dim)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        self.fields(x.shape[-1])
        x = x.float()
        require_finite(x)
        norm = square_root(sum_in_order(x * x))
        rotated = fwht(x * reciprocal(norm).unsqueeze(-1)) * float(x.shape[-1] ** -0.5)
        boundaries = codebook_on(x.shape[-1], x.device, _BITS).boundaries
        level = torch.bucketize(rotated, boundaries, right=True, out_int32=True).to(torch.uint8)
        return {"codes": pack_stream(level, _BITS), "norm": to_fp16(norm)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        level = self.unpack(fields["codes"])
        centroids = centroids_at(level, codebook_on(level.shape[-1], level.device, _BITS).centroids)
        unit = centroids / square_root(sum_in_order(centroids * centroids)).unsqueeze(-1)
        return fwht(unit) * float(level.shape[-1] ** -0.5) * fields["norm"].float().unsqueeze(-1)


class EvenValues(_Nibbles):
    """V.

        scale = max((max x - min x) / 15, 1e-8);  level = min(15, trunc((x - min x) / scale + 0.5))
        restored: level * fp16(scale) + fp16(min x)

    `codes` [D / 2] uint8, `scale` and `zero` fp16: D / 2 + 4 bytes.
    Rounding points: each FP32 operation; scale and zero to FP16.
    """

    layout = (
        Part("codes", torch.uint8, _BITS), Part("scale", torch.float16, axes=0), Part("zero", torch.float16, axes=0),
    )  # fmt: skip

    def fields(self, head_dim: int) -> dict[str, Field]:
        if head_dim < 2 or head_dim % 2:
            raise InputError(f"{NAME} packs 2 values together and needs an even head_dim, not {head_dim}")
        return super().fields(head_dim)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        self.fields(x.shape[-1])
        x = x.float()
        require_finite(x)
        zero = x.amin(-1)
        scale = divide(x.amax(-1) - zero, _STEPS).clamp(min=_LEAST_SCALE)
        value = (x - zero.unsqueeze(-1)) / scale.unsqueeze(-1) + 0.5
        level = value.trunc().clamp(0, _STEPS).to(torch.uint8)
        return {"codes": pack_stream(level, _BITS), "scale": to_fp16(scale), "zero": to_fp16(zero)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        scale, zero = (fields[name].float().unsqueeze(-1) for name in ("scale", "zero"))
        return self.unpack(fields["codes"]).float() * scale + zero
