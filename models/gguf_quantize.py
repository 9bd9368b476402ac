"""Writes a GGUF file with fewer bits a weight, from another; entries, names and order of rows stay. Blocks are bit for bit as
gguf restores them:

    symmetric   x ~ s q            Q4_0, Q5_0, Q6_K
    affine      x ~ s q + m        Q4_1, Q5_1; with s >= 0 and m <= 0 Q4_K

Scales around plain rounding's are tried: round to levels, fit scale and minimum to those levels by least squares, round again.
The least sum w (x - x')^2 wins, plain rounding included. With the mean square of a column's inputs as w, the sum is the error
of the product. Source of the idea: llama.cpp's ggml-quants.c; no code of it is used.

gguf's writer takes the tensors one after the other, so that one is in memory at a time.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from haarkv.models.gguf_file import KV_CHOICE, GGUFTensor, block_type, block_type_named
from haarkv.models.gguf_source import GGUFSource
from haarkv.tq_ops.errors import InputError

_AT_ONCE = 2**16
"""Numbers that are restored and fitted together, to stay in the CPU's caches."""
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
        importance: [n] fp32, weight of each squared error; by default 1, in Q4_0 magnitude plus the block's RMS.
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
        raw = gguf.quantize(np.ascontiguousarray(rows.numpy()), gguf_type)
        return torch.from_numpy(raw.view(np.uint8).reshape(len(rows), -1))
    x = rows.reshape(-1, gguf.GGML_QUANT_SIZES[gguf_type][0])
    if importance is not None:
        w = importance.expand(rows.shape).reshape(x.shape)
    elif kind == "Q4_0":
        # With equal weights a block's few large numbers lose, and a model's KL is higher.
        w = x.abs() + x.square().mean(1, keepdim=True).sqrt()
    else:
        w = torch.ones_like(x)
    # Some weight for numbers of no importance: their blocks need scales, too.
    w = w + 1e-6 * w.mean(1, keepdim=True) + 1e-30

    def loss(blocks: Tensor) -> Tensor:
        return (w * (torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf_type)).view(x.shape) - x).square()).sum(1)

    # As they are stored, a block's rounded factors may make plain rounding the better one.
    fitted, plain = (_ENCODERS[kind](x, w, tries) for tries in (_TRIES, ()))
    return torch.where((loss(plain) < loss(fitted))[:, None], plain, fitted).view(len(rows), -1)


# -- Fits --------------------------------------------------------------------------------------------------------------


def symmetric(x: Tensor, w: Tensor, low: int, tries: Sequence[float]) -> Tensor:
    """Scales [N] fp32 of blocks x [N, n] for levels `low` … `-low - 1` with least error weighted by w [N, n].

    Scales are negative where the largest number is positive and takes level `low`. Without `tries` they are plain rounding's.
    """
    largest, high, zero = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0], -low - 1, torch.zeros(len(x))
    best = largest / low
    least = _levels_loss(x, w, best, zero, low, high)
    # The largest number may also take the other end, with a scale of the other sign.
    for start in (best, -largest / high):
        for part in tries:
            levels = round_levels(x, (start * part)[:, None], zero[:, None], low, high)[0]
            scale = (w * x * levels).sum(1) / (w * levels * levels).sum(1).clamp_min(_TINY)
            loss = _levels_loss(x, w, scale, zero, low, high)
            best, least = torch.where(loss < least, scale, best), torch.minimum(loss, least)
    return best


def affine(x: Tensor, w: Tensor, high: int, tries: Sequence[float], *, below: bool) -> tuple[Tensor, Tensor]:
    """As `symmetric`, scales >= 0 and minima [N] fp32 for levels 0 … `high`; `below`: minima are at most 0, as in Q4_K."""
    minimum, maximum = x.amin(1), x.amax(1)
    minimum = minimum.clamp_max(0.0) if below else minimum
    plain = ((maximum - minimum) / high).clamp_min(0.0)
    best, at, least = plain, minimum, _levels_loss(x, w, plain, minimum, 0, high)
    for part in tries:
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


