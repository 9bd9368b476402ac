"""The rivals again, one number after the other in numpy; they share no code with the laboratory's."""

from __future__ import annotations

import math

import numpy as np
from format_oracles import bit_string, blocks, f32, unpack_levels


def add_up(numbers):
    total = f32(0)
    for number in numbers:
        total = f32(total + number)
    return total


def wht(y):
    y, h = list(y), 1
    while h < len(y):
        for i in range(0, len(y), 2 * h):
            for j in range(i, i + h):
                y[j], y[j + h] = f32(y[j] + y[j + h]), f32(y[j] - y[j + h])
        h *= 2
    return y


def inverse(d):
    """1 / d, 0 where that is no number of FP32."""
    if d == 0 or not np.isfinite(f32(1) / d):
        return f32(0)
    return f32(f32(1) / d)


# -- q4_0 ------------------------------------------------------------------------------------------------------------------
def encode_q4_0(x):
    out = b""
    for block in blocks(x, 32):
        largest = f32(0)
        for v in block:
            if abs(v) > abs(largest):
                largest = v
        d = f32(largest / f32(-8))
        levels = [min(15, int(f32(f32(v * inverse(d)) + f32(8.5)))) for v in block]
        out += np.float16(d).tobytes() + bytes(levels[j] | levels[j + 16] << 4 for j in range(16))
    return out


def decode_q4_0(data, head_dim):
    x = []
    for block in blocks(data, 18):
        d = f32(np.frombuffer(block[:2], "<f2")[0])
        levels = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
        x += [f32(f32(level - 8) * d) for level in levels]
    return x


# -- q4_0_rot ----------------------------------------------------------------------------------------------------------------
def hadamard(x, size):
    """Each `size` numbers times the Hadamard matrix over the root of its size."""
    factor = f32(1 / math.sqrt(size))
    return [f32(v * factor) for part in blocks(x, size) for v in wht(part)]


def rotated_by(side, head_dim):
    """The largest power of two in head_dim for K, 64 for V."""
    return max(2**n for n in range(6, 12) if head_dim % 2**n == 0) if side == "k" else 64


def encode_q4_0_rot(x, side):
    return encode_q4_0(hadamard(x, rotated_by(side, len(x))))


def decode_q4_0_rot(data, head_dim, side):
    return np.array(hadamard(decode_q4_0(data, head_dim), rotated_by(side, head_dim)), np.float32)


# -- KVarN: float64, but for what is rounded --------------------------------------------------------------------------------
def kvarn_balance(tile):
    """(column scales, row scales) of a tile, float64."""

    def even(columns, rows):
        return tile / np.exp(columns) / np.exp(rows)[:, None]

    def follow(logs, spreads):
        clamped_spreads = [min(1e3, max(1e-3, spread)) for spread in spreads]
        return [min(10.0, max(-0.3, log + math.log(spread))) for log, spread in zip(logs, clamped_spreads, strict=True)]

    def imbalance(z):
        return sum(max(spread) / max(min(spread), 1e-8) for spread in (np.std(z, axis=0, ddof=1), np.std(z, axis=1, ddof=1)))

    columns, rows = [0.0] * len(tile[0]), [0.0] * len(tile)
    least, best = imbalance(even(columns, rows)), (columns, rows)
    for _ in range(16):
        columns = follow(columns, np.std(even(columns, rows), axis=0, ddof=1))
        rows = follow(rows, np.std(even(columns, rows), axis=1, ddof=1))
        score = imbalance(even(columns, rows))
        if score < least * (1 - 1e-9):
            least, best = score, (columns, rows)
    return [math.exp(c) for c in best[0]], [math.exp(r) for r in best[1]]


def encode_kvarn(x, bits, side):
    """x: [128, D]; (bytes, and how far each value lies from the middle between two levels)."""
    rotated = np.array([hadamard(list(row), len(row)) for row in x], np.float32)
    tile = (rotated.T if side == "k" else rotated).astype(np.float64)
    columns, rows = kvarn_balance(tile)
    steps, codes, scales, zeros, margins = 2**bits - 1, b"", [], [], []
    for line, r in zip(tile.tolist(), rows, strict=True):
        z = [v / c / r for v, c in zip(line, columns, strict=True)]
        step = max((max(z) - min(z)) / steps, 1e-10)
        values = [(v - min(z)) / step for v in z]
        margins.append([abs(v - math.floor(v) - 0.5) for v in values])
        codes += bit_string([min(steps, max(0, round(v))) for v in values], bits)
        scales.append(r * step)
        zeros.append(r * min(z))
    halves = [np.array(numbers, np.float32).astype("<f2").tobytes() for numbers in (scales, zeros, columns)]
    order = (0, 1, 2) if side == "k" else (2, 0, 1)
    return codes + b"".join(halves[i] for i in order), margins


def decode_kvarn(data, bits, side, head_dim):
    """[128, D] from the bytes of a tile."""
    rows, columns = (head_dim, 128) if side == "k" else (128, head_dim)
    size = rows * columns * bits // 8
    levels, numbers = unpack_levels(data[:size], bits, rows * columns), np.frombuffer(data[size:], "<f2").astype(np.float32)
    across = numbers[2 * rows :] if side == "k" else numbers[:columns]
    scale, zero = (numbers[:rows], numbers[rows : 2 * rows]) if side == "k" else (numbers[columns:-rows], numbers[-rows:])
    tile = [
        [f32(f32(f32(f32(level) * scale[i]) + zero[i]) * across[j]) for j, level in enumerate(line)]
        for i, line in enumerate(blocks(levels, columns))
    ]
    tokens = np.array(tile, np.float32)
    return np.array([hadamard(list(token), head_dim) for token in (tokens.T if side == "k" else tokens)], np.float32)


# -- vLLM's turboquant_4bit_nc --------------------------------------------------------------------------------------------
def encode_vllm_nc4(x, side, boundaries):
    """Boundaries: 15 numbers between K's levels."""
    if side == "v":
        low = min(x)
        scale = max(f32(f32(max(x) - low) / f32(15)), f32(1e-8))
        levels = [min(15, max(0, int(f32(f32(f32(v - low) / scale) + f32(0.5))))) for v in x]
        return bit_string(levels, 4) + np.float16(scale).tobytes() + np.float16(low).tobytes()
    norm = f32(math.sqrt(add_up([f32(v * v) for v in x])))
    rotated = hadamard([f32(v * inverse(norm)) for v in x], len(x))
    return bit_string([sum(f32(b) <= y for b in boundaries) for y in rotated], 4) + np.float16(norm).tobytes()


def decode_vllm_nc4(data, head_dim, side, centroids):
    levels, numbers = unpack_levels(data, 4, head_dim), np.frombuffer(data[head_dim // 2 :], "<f2").astype(np.float32)
    if side == "v":
        return np.array([f32(f32(f32(level) * numbers[0]) + numbers[1]) for level in levels], np.float32)
    c = [f32(centroids[level]) for level in levels]
    length = f32(math.sqrt(add_up([f32(v * v) for v in c])))
    return np.array([f32(v * numbers[0]) for v in hadamard([f32(v / length) for v in c], head_dim)], np.float32)
