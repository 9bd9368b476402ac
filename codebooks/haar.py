"""Haar-distributed rotations, one per layer, shared by K and V; the same bits on every machine.

The rotation of layer l: a D x D Gaussian seeded `42 + 1000 * l`, its QR with the diagonal of R positive, Q rounded to BF16.

The publication draws the Gaussian with torch and factors it in FP32; both depend on the machine. Here the Gaussian has the
bits of torch on a CPU with AVX2, and the factorization is in float64, each step an elementwise IEEE operation or a sum in a
fixed order. The published matrices therefore differ in a few entries of 16,384.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEED, SEED_STRIDE = 42, 1000
_BLOCK = 16  # torch draws 16 numbers at a time: eight radii, then eight angles

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def compute_rotation(layer: int, head_dim: int) -> Tensor:
    """Compute a layer's rotation [D, D] bf16 on the host; `codebooks.haar_rotation` reads the shipped one if there is one.

    Row vectors: `y = x @ rotation`, back with `y @ rotation.T`. A ValueError of a negative layer or a head_dim below 1.
    Source: TurboQuant (arXiv 2504.19874); seeds of the public Qwen3-14B kernels.
    """
    if layer < 0 or head_dim < 1:
        raise ValueError(f"no rotation for layer {layer} and head_dim {head_dim}")
    gaussian = draw_gaussian(SEED + SEED_STRIDE * layer, head_dim * head_dim).reshape(head_dim, head_dim)
    return torch.from_numpy(orthogonal_factor(gaussian.astype(np.float64))).to(torch.bfloat16)


def orthogonal_factor(matrix: Doubles) -> Doubles:
    """Q [n, n] float64 of the QR factorization with a positive diagonal of R, by modified Gram-Schmidt; full rank.

    Errors grow with the condition number, about 1e-13 for a Gaussian of 128: far below a BF16 step.
    """
    columns = matrix.T.copy()
    for index, column in enumerate(columns):
        column /= np.sqrt(_sum_in_order(column * column))
        rest = columns[index + 1 :]
        rest -= _sum_in_order(rest * column)[:, None] * column
    return np.ascontiguousarray(columns.T)


def _sum_in_order(x: Doubles) -> Doubles:
    """Sum over the last axis from first to last: a running sum leaves no library the choice of another order."""
    total: Doubles = np.cumsum(x, axis=-1)[..., -1]
    return total


def draw_gaussian(seed: int, count: int) -> Floats:
    """`torch.randn(count)` [count] fp32 of a CPU generator with this seed, to the bit of torch's AVX2 code, on every machine.

    A count that 16 does not divide gets the beginning of the next longer draw.
    """
    # numpy promises that the stream of this generator never changes. 24 bits make a uniform number.
    raw = np.random.RandomState(seed).randint(0, 2**32, -(-count // _BLOCK) * _BLOCK, np.uint32)
    uniform = ((raw & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)).reshape(-1, 2, _BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * _log(np.float32(1) - uniform[:, 0]))
    sine, cosine = _sine_cosine(np.float32(2 * np.pi) * uniform[:, 1])
    gaussian: Floats = np.stack([radius * cosine, radius * sine], axis=1).ravel()[:count]
    return gaussian


# -- Elementary functions as torch's vector code has them: Cephes' polynomials, FP32, with fused multiply-adds ------------
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)  # fmt: skip
_LN2_LOW, _LN2_HIGH = np.float32(-2.12194440e-4), np.float32(0.693359375)
_SQRT_HALF = np.float32(0.707106781186547524)
_FOUR_BY_PI = np.float32(1.27323954473516)
_MINUS_QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)  # in three parts
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _fma(a: Floats, b: Floats | np.float32, c: Floats | np.float32) -> Floats:
    """a * b + c. In float64 the product is exact, and the sum is rounded once more than in hardware, which never showed."""
    result: Floats = (a.astype(np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(np.float32)
    return result


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fma(value, x, np.float32(coefficient))
    return value


def _log(x: Floats) -> Floats:
    """Natural logarithm of x in (0, 1]."""
    mantissa, exponent = np.frexp(x)  # mantissa in [1/2, 1)
    small = mantissa < _SQRT_HALF
    power = exponent.astype(np.float32) - small.astype(np.float32)
    x = np.where(small, mantissa + mantissa, mantissa) - np.float32(1)
    square = x * x
    y = _fma(_polynomial(x, _LOG) * x, square, power * _LN2_LOW) - square * np.float32(0.5)
    return x + y + power * _LN2_HIGH


def _sine_cosine(x: Floats) -> tuple[Floats, Floats]:
    """Sine and cosine of x in [0, 2 pi)."""
    octant = ((x * _FOUR_BY_PI).astype(np.int32) + 1) & ~1
    for part in _MINUS_QUARTER_PI:
        x = _fma(octant.astype(np.float32), np.float32(part), x)
    square = x * x
    cosine = _fma(_polynomial(square, _COSINE) * square, square, -(square * np.float32(0.5))) + np.float32(1)
    sine = _fma(_polynomial(square, _SINE) * square, x, x)
    swap = (octant & 2) != 0
    first, second = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    return np.where((octant & 4) != 0, -first, first), np.where(((octant - 2) & 4) == 0, -second, second)
