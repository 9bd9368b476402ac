"""Every op in plain torch: the spec. Tests check all other op tables against it.

The ops round where the published device kernels round. Activations have the model's dtype (`hidden`, `q`, products of SwiGLU,
attention's output); everything between is FP32. With an FP32 model nothing is rounded. K and V reach the cache in FP32; only
their format rounds them. Source of the rounding points: the public Qwen3-14B TurboQuant kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from haarkv.tq_ops.formats.arithmetic import sum_in_order
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.kv.layer import LayerKV
from haarkv.tq_ops.weight import Weight, activations, weight_numbers

_WIDEN_BYTES = 2 * 2**20


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis: `x * rsqrt(mean(x**2) + eps) * weight`.

    Args:
        x: [..., N] bf16 or fp32.
        weight: [N], any floating dtype.
    Returns:
        [..., N] of x's dtype.
    Rounding points: computed in FP32, rounded once to x's dtype.
    """
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Projection `x @ weight.T`.

    Args:
        x: [T, in] bf16 or fp32.
        weight: [out, in] of x's dtype, as Hugging Face stores it; or weight blocks, which are restored to FP32. If the blocks
            ask for 8-bit activations, x is rounded first (`weight.activations`).
    Returns:
        [T, out] fp32.
    Rounding points: none; products and sums are FP32.
    """
    x = activations(x.float(), weight)
    if weight.dtype == torch.float32:
        return functional.linear(x, weight_numbers(weight))
    # A few rows at a time become FP32 and stay in the processor's cache: so the weight is read from memory once, in its dtype.
    step = max(1, _WIDEN_BYTES // (4 * weight.shape[1]))
    parts = (weight_numbers(weight, slice(begin, begin + step)) for begin in range(0, len(weight), step))
    return torch.cat([functional.linear(x, part.float()) for part in parts], dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding: `(lo*cos - hi*sin, hi*cos + lo*sin)`.

    Args:
        x: [T, H, D] fp32.
        cos, sin: [T, D/2] fp32, at each token's position.
    Returns:
        [T, H, D] fp32.
    """
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def silu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """SwiGLU's product `silu(gate) * up`.

    Args:
        gate, up: [T, intermediate] fp32.
        dtype: dtype of the result.
    Rounding points: the product is rounded once, to `dtype`.
    """
    return (functional.silu(gate) * up).to(dtype)


def gelu_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """GeGLU's product `gelu(gate) * up`, with `gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3)))`.

    Args, rounding points: as `silu_mul`.
    """
    return (functional.gelu(gate, approximate="tanh") * up).to(dtype)


