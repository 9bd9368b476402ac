"""The formats again, one number after the other in numpy FP32, written from their descriptions; they share no code with ours.

`encode(name, x)` gives a vector's bytes in its origin's layout, `decode(name, data, head_dim)` the vector again.
"""

from __future__ import annotations

import math

import numpy as np

f32 = np.float32
TQ3_SIGNS = "+-++--+-++-+-+--+--++-+--+++--+-"
TBQ4_CENTROIDS = [0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556]
TBQ4_BOUNDARIES = [0.0, 0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232]
MANTHAN_CENTROIDS = [-2.151946, -1.343910, -0.756006, -0.245094, 0.245094, 0.756006, 1.343910, 2.151946]
MANTHAN_BOUNDARIES = [-1.747928, -1.049958, -0.500550, 0.0, 0.500550, 1.049958, 1.747928]


def bit_string(levels, bits):
    """Bytes of levels as a stream of bits, least significant first."""
    stream = "".join(format(int(level), f"0{bits}b")[::-1] for level in levels)
    return bytes(int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8))


def levels_of(data, bits, count):
    stream = "".join(format(byte, "08b")[::-1] for byte in data)
    return [int(stream[i * bits : (i + 1) * bits][::-1], 2) for i in range(count)]


def half_away(v):
    """C's roundf of an FP32 number."""
    exact = float(v)
    return int(math.copysign(math.floor(abs(exact) + 0.5), exact))


def add_up(numbers):
    total = f32(0)
    for number in numbers:
        total = f32(total + number)
    return total


def numpy_sum(numbers):
    """numpy's pairwise summation, as its documentation and source describe it."""
    n = len(numbers)
    if n > 128:
        half = n // 2 - (n // 2) % 8
        return f32(numpy_sum(numbers[:half]) + numpy_sum(numbers[half:]))
    r = list(numbers[:8])
    for i in range(8, n - n % 8, 8):
        r = [f32(r[j] + numbers[i + j]) for j in range(8)]
    total = f32(f32(f32(r[0] + r[1]) + f32(r[2] + r[3])) + f32(f32(r[4] + r[5]) + f32(r[6] + r[7])))
    for number in numbers[n - n % 8 :]:
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


def blocks(x, size):
    return [x[i : i + size] for i in range(0, len(x), size)]


def inverse(d):
    """1 / d, 0 where that is no number of FP32."""
    if d == 0 or not np.isfinite(f32(1) / d):
        return f32(0)
    return f32(f32(1) / d)


# -- manthan3 --------------------------------------------------------------------------------------------------------------
def encode_manthan3(x):
    r = f32(np.sqrt(numpy_sum([f32(v * v) for v in x])))
    root = f32(math.sqrt(len(x)))
    levels = []
    for v in x:
        s = f32(f32(v / f32(r + f32(1e-8))) * root)
        levels.append(sum(f32(b) < s for b in MANTHAN_BOUNDARIES))
    return r.tobytes() + bit_string(levels, 3)


def decode_manthan3(data, head_dim):
    r = np.frombuffer(data[:4], "<f4")[0]
    root = f32(math.sqrt(head_dim))
    return [f32(f32(f32(MANTHAN_CENTROIDS[level]) / root) * r) for level in levels_of(data[4:], 3, head_dim)]


# -- tq3_0 -----------------------------------------------------------------------------------------------------------------
def encode_tq3_0(x):
    out = b""
    for block in blocks(x, 32):
        y = wht([v if sign == "+" else f32(-v) for v, sign in zip(block, TQ3_SIGNS, strict=True)])
        y = [f32(v * f32(0.17677669)) for v in y]
        d = f32(max(abs(v) for v in y) / f32(1.510))
        levels, signs = [], []
        for v in y:
            scaled = f32(v * inverse(d))
            level = (0 if scaled < f32(-0.9814) else 1) if scaled < 0 else (2 if scaled < f32(0.9814) else 3)
            residual = f32(v - f32(f32([-1.510, -0.4528, 0.4528, 1.510][level]) * d))
            levels.append(level)
            signs.append(int(residual >= 0))
        out += bit_string(levels, 2) + bit_string(signs, 1) + np.float16(d).tobytes()
    return out


def decode_tq3_0(data, head_dim):
    x = []
    for block in blocks(data, 14):
        gamma = f32(np.frombuffer(block[12:], "<f2")[0])
        y = wht([f32(f32([-1.510, -0.4528, 0.4528, 1.510][level]) * gamma) for level in levels_of(block[:8], 2, 32)])
        y = [f32(v * f32(0.17677669)) for v in y]
        x += [v if sign == "+" else f32(-v) for v, sign in zip(y, TQ3_SIGNS, strict=True)]
    return x


# -- tbq4_0 ----------------------------------------------------------------------------------------------------------------
def tbq4_signs():
    generator = np.random.default_rng(42)
    return generator.choice([-1, 1], 128), generator.choice([-1, 1], 128)


