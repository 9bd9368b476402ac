"""Quantizes matrices to the types of a GGUF file, bit for bit as gguf restores them.

    symmetric   x ~ s q            Q4_0, Q5_0, Q6_K
    affine      x ~ s q + m        Q4_1, Q5_1; with s >= 0 and m <= 0 Q4_K

Scales around plain rounding's are tried: round to levels, fit scale and minimum to those levels by least squares, round again.
The least sum w (x - x')^2 wins, plain rounding included. With the mean square of a column's inputs as w, the sum is the error
of the product. Source of the idea: llama.cpp's ggml-quants.c; no code of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.tq_ops.errors import InputError

_AT_ONCE = 2**16
"""Numbers that are fitted together, to stay in the CPU's caches."""
_SUB = 32
_LARGEST_HALF = 65504.0
_TRIES = (0.85, 0.91, 0.96, 1.0, 1.05)
"""Multiples of plain rounding's scale that are tried."""
_TINY = 1e-30


def quantize(rows: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Rows of a matrix in a type of gguf's.

    Args:
        rows: [R, n] fp32, n a multiple of the type's block.
        kind: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K or Q6_K.
        importance: [n] or [R, n] fp32, weight of each squared error; by default 1, in Q4_0 magnitude plus the block's RMS.
    Returns:
        [R, bytes of a row] uint8.
    Raises:
        InputError: a number is not finite, or larger than FP16 holds where the type's scales are FP16.
    """
    if not bool(torch.isfinite(rows).all()):
        raise InputError("a number of it is not finite; such weights cannot be quantized")
    if kind not in ("F32", "BF16") and float(rows.abs().max()) > _LARGEST_HALF:
        raise InputError("a number of it is larger than 65,504, which FP16 does not hold; take bf16")
    gguf_type = gguf.GGMLQuantizationType[kind]
    if kind not in _ENCODERS:
        return torch.from_numpy(_plain(rows, gguf_type))
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf_type]
    width = rows.shape[1]
    weights = torch.ones(1) if importance is None else importance
    parts: list[Tensor] = []
    step = max(1, _AT_ONCE // width)
    for begin in range(0, len(rows), step):
        x = rows[begin : begin + step]
        w = (weights if weights.ndim < 2 else weights[begin : begin + step]).expand(x.shape)
        block_rows, counts = x.reshape(-1, numbers), w.reshape(-1, numbers)
        if importance is None and kind == "Q4_0":
            # With equal weights a block's few large numbers lose, and a model's KL is higher.
            counts = block_rows.abs() + block_rows.square().mean(1, keepdim=True).sqrt()
        blocks = _encode_blocks(block_rows, counts, gguf_type)
        parts.append(blocks.view(len(x), width // numbers * nbytes))
    return torch.cat(parts)


def _encode_blocks(x: Tensor, w: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Blocks [N, bytes] of numbers [N, numbers of a block]."""
    # Some weight for numbers of no importance: their blocks need scales, too.
    w = w + 1e-6 * w.mean(1, keepdim=True) + 1e-30
    blocks = _ENCODERS[kind.name](x, w)
    if kind.name not in _GGUF_ROUNDS:
        return blocks
    plain = torch.from_numpy(_plain(x, kind))
    worse = _loss(blocks, x, w, kind) > _loss(plain, x, w, kind)
    return torch.where(worse[:, None], plain, blocks)


def _plain(x: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    raw = gguf.quantize(np.ascontiguousarray(x.numpy()), kind)
    return raw.view(np.uint8).reshape(len(x), -1)


def _loss(blocks: Tensor, x: Tensor, w: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    numbers = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind)).view(x.shape)
    return (w * (numbers - x).square()).sum(1)


# -- Fits --------------------------------------------------------------------------------------------------------------


def symmetric(x: Tensor, w: Tensor, low: int) -> Tensor:
    """Scales [N] fp32 of blocks x [N, n] for levels `low` … `-low - 1` with least error weighted by w [N, n].

    Scales are negative where the largest number is positive and takes level `low`.
    """
    largest, high, zero = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0], -low - 1, torch.zeros(len(x))
    best = largest / low
    least = _levels_loss(x, w, best, zero, low, high)
    # The largest number may also take the other end, with a scale of the other sign.
    for start in (best, -largest / high):
        for part in _TRIES:
            levels = round_levels(x, (start * part)[:, None], zero[:, None], low, high)[0]
            scale = (w * x * levels).sum(1) / (w * levels * levels).sum(1).clamp_min(_TINY)
            loss = _levels_loss(x, w, scale, zero, low, high)
            best, least = torch.where(loss < least, scale, best), torch.minimum(loss, least)
    return best