Encoder = Callable[[Tensor, Tensor, Sequence[float]], Tensor]
"""Blocks [N, bytes] of numbers and their weights [N, n], by scales of `symmetric` or `affine` with these tries."""


def _of_32(bits: int, *, has_minimum: bool) -> Encoder:
    """An encoder: FP16 scale, FP16 minimum if there is one, fifth bits, low four bits."""
    low = 0 if has_minimum else -(1 << (bits - 1))
    high = low + (1 << bits) - 1

    def encode(x: Tensor, w: Tensor, tries: Sequence[float]) -> Tensor:
        factors = affine(x, w, high, tries, below=False) if has_minimum else (symmetric(x, w, low, tries),)
        parts, numbers = zip(*map(_half, factors), strict=True)
        minimum = numbers[1][:, None] if has_minimum else torch.zeros(1)
        levels = round_levels(x, numbers[0][:, None], minimum, low, high)[0].to(torch.int64) - low
        if bits == 5:  # from the lowest bit on
            parts += (((levels >> 4 & 1).view(-1, 4, 8) << torch.arange(8)).sum(-1).to(torch.uint8),)
        low_bits = (levels & 15).to(torch.uint8)
        return torch.cat([*parts, low_bits[:, :16] | (low_bits[:, 16:] << 4)], dim=1)

    return encode


def _round_factors(
    factors: Sequence[Tensor], units: Sequence[Tensor], low: int, high: int, loss_of: Callable[..., Tensor]
) -> list[Tensor]:
    """Factors [N, n] of sub-blocks as whole multiples of their units: rounded, or neighbours that fit better.

    Args:
        units: [N] each.
        loss_of: losses [N, n] by whole multiples.
    """
    whole = [
        torch.where(unit[:, None] != 0, part / unit[:, None], torch.zeros_like(part)).round_()
        for part, unit in zip(factors, units, strict=True)
    ]
    best, least = [multiple.clamp(low, high) for multiple in whole], torch.tensor(torch.inf)
    for steps in product((0, -1, 1), repeat=len(whole)):
        candidate = [(multiple + step).clamp(low, high) for multiple, step in zip(whole, steps, strict=True)]
        loss = loss_of(*candidate)
        best = [torch.where(loss < least, new, old) for new, old in zip(candidate, best, strict=True)]
        least = torch.minimum(loss, least)
    return best


def _q4_k(x: Tensor, w: Tensor, tries: Sequence[float]) -> Tensor:
    """144 bytes: d and dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes of levels."""
    scale, low = (part.view(-1, 8) for part in affine(x.reshape(-1, _SUB), w.reshape(-1, _SUB), 15, tries, below=True))
    subs, weights, minimum = x.view(-1, 8, _SUB), w.view(-1, 8, _SUB), -low
    (d_bytes, d), (m_bytes, m) = _half(scale.amax(1) / 63), _half(minimum.amax(1) / 63)

    def restore(s: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        return round_levels(subs, (d[:, None] * s)[..., None], -(m[:, None] * offset)[..., None], 0, 15)

    best = _round_factors(
        (scale, minimum), (d, m), 0, 63, lambda *factors: (weights * (restore(*factors)[1] - subs).square()).sum(-1)
    )
    s, o = (factors.to(torch.uint8) for factors in best)
    packed = torch.empty(len(x), 12, dtype=torch.uint8)
    packed[:, :4] = s[:, :4] | (s[:, 4:] >> 4 << 6)
    packed[:, 4:8] = o[:, :4] | (o[:, 4:] >> 4 << 6)
    packed[:, 8:] = (s[:, 4:] & 15) | (o[:, 4:] << 4)
    pairs = restore(*best)[0].to(torch.uint8).view(-1, 4, 2, _SUB)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return torch.cat([d_bytes, m_bytes, packed, nibbles], dim=1)


def _q6_k(x: Tensor, w: Tensor, tries: Sequence[float]) -> Tensor:
    """210 bytes: 128 of low four bits, 64 of high two, 16 signed scales, d."""
    scale = symmetric(x.reshape(-1, 16), w.reshape(-1, 16), -32, tries).view(-1, 16)
    subs, weights = x.view(-1, 16, 16), w.view(-1, 16, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))[:, 0]
    d_bytes, d = _half(largest / -128)

    def restore(s: Tensor) -> tuple[Tensor, Tensor]:
        return round_levels(subs, (d[:, None] * s)[..., None], torch.zeros(1), -32, 31)

    (best,) = _round_factors((scale,), (d,), -128, 127, lambda s: (weights * (restore(s)[1] - subs).square()).sum(-1))
    q = (restore(best)[0] + 32).to(torch.uint8).view(-1, 2, 4, _SUB)
    low = torch.stack([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], dim=2)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    scale_bytes = best.to(torch.int8).view(torch.uint8)
    return torch.cat([low.reshape(-1, 128), high.reshape(-1, 64), scale_bytes, d_bytes], dim=1)


