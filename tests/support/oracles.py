"""An independent oracle: Qwen3 and the `tq4` formats in float64, with numpy alone and none of the project's code.

Written from the published description, one token and one head at a time, so that it can be read beside it. Everything
comes in as plain arrays: weights, centroids, boundaries, rotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Store = Callable[[int, str, int, int, Array], Array]
"""(layer, "k" or "v", KV head, position, vector [D]) -> the vector that attention will see of it."""

LARGEST_FP16 = 65504.0


# -- Rounding ------------------------------------------------------------------------------------------------------------
def bf16(x: Array) -> Array:
    """Round finite numbers to BF16, half to even, on the bits of their FP32: the upper 16 stay."""
    bits = np.atleast_1d(np.asarray(x, dtype=np.float32)).view(np.uint32).astype(np.uint64)
    upper, lower = bits >> 16, bits & 0xFFFF
    odd = (upper & 1) == 1
    up = (lower > 0x8000) | ((lower == 0x8000) & odd)
    rounded = ((upper + up) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return rounded.reshape(np.shape(x))


# -- The model -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shapes:
    """What the weights alone do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """One vector: x / sqrt(mean(x^2) + eps) * weight."""
    return x / math.sqrt(float(x @ x) / len(x) + eps) * weight


def rope(x: Array, position: int, theta: float) -> Array:
    """One head's vector, its pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    half = len(x) // 2
    angle = position * theta ** (-2 * np.arange(half) / len(x))
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.empty(len(x))
    out[:half] = x[:half] * cos - x[half:] * sin
    out[half:] = x[half:] * cos + x[:half] * sin
    return out


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1.0 + np.exp(-x))


def attend(q: Array, keys: Sequence[Array], values: Sequence[Array], scale: float) -> Array:
    """One query of one head over everything it may see."""
    scores = np.array([float(q @ key) * scale for key in keys])
    weights = np.exp(scores - scores.max())
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / weights.sum()


def attend_rounded(q: Array, keys: Sequence[Array], values: Sequence[Array], scale: float, block_size: int) -> Array:
    """As `attend`, as a BF16 device does: an online softmax over blocks, each block's probabilities and the result in BF16."""
    running_max, running_sum, out = -math.inf, 0.0, np.zeros(len(values[0]))
    for begin in range(0, len(keys), block_size):
        scores = np.array([float(q @ key) * scale for key in keys[begin : begin + block_size]])
        block_max = float(scores.max())
        rounded = bf16(np.exp(scores - block_max))
        block_out = sum(w * v for w, v in zip(rounded, values[begin : begin + block_size], strict=True))
        new_max = max(running_max, block_max)
        old, new = math.exp(running_max - new_max), math.exp(block_max - new_max)
        out, running_sum, running_max = out * old + block_out * new, running_sum * old + rounded.sum() * new, new_max
    return bf16(out / running_sum)


def decoder_layer(
    hidden: list[Array],
    weights: dict[str, Array],
    shapes: Shapes,
    index: int,
    store: Store | None = None,
    bf16_block: int | None = None,
) -> list[Array]:
    """One layer over a whole sequence, causal, every token attending to the stored K and V.

    With `bf16_block`, activations are rounded to BF16 where the published device rounds them: both norms of the hidden
    state, q after RoPE, attention (by blocks of so many tokens), the product of SwiGLU, and the state after each residual.
    """
    heads, kv_heads, dim, eps = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.rms_norm_eps
    rounded = bf16 if bf16_block else np.asarray
    keys: list[list[Array]] = [[] for _ in range(kv_heads)]
    values: list[list[Array]] = [[] for _ in range(kv_heads)]
    out = []
    for position, h in enumerate(hidden):
        x = rounded(rms_norm(h, weights["input_norm"], eps))
        q, k, v = (weights[name] @ x for name in ("q_proj", "k_proj", "v_proj"))
        for g in range(kv_heads):
            own = slice(g * dim, (g + 1) * dim)
            key = rope(rms_norm(k[own], weights["k_norm"], eps), position, shapes.rope_theta)
            keys[g].append(store(index, "k", g, position, key) if store else key)
            values[g].append(store(index, "v", g, position, v[own]) if store else v[own])
        attended = np.empty(heads * dim)
        for head in range(heads):
            own = slice(head * dim, (head + 1) * dim)
            query = rounded(rope(rms_norm(q[own], weights["q_norm"], eps), position, shapes.rope_theta))
            g = head // (heads // kv_heads)
            seen = (query, keys[g], values[g], 1 / math.sqrt(dim))
            attended[own] = attend_rounded(*seen, bf16_block) if bf16_block else attend(*seen)
        h = rounded(h + weights["o_proj"] @ attended)
        x = rounded(rms_norm(h, weights["post_norm"], eps))
        product = rounded(silu(weights["gate_proj"] @ x) * (weights["up_proj"] @ x))
        out.append(rounded(h + weights["down_proj"] @ product))
    return out


