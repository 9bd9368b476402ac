"""What launches are given that several kernels share: how many programs, and what says how a side is quantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from haarkv.tq_ops.cuda import choices
from haarkv.tq_ops.cuda.layout import Layout

ROWS = 16
"""Vectors of a program: a tile of the tensor cores."""


def quantized_by(k: Layout, v: Layout, x: Tensor, head_dim: int) -> dict[str, Any]:
    """What `quantize.append` needs of both sides' arguments, by name; x says where it runs."""
    named: dict[str, Any] = {}
    for side, of in (("k", k), ("v", v)):
        learned, upper = of.learned, side.upper()
        named |= {
            f"{side}_forward": of.forward, f"{side}_mean": learned.mean if learned else None,
            f"{side}_numbers": learned.numbers if learned else None,
            f"{side}_centroids": of.centroids, f"{side}_boundaries": of.boundaries,
            f"{upper}_BITS": of.bits, f"{upper}_N": of.levels, f"{upper}_W": of.width, f"{upper}_ROUNDS": of.rounds_unit,
            f"{upper}_SMALLEST": of.smallest, f"{upper}_SATURATES": of.saturates, f"{upper}_LEARNED": learned is not None,
            f"{upper}_TYPE": choices.rotation_operand(x, of.rounds_unit),
        }  # fmt: skip
    types, widest = (named["K_TYPE"], named["V_TYPE"]), max(head_dim, k.width, v.width)
    return named | {"num_warps": choices.store_warps(widest, types, max(k.bits, v.bits), bool(k.learned or v.learned))}


def tiles_of(tokens: int, heads: int, of: Layout) -> int:
    """How many tiles of `rotate.vectors_of` there are."""
    tiles: int = of.matrices * triton.cdiv(tokens * heads // of.matrices, ROWS)
    return tiles


def strides_of(k_fields: dict[str, Tensor], v_fields: dict[str, Tensor]) -> list[int]:
    """From a block to the next: in K's codes, V's, K's scales and V's."""
    return [fields[name].stride(0) for name in ("codes", "scale") for fields in (k_fields, v_fields)]


class Rotated(NamedTuple):
    """Queries in the domain of the codes.

    Attributes:
        queries: [T, Hq, W] fp16 in a BF16 model, else fp32.
        gains: [T, Hq] fp32, powers of two by which those of learned coordinates were divided, so that FP16 holds them; None of
            a rotation.
    """

    queries: Tensor
    gains: Tensor | None


def unset_queries(tokens: int, heads: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> Rotated:
    """Unset, for queries of a model of this dtype."""
    kept = torch.float16 if dtype == torch.bfloat16 else torch.float32
    gains = torch.empty(tokens, heads, dtype=torch.float32, device=device) if layout.learned else None
    return Rotated(torch.empty(tokens, heads, layout.width, dtype=kept, device=device), gains)