_ENCODERS: dict[str, Encoder] = {
    "Q4_0": _of_32(4, has_minimum=False),
    "Q5_0": _of_32(5, has_minimum=False),
    "Q4_1": _of_32(4, has_minimum=True),
    "Q5_1": _of_32(5, has_minimum=True),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


# -- A whole file --------------------------------------------------------------------------------------------------------

_FILE_TYPES = {
    "Q4_K_M": 15, "Q6_K": 18, "Q4_K": 14, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2, "BF16": 32, "F16": 1,
    "F32": 0,
}  # fmt: skip
"""llama.cpp's numbers of the type that most of a file has."""
MIXES = tuple(map(str.lower, _FILE_TYPES))
"""Each the type of all matrices but the head, which has at least Q6_K's bits; `q4_k_m` is of Q4_K and Q6_K."""
_FEWER_BITS = ("Q4_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""In place of blocks that do not divide a row."""
_COSTS_MOST = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
_PLAIN_PARTS = ("ffn_gate_inp", "ssm_conv1d", "rope_freqs", "norm")
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.")
_REWRITTEN_KEYS = (
    "general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.no",
    "split.count", "split.tensors.count", KV_CHOICE,
)  # fmt: skip
"""Written anew; a file is written in one part, and other weights have another choice."""


@dataclass(frozen=True)
class QuantizedFile:
    """What was written.

    Attributes:
        types: number of tensors by gguf's name of their type.
        nbytes: of all tensors.
        copied_tensors: tensors that had the requested type already.
        weighted_tensors: tensors whose errors were weighted by importance.
    """

    types: Mapping[str, int]
    nbytes: int
    copied_tensors: int
    weighted_tensors: int


def mix_type(name: str, shape: tuple[int, ...], mix: str, layers: int, *, tied: bool) -> str | None:
    """gguf's name of a tensor's type in a mix; None of one that no mix quantizes: vectors, routers, short convolutions.

    `q4_k_m` gives Q6_K to the head, and to the projections to V and out of an MLP in the first and last eighth of the layers
    and every third between. Where blocks of 256 do not divide a row, a type of 32 with at least as many bits replaces them.

    Args:
        name: in the file.
        layers: of the model.
        tied: the embedding is the head as well.
    Raises:
        InputError: no such mix.
    """
    if mix not in MIXES:
        raise InputError(f"no such type of weights: {mix}; choose from {', '.join(MIXES)}")
    if len(shape) < 2 or not name.endswith(".weight") or any(part in name for part in _PLAIN_PARTS):
        return None
    type_name, is_head = mix.upper(), name == ("token_embd.weight" if tied else "output.weight")
    if mix == "q4_k_m":
        layer, eighth = _LAYER.match(name), layers // 8
        index = int(layer[1]) if layer and name.endswith(_COSTS_MOST) else None
        has_more = index is not None and (index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2)
        type_name = "Q6_K" if is_head or has_more else "Q4_K"
    elif is_head and type_name in _FEWER_BITS:
        type_name = "Q6_K"
    types = (type_name, _NARROW.get(type_name, "F16"))
    return next((kind for kind in types if shape[-1] % block_type_named(kind).numbers == 0), "F16")


def write_quantized(
    source: GGUFSource,
    path: Path,
    mix: str,
    importance: Mapping[str, Tensor] | None = None,
    on_tensor: Callable[[int, int], object] = lambda *_: None,
    choice: bytes = b"",
) -> QuantizedFile:
    """Write a model's file with its matrices in the types of a mix.

    Args:
        source: matrices that are quantized already are restored first, unless they have the requested type.
        path: a file that may be overwritten.
        importance: by Hugging Face's names, [in] fp32 each: mean squares of what a matrix's columns are multiplied with.
        on_tensor: called with (tensors written, tensors in all).
        choice: the entry `KV_CHOICE`, if there is to be one.
    Raises:
        InputError: a tensor cannot be restored or quantized, by name; or no such mix.
        OSError: the file cannot be written.
    """
    weights, tensors = source.by_stored_name(importance or {}), source.file.tensors
    targets = _targets(source, mix)
    copied = {name for name, tensor in tensors.items() if tensor.kind == targets[name].kind}
    writer = _open_writer(source, path, targets, mix)
    writer.add_string(KV_CHOICE, b64encode(choice).decode())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, name in enumerate(tensors):
            on_tensor(done, len(tensors))
            raw_rows = source.file.stored_rows(tensors[name])
            blocks = raw_rows if name in copied else _encode(source, name, targets[name].kind, weights.get(name))
            writer.write_tensor_data(blocks.numpy())
        on_tensor(len(tensors), len(tensors))
    finally:
        writer.close()
    types = Counter(block_type(target.kind).name for target in targets.values())
    return QuantizedFile(types, sum(target.nbytes for target in targets.values()), len(copied), len(weights.keys() - copied))


def _targets(source: GGUFSource, mix: str) -> dict[str, GGUFTensor]:
    """Each tensor in its type of a mix; an InputError names one that cannot be restored."""
    tensors, block_count = source.file.tensors, source.file.entries.get(f"{source.architecture}.block_count")
    tied, layers, targets = "output.weight" not in tensors, block_count if isinstance(block_count, int) else 0, {}
    for name, tensor in tensors.items():
        if tensor.fault is not None:
            raise InputError(f"{source.path}: {name} {tensor.fault}")
        type_name = mix_type(name, tensor.shape, mix, layers, tied=tied)
        targets[name] = tensor if type_name is None else replace(tensor, kind=int(gguf.GGMLQuantizationType[type_name]))
    return targets


def _open_writer(source: GGUFSource, path: Path, targets: Mapping[str, GGUFTensor], mix: str) -> gguf.GGUFWriter:
    """A writer that knows all but the tensors' numbers."""
    writer = gguf.GGUFWriter(path, source.architecture)
    for key, value in source.file.entries.items():
        kind, inner = source.file.kinds[key]
        if key not in _REWRITTEN_KEYS and value != []:
            # gguf's writer takes truth values as such.
            exact = bool(value) if kind == gguf.GGUFValueType.BOOL else value
            writer.add_key_value(key, exact, gguf.GGUFValueType(kind), None if inner is None else gguf.GGUFValueType(inner))
    writer.add_file_type(_FILE_TYPES[mix.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, target in targets.items():
        shape, gguf_type = (*target.shape[:-1], target.row_bytes), gguf.GGMLQuantizationType(target.kind)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), target.nbytes, gguf_type)
    return writer


def _encode(source: GGUFSource, name: str, kind: int, importance: Tensor | None) -> Tensor:
    """Bytes of a tensor in its new type: [rows, bytes of a row] uint8."""
    tensor = source.file.tensors[name]
    raw_rows, restore = source.file.stored_rows(tensor), block_type(tensor.kind).restore
    # Each matrix for itself: of experts, each has its own importance.
    width, each = tensor.shape[-1], tensor.shape[-2]
    step, parts = max(1, _AT_ONCE // width), list[Tensor]()
    for first in range(0, len(raw_rows), each):
        counts = None if importance is None else importance[first // each]
        for begin in range(first, first + each, step):
            rows = restore(raw_rows[begin : min(begin + step, first + each)]).view(-1, width)
            try:
                parts.append(quantize(rows, block_type(kind).name, counts))
            except InputError as error:
                raise InputError(f"{source.path}: {name}: {error}") from None
    return torch.cat(parts)