def model_logits(weights: dict[str, Any], shapes: Shapes, token_ids: Sequence[int], store: Store | None = None) -> Array:
    """Logits [T, vocab] after each token of one sequence.

    Args:
        weights: `embedding`, `layers` (a list of dicts of arrays), `final_norm`, `lm_head`; projections are [out, in].
        store: what K and V go through before anybody attends to them; nothing if None.
    """
    hidden = [weights["embedding"][token] for token in token_ids]
    for index, layer in enumerate(weights["layers"]):
        hidden = decoder_layer(hidden, layer, shapes, index, store)
    return np.array([weights["lm_head"] @ rms_norm(h, weights["final_norm"], shapes.rms_norm_eps) for h in hidden])


def greedy(weights: dict[str, Any], shapes: Shapes, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """The most likely continuation, and the smallest lead of a chosen token over the next best one."""
    tokens, lead = list(prompt), math.inf
    for _ in range(new_tokens):
        logits = model_logits(weights, shapes, tokens)[-1]
        second, first = sorted(logits)[-2:]
        lead = min(lead, first - second)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :], lead


# -- tq4 and tq4_seed ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tables:
    """What a layer's vectors are quantized with: centroids [16], boundaries [15], rotation [D, D] (y = x @ rotation)."""

    centroids: Array
    boundaries: Array
    rotation: Array


@dataclass(frozen=True)
class Rotated:
    """A vector on its way into a cache.

    Attributes:
        norm: what it was divided by.
        unit: [D] x / norm, not rounded.
        y: [D] bf16(unit) @ rotation.
        level: [D] #{b : y >= b}.
    """

    norm: float
    unit: Array
    y: Array
    level: Array


SEED_EPS = 1e-6


def rotate(x: Array, tables: Tables, eps: float = 0.0) -> Rotated:
    """Norm, BF16 unit vector, rotation, levels. `eps` is added to the squared norm (1e-6 in the published layout)."""
    norm = math.sqrt(float(x @ x) + eps)
    unit = x / norm if norm else np.zeros(len(x))
    y = bf16(unit) @ tables.rotation
    level = (y[:, None] >= tables.boundaries).sum(axis=1)
    return Rotated(norm, unit, y, level)


def exact_scale(norm: float, level: Array, centroids: Array) -> float:
    """gamma / ||c[level]||, before it is rounded to FP16."""
    return norm / math.sqrt(float(np.sum(centroids[level] ** 2)))


def fp16(x: float) -> float:
    """Round to FP16, saturating at its largest finite number."""
    return float(np.float16(min(x, LARGEST_FP16)))


def pack(level: Array) -> Array:
    """byte[j] = level[j] | level[j + D/2] << 4."""
    half = len(level) // 2
    return np.array([int(level[j]) | int(level[j + half]) << 4 for j in range(half)], dtype=np.uint8)