def affine(x: Tensor, w: Tensor, high: int, *, below: bool) -> tuple[Tensor, Tensor]:
    """Scales >= 0 and minima [N] fp32 of blocks for levels 0 … `high`; `below`: minima are at most 0, as in Q4_K."""
    minimum, maximum = x.amin(1), x.amax(1)
    minimum = minimum.clamp_max(0.0) if below else minimum
    plain = ((maximum - minimum) / high).clamp_min(0.0)
    best, at, least = plain, minimum, _levels_loss(x, w, plain, minimum, 0, high)
    for part in _TRIES:
        scale, offset = plain * part, minimum
        for _ in range(2):
            scale, offset = _line(x, w, round_levels(x, scale[:, None], offset[:, None], 0, high)[0], below)
        loss = _levels_loss(x, w, scale, offset, 0, high)
        take = loss < least
        best, at, least = torch.where(take, scale, best), torch.where(take, offset, at), torch.where(take, loss, least)
    return best, at


def _line(x: Tensor, w: Tensor, levels: Tensor, below: bool) -> tuple[Tensor, Tensor]:
    """Scale and minimum by least squares."""
    total, sum_q, sum_x = w.sum(1), (w * levels).sum(1), (w * x).sum(1)
    sum_qq, sum_qx = (w * levels * levels).sum(1), (w * levels * x).sum(1)
    free = (total * sum_qx - sum_q * sum_x) / (total * sum_qq - sum_q * sum_q).clamp_min(_TINY)
    offset = (sum_x - free * sum_q) / total.clamp_min(_TINY)
    if not below:
        return free.clamp_min(0.0), offset
    # A positive minimum cannot be stored: the line goes through 0.
    through = sum_qx / sum_qq.clamp_min(_TINY)
    return torch.where(offset > 0, through, free).clamp_min(0.0), offset.clamp_max(0.0)


