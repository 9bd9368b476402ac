"""Formats without an origin's bytes, one number after the other in numpy FP32; they share no code with ours."""

from __future__ import annotations

import math

import numpy as np

f32 = np.float32


def bit_string(levels, bits):
    """Bytes of levels as a stream of bits, least significant first."""
    stream = "".join(format(int(level), f"0{bits}b")[::-1] for level in levels)
    return bytes(int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8))


def unpack_levels(data, bits, count):
    stream = "".join(format(byte, "08b")[::-1] for byte in data)
    return [int(stream[i * bits : (i + 1) * bits][::-1], 2) for i in range(count)]


def half_away(v):
    """C's roundf of an FP32 number."""
    exact = float(v)
    return int(math.copysign(math.floor(abs(exact) + 0.5), exact))


def blocks(x, size):
    return [x[i : i + size] for i in range(0, len(x), size)]


# -- KIVI ------------------------------------------------------------------------------------------------------------------
def kivi_group(numbers, bits):
    """(levels, scale, zero) of one group."""
    steps = 2**bits - 1
    low, high = min(numbers), max(numbers)
    scale = f32(f32(f32(high - low) / f32(steps)) + f32(1e-10))
    return [min(steps, max(0, half_away(f32(f32(v - low) / scale)))) for v in numbers], scale, f32(low)


def encode_kivi_values(x, bits, group):
    groups = [kivi_group(part, bits) for part in blocks(x, group)]
    codes = bit_string([level for levels, _, _ in groups for level in levels], bits)
    return codes + b"".join(s.tobytes() for _, s, _ in groups) + b"".join(z.tobytes() for _, _, z in groups)


def encode_kivi_keys(x, bits):
    """x: [G, D]."""
    groups = [kivi_group(list(channel), bits) for channel in x.T]
    codes = b"".join(bit_string(levels, bits) for levels, _, _ in groups)
    return codes + b"".join(s.tobytes() for _, s, _ in groups) + b"".join(z.tobytes() for _, _, z in groups)


def decode_kivi(data, bits, group, count):
    """`count` numbers in groups one after the other: of a value's channels, or of each channel's tokens."""
    size, groups = count * bits // 8, count // group
    levels = unpack_levels(data[:size], bits, count)
    scales, zeros = (np.frombuffer(data[size + 4 * groups * i : size + 4 * groups * (i + 1)], "<f4") for i in (0, 1))
    return [f32(f32(f32(level) * scales[i // group]) + zeros[i // group]) for i, level in enumerate(levels)]


# -- tq2 … tq8, from levels ------------------------------------------------------------------------------------------------
def encode_tq_levels(levels, bits):
    """Level bits cut into widths 8, 4, 2, 1, low bits first; each cut's part p of the vector at bit p * width of its bytes."""
    out, shift = b"", 0
    for width in (8, 4, 2, 1):
        if bits & width:
            size = len(levels) * width // 8
            packed = [0] * size
            for j, level in enumerate(levels):
                packed[j % size] |= ((int(level) >> shift) % 2**width) << (j // size * width)
            out += bytes(packed)
            shift += width
    return out
