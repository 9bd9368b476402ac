"""Norms, rotary embedding and gated products: what a layer does between its products."""

import triton
import triton.language as tl

from haarkv.tq_ops.cuda.rotate import rounded


@triton.jit
def rms_norm_kernel(x, weight, out, width, eps, SIZE: tl.constexpr):
    """out = x * rsqrt(mean(x**2) + eps) * weight, a row of `width` a program. SIZE: a power of two, at least the width."""
    column = tl.arange(0, SIZE)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(out + at, rounded(value, out.dtype.element_ty), inside)


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
def gated(g, u, ACT: tl.constexpr):
    """act(g) * u; ACT is "silu", "gelu" by its tanh, or "sigmoid".

    The first two are x times a sigmoid, since (1 + tanh(z)) / 2 is that of 2z.
    """
    z = 1.5957691216057308 * (g + 0.044715 * g * g * g) if ACT == "gelu" else g  # twice the root of 2 / pi
    times = 1.0 if ACT == "sigmoid" else g
    return times / (1.0 + tl.exp(-z)) * u


@triton.jit
def gated_mul_kernel(gate, up, out, width, stride, SIZE: tl.constexpr, ACT: tl.constexpr):
    """out [T, width] = act(gate) * up, both fp32 of row stride `stride`; ACT as of `gated`. Grid: [T, width / SIZE]."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    row = tl.program_id(0).to(tl.int64)
    g, u = tl.load(gate + row * stride + column, inside, 0.0), tl.load(up + row * stride + column, inside, 0.0)
    tl.store(out + row * width + column, rounded(gated(g, u, ACT), out.dtype.element_ty), inside)


@triton.jit
def add_norm_kernel(hidden, update, behind, weight, out, normed, width, behind_eps, eps, SIZE: tl.constexpr):
    """out = hidden + update, normed = rms_norm(out), a row of `width` a program. SIZE: a power of two, at least the width.

    Where `behind` is a weight and not None, the update is normed by it before it is added.
    """
    column = tl.arange(0, SIZE)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    change = tl.load(update + at, inside, 0.0)
    if behind is not None:
        change *= tl.rsqrt(tl.sum(change * change, 0) / width + behind_eps)
        change *= tl.load(behind + column, inside, 0.0).to(tl.float32)
    total = tl.load(hidden + at, inside, 0.0).to(tl.float32) + change
    # The norm is of the rounded sum.
    total = rounded(total, out.dtype.element_ty)
    tl.store(out + at, total, inside)
    value = total.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(normed + at, rounded(value, normed.dtype.element_ty), inside)