def _levels_loss(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> Tensor:
    """[N], sum w (x - x')^2."""
    _, numbers = round_levels(x, scale[:, None], offset[:, None], low, high)
    return numbers.sub_(x).square_().mul_(w).sum(1)


def round_levels(x: Tensor, scale: Tensor, offset: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """(levels, restored numbers) of numbers [N, n] by stored scales [N, n or 1]."""
    inverse = torch.where(scale.abs() > _TINY, 1.0 / scale, torch.zeros_like(scale))
    levels = ((x - offset) * inverse).round_().clamp_(low, high)
    return levels, levels * scale + offset


# -- One encoder a type ----------------------------------------------------------------------------------------------------


def _half(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes [N, 2], the value) of FP16 numbers [N]."""
    half = x.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    return half.view(torch.uint8).view(len(x), 2), half.float()


def _nibbles(levels: Tensor) -> Tensor:
    """[N, 16] bytes of levels [N, 32] in 0 … 15: the first half low, the second half high."""
    levels = levels.to(torch.uint8)
    return levels[:, :16] | (levels[:, 16:] << 4)


def _fifth_bits(levels: Tensor) -> Tensor:
    """[N, 4] bytes: the fifth bit of each level [N, 32] in 0 … 31, from the lowest bit on."""
    bits = (levels.to(torch.int64) >> 4 & 1).view(-1, 4, 8) << torch.arange(8)
    return bits.sum(-1).to(torch.uint8)


def _of_32(bits: int, *, has_minimum: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """An encoder: FP16 scale, FP16 minimum if there is one, fifth bits, low four bits."""
    half = 1 << (bits - 1)

    def encode(x: Tensor, w: Tensor) -> Tensor:
        low, high = (0, 2 * half - 1) if has_minimum else (-half, half - 1)
        factors = affine(x, w, high, below=False) if has_minimum else (symmetric(x, w, low),)
        parts, numbers = zip(*map(_half, factors), strict=True)
        minimum = numbers[1][:, None] if has_minimum else torch.zeros(1)
        levels = round_levels(x, numbers[0][:, None], minimum, low, high)[0].to(torch.int64) - low
        return torch.cat([*parts, *([_fifth_bits(levels)] if bits == 5 else []), _nibbles(levels & 15)], dim=1)

    return encode


def _best(ways: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """For each block, the one with least loss of several (blocks [N, bytes], losses [N])."""
    best, least = ways[0]
    for blocks, losses in ways[1:]:
        best = torch.where((losses < least)[:, None], blocks, best)
        least = torch.minimum(losses, least)
    return best


def _round_factors(
    factors: Sequence[Tensor], units: Sequence[Tensor], low: int, high: int, loss_of: Callable[..., Tensor]
) -> tuple[list[Tensor], Tensor]:
    """(whole multiples of their units, losses [N, n]) of factors [N, n] of sub-blocks: rounded, or neighbours that fit better.

    Args:
        units: [N] each.
        loss_of: losses [N, n] by whole multiples.
    """
    whole = [
        torch.where(unit[:, None] != 0, part / unit[:, None], torch.zeros_like(part)).round_()
        for part, unit in zip(factors, units, strict=True)
    ]
    best = [multiple.clamp(low, high) for multiple in whole]
    least = loss_of(*best)
    for steps in product((-1, 0, 1), repeat=len(whole)):
        candidate = [(multiple + step).clamp(low, high) for multiple, step in zip(whole, steps, strict=True)]
        loss = loss_of(*candidate)
        best = [torch.where(loss < least, new, old) for new, old in zip(candidate, best, strict=True)]
        least = torch.minimum(loss, least)
    return best, least


def _q4_k(x: Tensor, w: Tensor) -> Tensor:
    """144 bytes: d and dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes of levels; fitted or plain."""
    subs, weights = x.reshape(-1, _SUB), w.reshape(-1, _SUB)
    low = subs.amin(1).clamp_max(0.0)
    ways = [affine(subs, weights, 15, below=True), ((subs.amax(1) - low).clamp_min(0.0) / 15, low)]
    return _best([_q4_k_of(x, w, scale.view(-1, 8), -minimum.view(-1, 8)) for scale, minimum in ways])


def _q4_k_of(x: Tensor, w: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and losses for scales and negated minima [N, 8], each rounded to six bits."""
    subs, weights = x.view(-1, 8, _SUB), w.view(-1, 8, _SUB)
    (d_bytes, d), (m_bytes, m) = _half(scale.amax(1) / 63), _half(minimum.amax(1) / 63)

    def restore(s: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        return round_levels(subs, (d[:, None] * s)[..., None], -(m[:, None] * offset)[..., None], 0, 15)

    best, least = _round_factors(
        (scale, minimum), (d, m), 0, 63, lambda *factors: (weights * (restore(*factors)[1] - subs).square()).sum(-1)
    )
    s, o = (factors.to(torch.uint8) for factors in best)
    packed = torch.empty(len(x), 12, dtype=torch.uint8)
    packed[:, :4] = s[:, :4] | (s[:, 4:] >> 4 << 6)
    packed[:, 4:8] = o[:, :4] | (o[:, 4:] >> 4 << 6)
    packed[:, 8:] = (s[:, 4:] & 15) | (o[:, 4:] << 4)
    pairs = restore(*best)[0].to(torch.uint8).view(-1, 4, 2, _SUB)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return torch.cat([d_bytes, m_bytes, packed, nibbles], dim=1), least.sum(1)


def _q6_k(x: Tensor, w: Tensor) -> Tensor:
    """210 bytes: 128 of low four bits, 64 of high two, 16 signed scales, d; fitted or plain."""
    subs, weights = x.reshape(-1, 16), w.reshape(-1, 16)
    plain = subs.gather(1, subs.abs().argmax(1, keepdim=True))[:, 0] / -32
    return _best([_q6_k_of(x, w, scale.view(-1, 16)) for scale in (symmetric(subs, weights, -32), plain)])


def _q6_k_of(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    subs, weights = x.view(-1, 16, 16), w.view(-1, 16, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))[:, 0]
    d_bytes, d = _half(largest / -128)

    def restore(s: Tensor) -> tuple[Tensor, Tensor]:
        return round_levels(subs, (d[:, None] * s)[..., None], torch.zeros(1), -32, 31)

    (best,), least = _round_factors((scale,), (d,), -128, 127, lambda s: (weights * (restore(s)[1] - subs).square()).sum(-1))
    q = (restore(best)[0] + 32).to(torch.uint8).view(-1, 2, 4, _SUB)
    low = torch.stack([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], dim=2)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    scale_bytes = best.to(torch.int8).view(torch.uint8)
    return torch.cat([low.reshape(-1, 128), high.reshape(-1, 64), scale_bytes, d_bytes], dim=1), least.sum(1)


_ENCODERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Q4_0": _of_32(4, has_minimum=False),
    "Q5_0": _of_32(5, has_minimum=False),
    "Q4_1": _of_32(4, has_minimum=True),
    "Q5_1": _of_32(5, has_minimum=True),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_GGUF_ROUNDS = ("Q4_0", "Q5_0", "Q4_1", "Q5_1")