def unpack(codes: Array) -> Array:
    """Inverse of `pack`."""
    return np.concatenate([codes % 16, codes // 16]).astype(int)


def tq4_quantize(x: Array, tables: Tables) -> tuple[Array, float]:
    """Packed codes [D/2] and the FP16 scale of one vector."""
    rotated = rotate(x, tables)
    return pack(rotated.level), fp16(exact_scale(rotated.norm, rotated.level, tables.centroids))


def tq4_dequantize(codes: Array, scale: float, tables: Tables) -> Array:
    """The vector [D] that codes and scale stand for."""
    return tables.rotation @ (scale * tables.centroids[unpack(codes)])


def tq4_seed_quantize(x: Array, tables: Tables) -> tuple[Array, float]:
    """Levels [D], one a byte, and the FP32 norm, in the published layout."""
    rotated = rotate(x, tables, SEED_EPS)
    return rotated.level.astype(np.uint8), float(np.float32(rotated.norm))


def _seed_rotated(level: Array, norm: float, centroids: Array) -> Array:
    c = centroids[level.astype(int)]
    return c / math.sqrt(float(c @ c) + SEED_EPS) * norm


def tq4_seed_dequantize(level: Array, norm: float, tables: Tables) -> Array:
    """The vector [D], rounded to BF16 before and after it is turned back."""
    return bf16(tables.rotation @ bf16(_seed_rotated(level, norm, tables.centroids)))


# -- What rounding explains ------------------------------------------------------------------------------------------------
# FP32 arithmetic is off by a little, and a value beside a rounding point may then round the other way. That is no error,
# and it is no licence either: below, a stored number may differ from the oracle's only where the numbers that could have
# been rounded, `error` up and `error` down, round to different results.
SUM_ERROR = 1e-6
"""How far an FP32 product of a unit vector with a rotation is off; measured 2e-7."""


@dataclass
class Verdict:
    """Stored numbers compared with the oracle's: how many, how many differ, how many of these by more than rounding."""

    values: int = 0
    different: int = 0
    unexplained: int = 0

    def add(self, different: Array, explained: Array) -> None:
        """Count the elements of two boolean arrays."""
        self.values += different.size
        self.different += int(np.sum(different))
        self.unexplained += int(np.sum(different & ~explained))


def judge(kv_format: str, x: Array, fields: dict[str, Array], tables: Tables, error: float) -> Verdict:
    """Compare what was stored for a vector with what the oracle would store.

    Args:
        kv_format: "fp32", "bf16", "tq4" or "tq4_seed".
        x: [D], the oracle's vector.
        fields: what was stored of the vector, by field name.
        error: how far each coordinate of the vector that was really stored may lie off x, relative to its length.
    """
    verdict = Verdict()
    if kv_format in ("fp32", "bf16"):
        reach = error * math.sqrt(float(x @ x))
        low, high = (x - reach, x + reach) if kv_format == "fp32" else (bf16(x - reach), bf16(x + reach))
        stored = fields["data"].astype(np.float64)
        inside = (low <= stored) & (stored <= high)
        verdict.add(~inside if kv_format == "fp32" else stored != bf16(x), inside)
        return verdict
    packed = kv_format == "tq4"
    rotated = rotate(x, tables, 0.0 if packed else SEED_EPS)
    level = unpack(fields["codes"]) if packed else fields["codes"].astype(int)
    # A unit coordinate beside a tie may have become its neighbour in BF16, which moves every y by its row of the rotation.
    flips = bf16(rotated.unit + error) - bf16(rotated.unit - error)
    reach = SUM_ERROR + flips @ np.abs(tables.rotation)
    explained = np.zeros(len(x), dtype=bool)
    for i in np.flatnonzero(level != rotated.level):
        ours, theirs = int(rotated.level[i]), int(level[i])
        explained[i] = abs(ours - theirs) == 1 and abs(rotated.y[i] - tables.boundaries[min(ours, theirs)]) <= reach[i]
    verdict.add(level != rotated.level, explained)
    if packed:
        scale, exact = float(fields["scale"]), exact_scale(rotated.norm, level, tables.centroids)
        allowed = fp16(exact * (1 - error)) <= scale <= fp16(exact * (1 + error))
        verdict.add(np.array(scale != fp16(exact)), np.array(allowed))
    else:
        off = abs(float(fields["norm"]) - rotated.norm) > error * rotated.norm
        verdict.add(np.array(off), np.array(False))
    return verdict


def judge_restored(kv_format: str, restored: Array, fields: dict[str, Array], tables: Tables, error: float) -> Verdict:
    """Compare what was read back from a vector's fields with what the oracle makes of the very same fields.

    Args:
        restored: [D], as read.
        error: of FP32 arithmetic, relative to the vector's length.
    """
    verdict = Verdict()
    if kv_format == "tq4_seed":
        inner = _seed_rotated(fields["codes"], float(fields["norm"]), tables.centroids)
        reach = error * math.sqrt(float(inner @ inner))
        flips = bf16(inner + reach) - bf16(inner - reach)
        outer = tables.rotation @ bf16(inner)
        reach_out = reach + np.abs(tables.rotation) @ flips
        inside = (bf16(outer - reach_out) <= restored) & (restored <= bf16(outer + reach_out))
        verdict.add(restored != bf16(outer), inside)
        return verdict
    if kv_format == "tq4":
        exact = tq4_dequantize(fields["codes"], float(fields["scale"]), tables)
        inside = np.abs(restored - exact) <= error * math.sqrt(float(exact @ exact))
    else:
        inside = restored == fields["data"].astype(np.float64)
    verdict.add(~inside, inside)
    return verdict
