"""OSCAR: two bits behind a learned rotation of each layer, side and KV head.

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

from collections.abc import Sequence
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor

from haarkv.engine.session import Session
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.base import Field, KVFormat, Part, require_finite
from haarkv.tq_ops.formats.compared import to_fp16
from haarkv.tq_ops.formats.packing import pack_parts, split_groups, unpack_parts
from haarkv.tq_ops.table import OpTable
from haarkv.validation.fidelity.evaluation import run_span
from haarkv.validation.layers.forward import observe_vectors
from haarkv.validation.layers.reference import remembering

NAME = "oscar2"
_BITS = 2
_GROUP = 128
_CLIP_SHARES = {"k": 0.96, "v": 0.92}
_LEAST_RANGE = 1e-8


class Oscar(KVFormat):
    """One side of every layer. x is [..., Hkv, n, D], or has no heads where all are alike.

        y = x @ R;  t = the |y| at place floor(kept * D), from 0, in ascending order;  y = clamp(y, -t, t)
        scale = max(max y - min y, 1e-8) / 3;  zero = -min y / scale        of each group of 128, or of all D if they are fewer
        level = min(3, trunc(y / scale + zero + 0.5));  restored: ((level - zero) * scale) @ R.T

    Fields of one vector: `codes` [D / 4] uint8, level j, j + D/4, j + D/2 and j + 3D/4 in byte j, low bits first; `scale` and
    `zero` [groups] fp16. A vector too large for an FP16 scale is refused.
    Rounding points: R is BF16; the product, scale, zero and y / scale + zero + 0.5 to FP32; scale and zero to FP16.

    Args:
        rotations: R of each layer, [H, D, D] fp32.
        clip_share: share of the numbers of a vector that are not clipped.
    """

    name = NAME
    purpose = "OSCAR, 2 bits: a learned rotation, even levels"
    layout = (Part("codes", torch.uint8, _BITS), Part("scale", torch.float16), Part("zero", torch.float16))
    unpack = staticmethod(partial(unpack_parts, bits=_BITS))
    to_compare = True

    def __init__(self, rotations: Sequence[Tensor], clip_share: float) -> None:
        self.head_dim, self._rotations, self._clip_share = rotations[0].shape[-1], rotations, clip_share

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
        y = x.float() @ _on(self._rotations[layer], x.device)
        place = min(int(self._clip_share * self.head_dim), self.head_dim - 1)
        limit = y.abs().sort(-1).values[..., place : place + 1]
        groups = split_groups(torch.clamp(y, -limit, limit), min(self.head_dim, _GROUP))
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
        level = split_groups(self.unpack(fields["codes"]).float(), min(self.head_dim, _GROUP))
        y = (level - fields["zero"].float().unsqueeze(-1)) * fields["scale"].float().unsqueeze(-1)
        return y.flatten(-2) @ _on(self._rotations[layer], y.device, transpose=True)


@cache
def _on(rotation: Tensor, device: torch.device, *, transpose: bool = False) -> Tensor:
    return (rotation.mT if transpose else rotation).contiguous().to(device, torch.float32)


# -- What is learned ---------------------------------------------------------------------------------------------------
# K of a KV head: E[q q^T] of the queries that read it.   V: E[w v v^T],  w = k^T E[q q^T] k of the token's own key
# Source: `compute_kv_rotation.py` of its authors, targets `qqt` and `sst`, composition `r_h_pbr`, for each KV head as in the
# second version of their files. What a layer stores is recorded until it is done: w needs all of its queries first.
def rotations(moment: Tensor) -> Tensor:
    """Rotations that spread evenly what counts most.

        moment = U diag(e) U.T;   R = U @ H @ P

    H is Sylvester's Hadamard matrix over the root of its size. P puts the column with the number of the i-th largest
    eigenvalue at the place whose binary digits are those of i reversed.

    Args:
        moment: [H, D, D], symmetric; D is a power of two.
    Returns:
        R [H, D, D] fp32, rounded to BF16.
    """
    heads, dim = moment.shape[:2]
    values, vectors = torch.linalg.eigh(moment.double())
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]) / 2**0.5
    digits = dim.bit_length() - 1
    reversed_digits = torch.tensor([int(f"{i:0{digits}b}"[::-1], 2) for i in range(dim)])
    places = torch.empty(heads, dim, dtype=torch.int64)
    places[:, reversed_digits] = values.argsort(-1, descending=True)
    rotation: Tensor = (vectors @ hadamard).gather(-1, places.unsqueeze(1).expand(-1, dim, -1))
    return rotation.to(torch.bfloat16).float()


def moments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What the rotations of K and V come from.

    Args:
        q: [T, Hq, D], queries after RoPE; the first Hq / H of them read the first KV head.
        k, v: [T, H, D], K after RoPE and V.
    Returns:
        two of [H, D, D] fp64.
    """
    tokens, heads, dim = k.shape
    head_queries = q.double().reshape(tokens, heads, -1, dim).transpose(0, 1).flatten(1, 2)  # [H, T * Hq / H, D]
    metric = head_queries.mT @ head_queries / head_queries.shape[1]
    keys, values = k.double().transpose(0, 1), v.double().transpose(0, 1)
    weight = ((keys @ metric) * keys).sum(-1, keepdim=True)
    return metric, (weight * values).mT @ values / weight.sum(1, keepdim=True).clamp(min=1e-12)


@torch.inference_mode()
def learn_oscar(model: DecoderModel, base: Session, windows: Sequence[Tensor]) -> tuple[Oscar, Oscar]:
    """The formats of K and V, learned from windows of a text.

    Args:
        model: weights and shapes, on the CPU.
        base: gives the plan of the cache, bf16, and a shape to make caches of.
        windows: [n] int64 each, token ids.
    """
    samples: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}

    def keep(k: Tensor, v: Tensor) -> None:
        samples["k"].append(k)
        samples["v"].append(v)

    ops = observe_vectors(remembering(cast(OpTable, reference)), keep, samples["q"].append)
    side = Session(base.name, base.config, ReferenceExecutor(model, ops), base.tokenizer, base.plan)
    hidden = [model.embed(window) for window in windows]
    learned_rotations: dict[str, list[Tensor]] = {"k": [], "v": []}
    for layer in range(model.config.num_layers):
        hidden = [run_span(side, x, range(layer, layer + 1)) for x in hidden]
        for name, moment in zip("kv", moments(*(torch.cat(samples[part]) for part in "qkv")), strict=True):
            learned_rotations[name].append(rotations(moment))
        for parts in samples.values():
            parts.clear()
    return Oscar(learned_rotations["k"], _CLIP_SHARES["k"]), Oscar(learned_rotations["v"], _CLIP_SHARES["v"])