def sigmoid_mul(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """A gated product `sigmoid(gate) * up`.

    Args, rounding points: as `silu_mul`.
    """
    return (torch.sigmoid(gate) * up).to(dtype)


def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
    """Quantize K (after RoPE) and V, each [T, Hkv, D] fp32, and store them at the slots of the batch.

    Raises:
        NonFiniteError: a vector is not finite; the message names layer, token, slot and head.
    """
    at.write(k, v)


def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
    """Causal attention of new tokens over all stored tokens of their sequences, new tokens included.

    This op dequantizes K and V, then attends; kernels in the rotated domain must give the same. KV head g serves query heads
    g*Hq/Hkv … (g+1)*Hq/Hkv - 1. `ResidualWindow.visible` says which tokens a query reads in BF16. With a sliding window of W
    tokens, a query at position p sees positions p - W + 1 … p.

    Args:
        q: [T, Hq, D] bf16 or fp32, after RoPE.
        softmax_scale: factor of the logits, 1/sqrt(D).
    Returns:
        [T, Hq, D] of q's dtype.
    Rounding points, for a bf16 q: exp(logit - maximum of its block) to BF16, and the sum of these rounded numbers; blocks are
        merged in FP32; the output to BF16.
    """
    parts = zip(torch.split(q, at.batch.query_start_loc.diff().tolist()), at.batch.sequences(), strict=True)
    return torch.cat([_attend_sequence(queries, at.kv, one, softmax_scale) for queries, one in parts])


def _attend_sequence(q: Tensor, kv: LayerKV, one: Batch, softmax_scale: float) -> Tensor:
    """Attention of one sequence. One at a time, so that results do not depend on the rest of the batch."""
    shape, length = kv.shape, int(one.seq_lens)
    heads, group = shape.num_kv_heads, q.shape[1] // shape.num_kv_heads
    k, v = (x[0, :, :length] for x in kv.read(one.block_table[:, : -(-length // kv.block_size)]))
    k_window, v_window = kv.windows
    position, key_position = one.positions.repeat(group), torch.arange(length, device=q.device)
    queries = q.float().view(-1, heads, group, q.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G*Q, D]
    scores = queries @ k.mT
    if k_window:
        scores = torch.where(k_window.visible(position, length), queries @ k_window.read(one, length)[0].mT, scores)
    unseen = key_position > position.unsqueeze(1)
    if shape.window is not None:
        unseen |= key_position <= position.unsqueeze(1) - shape.window
    scores = (scores * softmax_scale).masked_fill(unseen, -torch.inf)
    if q.dtype == torch.float32:
        weights, total = torch.softmax(scores, dim=-1), torch.ones((), device=q.device)
    else:
        weights, total = rounded_softmax(scores, kv.block_size, q.dtype)
    if v_window:
        in_window = v_window.visible(position, length)
        out = weights.masked_fill(in_window, 0.0) @ v + weights.masked_fill(~in_window, 0.0) @ v_window.read(one, length)[0]
    else:
        out = weights @ v
    return (out / total).view(heads, group, len(q), -1).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def rounded_softmax(scores: Tensor, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities [..., S] fp32 and their sum [..., 1], rounded block by block as an online softmax does."""
    length = scores.shape[-1]
    padded = functional.pad(scores, (0, -length % block_size), value=-torch.inf)
    by_block = padded.view(*scores.shape[:-1], -1, block_size)
    block_max = by_block.amax(-1, keepdim=True)
    # A fully masked block has the maximum -inf. Any finite number in its place gives probability 0.
    finite_max = block_max.masked_fill(block_max == -torch.inf, 0.0)
    weights = torch.exp(by_block - finite_max).to(dtype).float()
    merge = torch.exp(block_max - block_max.amax(-2, keepdim=True))
    total = (weights.sum(-1, keepdim=True) * merge).sum(-2)
    return (weights * merge).flatten(-2)[..., :length], total


# -- The gated delta rule ----------------------------------------------------------------------------------------------------


def gated_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    at: LayerView,
) -> Tensor:
    """The gated delta rule, token by token from the layer's state, which it updates.

        q, k, v = silu(sum_t conv[t] * x[t]), over the newest tokens;   q = q / |q| / sqrt(dk);   k = k / |k|
        S = S * exp(-exp(a_log) * softplus(a + dt_bias))
        S = S + k (v - S^T k) * sigmoid(b);   out = S^T q

    Head h of V uses head h * Hk // Hv of Q and K. The result of a token depends on the state before it alone: not on how a
    prompt is cut, nor on other sequences of the batch.

    Args:
        x: [T, 2 * Hk * dk + Hv * dv] fp32, projections to q, k and v, before the convolution.
        a, b: [T, Hv] fp32, decay and write gate.
        conv: [2 * Hk * dk + Hv * dv, 1, taps] fp32; the last tap multiplies the newest token.
        a_log, dt_bias: [Hv] fp32.
        at: `at.state` holds `conv` [taps - 1, …] and `delta` (S) [Hv, dk, dv], both fp32.
    Returns:
        [T, Hv, dv] fp32.
    Rounding points: none; all is FP32.
    Raises:
        ValueError: the state before these tokens is missing.
    """
    state, batch = at.state, at.batch
    before, saved_tokens = state.read(batch), state.last_tokens(batch)
    taps, decay = conv.squeeze(1).T, a_log.exp()
    keep = set(saved_tokens.tolist())
    out, after = [], []
    for row, (begin, end) in enumerate(pairwise(batch.query_start_loc.tolist())):
        window, memory = before["conv"][row], before["delta"][row]
        for token in range(begin, end):
            # One token at a time: an elementwise function may round differently at the end of a longer tensor.
            window = torch.cat([window, x[token : token + 1]])
            q, k, v = _delta_heads(sum_in_order((window * taps).T), memory)
            window = window[1:]
            memory = memory * torch.exp(-decay * functional.softplus(a[token] + dt_bias)).view(-1, 1, 1)
            change = (v - (memory * k).sum(1)) * torch.sigmoid(b[token]).unsqueeze(1)
            memory = memory + k * change.unsqueeze(1)
            out.append((memory * q).sum(1))
            if token in keep:
                after.append((window, memory))
    windows, memories = zip(*after, strict=True)
    state.write({"conv": torch.stack(windows), "delta": torch.stack(memories)}, saved_tokens, batch)
    return torch.stack(out)


_UNIT_EPS = 1e-6
"""Added to the squared length of q and k before they are divided by their length."""


def _delta_heads(qkv: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [Hv, dk, 1] and v [Hv, dv] from a token's convolved projections; memory: S [Hv, dk, dv]."""
    heads, key_dim, value_dim = memory.shape
    values = heads * value_dim
    qk, v = torch.split(functional.silu(qkv), [len(qkv) - values, values])
    qk = qk.view(2, -1, key_dim)
    q, k = (qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + _UNIT_EPS)).repeat_interleave(heads // qk.shape[1], dim=1)
    return (q * key_dim**-0.5).unsqueeze(2), k.unsqueeze(2), v.view(heads, value_dim)
