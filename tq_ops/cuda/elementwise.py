"""Norms, rotary embedding and gated products: what a layer does between its products. One launch each."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from haarkv.tq_ops.cuda.available import launch
from haarkv.tq_ops.cuda.rotate import round_to


@triton.jit
def rope_kernel(x, cos, sin, out, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """out [T, HEADS, D] fp32 = (low*cos - high*sin, high*cos + low*sin), a token a program. SIZE: a power of two >= HEADS."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, SIZE)[:, None], tl.arange(0, D // 2)[None, :]
    inside = head < HEADS
    at = (token * HEADS + head) * D + dim
    low, high = tl.load(x + at, inside, 0.0), tl.load(x + at + D // 2, inside, 0.0)
    c, s = tl.load(cos + token * (D // 2) + dim), tl.load(sin + token * (D // 2) + dim)
    tl.store(out + at, low * c - high * s, inside)
    tl.store(out + at + D // 2, high * c + low * s, inside)


@triton.jit
def gated_mul(g, u, ACT: tl.constexpr):
    """act(g) * u; ACT is "silu", "gelu" by its tanh, or "sigmoid".

    The first two are x times a sigmoid, since (1 + tanh(z)) / 2 is that of 2z.
    """
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if ACT == "gelu" else g  # twice the root of 2 / pi
    times = 1.0 if ACT == "sigmoid" else g
    return times / (1.0 + tl.exp(-z)) * u


@triton.jit
def gated_mul_kernel(gate, up, out, width, stride, SIZE: tl.constexpr, ACT: tl.constexpr):
    """out [T, width] = act(gate) * up, both fp32 of row stride `stride`; ACT as of `gated_mul`. Grid: [T, width / SIZE]."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    g, u = tl.load(gate + row * stride + column, inside, 0.0), tl.load(up + row * stride + column, inside, 0.0)
    tl.store(out + row * width + column, round_to(gated_mul(g, u, ACT), out.dtype.element_ty), inside)


@triton.jit
def norm_kernel(hidden, update, post_weight, weight, out, norm_out, width, post_eps, eps, SIZE: tl.constexpr):
    """out = hidden + update, norm_out = rms_norm(out), a row of `width` a program. SIZE: a power of two, at least the width.

    An update is normed by `post_weight`, if there is one, before it is added. Without an update nothing is written to `out`.
    """
    column = tl.arange(0, SIZE)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(hidden + at, inside, 0.0).to(tl.float32)
    if update is not None:
        change = tl.load(update + at, inside, 0.0)
        if post_weight is not None:
            change *= tl.rsqrt(tl.sum(change * change, 0) / width + post_eps)
            change *= tl.load(post_weight + column, inside, 0.0).to(tl.float32)
        # The norm is of the rounded sum.
        total = round_to(value + change, out.dtype.element_ty)
        tl.store(out + at, total, inside)
        value = total.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(norm_out + at, round_to(value, norm_out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `tq_ops.reference.rms_norm`."""
    return _norm(x, None, weight, eps, None)[1]


def add_norm(
    hidden: Tensor, update: Tensor, weight: Tensor, eps: float, post_norm: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """As `FusedOps.add_norm`."""
    return _norm(hidden, update.contiguous(), weight, eps, post_norm)


def _norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, post_norm: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    x, width = x.contiguous(), x.shape[-1]
    out, norm_out = x if update is None else torch.empty_like(x), torch.empty_like(x)
    size, (post_weight, post_eps) = triton.next_power_of_2(width), post_norm or (None, 0.0)
    launch(norm_kernel, (x.numel() // width,))(
        x, update, post_weight, weight, out, norm_out, width, post_eps, eps, SIZE=size,
        num_warps=max(1, min(16, size // 512)),  # 16 numbers a thread, where that is possible
    )  # fmt: skip
    return out, norm_out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `tq_ops.reference.rope`."""
    x = x.contiguous()
    tokens, heads, head_dim = x.shape
    out = torch.empty_like(x)
    launch(rope_kernel, (tokens,))(
        x, cos.contiguous(), sin.contiguous(), out, HEADS=heads, D=head_dim, SIZE=triton.next_power_of_2(heads)
    )
    return out


def _gated_mul(act: str, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """As the reference's op of that name; both may be views of one wider tensor."""
    if gate.stride(-1) != 1 or gate.stride() != up.stride():
        gate, up = gate.contiguous(), up.contiguous()
    tokens, width = gate.shape
    out = torch.empty(tokens, width, dtype=dtype, device=gate.device)
    launch(gated_mul_kernel, (tokens, triton.cdiv(width, 1024)))(gate, up, out, width, gate.stride(0), SIZE=1024, ACT=act)
    return out


silu_mul, gelu_mul, sigmoid_mul = (partial(_gated_mul, act) for act in ("silu", "gelu", "sigmoid"))