def tbq4_centroid(level):
    return f32(TBQ4_CENTROIDS[level - 8] if level >= 8 else -TBQ4_CENTROIDS[7 - level])


def tbq4_turn(x, before, after):
    y = wht([f32(v * f32(s)) for v, s in zip(x, before, strict=True)])
    return [f32(f32(v * f32(0.08838834764831845)) * f32(s)) for v, s in zip(y, after, strict=True)]


def encode_tbq4_0(x):
    out, (s1, s2) = b"", tbq4_signs()
    mids = sorted({f32(b) for b in TBQ4_BOUNDARIES} | {f32(-b) for b in TBQ4_BOUNDARIES})
    assert len(mids) == 15
    for block in blocks(x, 128):
        norm = f32(np.sqrt(add_up([f32(v * v) for v in block])))
        if norm <= f32(1e-10):
            norm = f32(0)
        y = tbq4_turn([f32(v * inverse(norm)) for v in block], s1, s2)
        levels = [sum(mid <= v for mid in mids) for v in y]
        length = f32(np.sqrt(add_up([f32(tbq4_centroid(level) * tbq4_centroid(level)) for level in levels])))
        packed = bytes(levels[j] | levels[j + 1] << 4 for j in range(0, 128, 2))
        out += np.float16(f32(norm / length)).tobytes() + packed
    return out


def decode_tbq4_0(data, head_dim):
    x, (s1, s2) = [], tbq4_signs()
    for block in blocks(data, 66):
        d = f32(np.frombuffer(block[:2], "<f2")[0])
        levels = [nibble for byte in block[2:] for nibble in (byte & 15, byte >> 4)]
        x += [f32(v * d) for v in tbq4_turn([tbq4_centroid(level) for level in levels], s2, s1)]
    return x


# -- ggml ------------------------------------------------------------------------------------------------------------------
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


def encode_q8_0(x):
    out = b""
    for block in blocks(x, 32):
        d = f32(max(abs(v) for v in block) / f32(127))
        out += np.float16(d).tobytes() + bytes(half_away(f32(v * inverse(d))) & 255 for v in block)
    return out


def decode_q8_0(data, head_dim):
    x = []
    for block in blocks(data, 34):
        d = f32(np.frombuffer(block[:2], "<f2")[0])
        x += [f32(f32(byte - 256 if byte > 127 else byte) * d) for byte in block[2:]]
    return x


# -- fp8_e4m3 --------------------------------------------------------------------------------------------------------------
def e4m3_number(code):
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


def encode_fp8_e4m3(x):
    out = []
    for v in x:
        exact = min(abs(float(v)), 448.0)
        # Nearest of all finite numbers; of two equally near, the even code.
        code = min(range(127), key=lambda c: (abs(e4m3_number(c) - exact), c & 1))
        out.append(code | (128 if np.signbit(v) else 0))
    return bytes(out)


def decode_fp8_e4m3(data, head_dim):
    return [f32(e4m3_number(code)) for code in data]


# -- KIVI ------------------------------------------------------------------------------------------------------------------
def kivi_group(numbers, bits):
    """(levels, scale, zero) of one group."""
    steps = 2**bits - 1
    low, high = min(numbers), max(numbers)
    scale = f32(f32(f32(high - low) / f32(steps)) + f32(1e-10))
    return [min(steps, max(0, half_away(f32(f32(v - low) / scale)))) for v in numbers], scale, f32(low)


def encode_kivi_values(x, bits, group):
    found = [kivi_group(part, bits) for part in blocks(x, group)]
    codes = bit_string([level for levels, _, _ in found for level in levels], bits)
    return codes + b"".join(s.tobytes() for _, s, _ in found) + b"".join(z.tobytes() for _, _, z in found)


def encode_kivi_keys(x, bits):
    """x: [G, D]."""
    found = [kivi_group(list(channel), bits) for channel in x.T]
    codes = b"".join(bit_string(levels, bits) for levels, _, _ in found)
    return codes + b"".join(s.tobytes() for _, s, _ in found) + b"".join(z.tobytes() for _, _, z in found)


def decode_kivi(data, bits, group, count):
    """`count` numbers in groups one after the other: of a value's channels, or of each channel's tokens."""
    size, groups = count * bits // 8, count // group
    levels = levels_of(data[:size], bits, count)
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


ENCODERS = {
    name[7:]: encoder
    for name, encoder in list(globals().items())
    if name.startswith("encode_") and not name[7:].startswith("kivi")
}
DECODERS = {
    name[7:]: decoder
    for name, decoder in list(globals().items())
    if name.startswith("decode_") and not name[7:].startswith("kivi")
}


def encode(name, x):
    with np.errstate(all="ignore"):
        return ENCODERS[name](list(x))


def decode(name, data, head_dim):
    with np.errstate(all="ignore"):
        return np.array(DECODERS[name](bytes(data), head_dim), np.float32)
