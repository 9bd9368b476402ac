"""Projections, norms, RoPE and gated MLPs as PyPTO helpers: a decoder layer outside attention (scopes 1 and 3).

Activations are BF16 between scopes and FP32 within; weights stay as Hugging Face stores them, [out, in]. Rounding points are
those of `tq_ops.reference`.
"""

import math
from dataclasses import dataclass

import pypto

_MOST_HEADS = 10  # of a vector tile
_NORM_TILE_BYTES = 24 * 2**10  # of one FP32 operand; a norm keeps several alive in 192 KiB of unified buffer
_CUBE_K, _CUBE_N, _COLUMNS = [256, 512], [128, 128], 256  # L0 and L1 tiles of a projection, and of the vector tile behind it


@dataclass(frozen=True)
class Tiles:
    """Tile shapes of a program's projections, by its rows of a tile of tokens."""

    rows: int

    def project(self, x, weight):
        """x [rows, in] BF16 @ weight [out, in].T -> FP32."""
        m = min(self.rows, 128)
        pypto.set_cube_tile_shapes([m, m], _CUBE_K, _CUBE_N)
        return pypto.matmul(x, weight, pypto.DT_FP32, b_trans=True)

    def elementwise(self):
        pypto.set_vec_tile_shapes(16, _COLUMNS)


def rms_norm(x, weight, width, eps):
    """FP32 -> FP32 over the last axis of `width`."""
    mean = pypto.sum(x * x, dim=-1, keepdim=True) * (1.0 / width)
    return x * pypto.rsqrt(mean + eps) * weight


def _fp32(x):
    return x if x.dtype == pypto.DT_FP32 else pypto.cast(x, pypto.DT_FP32)


def norm_update(x, weight, width, eps):
    """Norm of x [rows, width], FP32; x and the weight [1, width] are BF16 or FP32."""
    pypto.set_vec_tile_shapes(max(1, min(16, _NORM_TILE_BYTES // (4 * width))), width)
    return rms_norm(_fp32(x), _fp32(weight), width, eps)


def hidden_norm(x, weight, width, eps):
    """The same in BF16, as projections take it."""
    return pypto.cast(norm_update(x, weight, width, eps), pypto.DT_BF16)


def head_norm(x, weight, heads, head_dim, eps):
    """Norm of each head of x [rows, heads, D] FP32; the weight [1, 1, D] is BF16 or FP32."""
    pypto.set_vec_tile_shapes(1, heads, head_dim)
    weight = pypto.expand_clone(_fp32(weight), [1, heads, head_dim])  # one axis broadcasts at a time
    pypto.set_vec_tile_shapes(4, heads_per_tile(heads), head_dim)
    return rms_norm(x, weight, head_dim, eps)


def head_rope(x, cos, sin, rows, heads, head_dim):
    """Half-split RoPE of x [rows, heads, D] FP32 by [rows, 1, D/2]: low and high half, each [rows, heads, D/2]."""
    half = head_dim // 2
    low = pypto.view(x, [rows, heads, half], [0, 0, 0])
    high = pypto.view(x, [rows, heads, half], [0, 0, half])
    pypto.set_vec_tile_shapes(4, heads_per_tile(heads), half)
    return low * cos - high * sin, high * cos + low * sin


def heads_per_tile(heads):
    """Heads of a vector tile of [rows, heads, D]: a divisor, so that all tiles are alike."""
    if heads <= _MOST_HEADS:
        return heads
    return 8 if heads % 8 == 0 else next(count for count in range(_MOST_HEADS, 0, -1) if heads % count == 0)


def residual(update, hidden, tiles):
    """Update FP32 + hidden BF16, rounded once to BF16."""
    tiles.elementwise()
    return pypto.cast(update + pypto.cast(hidden, pypto.DT_FP32), pypto.DT_BF16)


def _activate(gate, activation):
    """`silu`: x sigmoid(x); `gelu_tanh`: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x**3)). FP32."""
    if activation == "silu":
        return gate / (pypto.exp(gate * -1.0) + 1.0)
    slope = -2.0 * math.sqrt(2.0 / math.pi)
    return gate / (pypto.exp((gate * gate * (slope * 0.044715) + slope) * gate) + 1.0)


def gated_mlp(x, weights, tiles, activation):
    """Gated MLP of x [rows, hidden] BF16, by gate, up and down projection: its update, FP32."""
    gate_proj, up_proj, down_proj = weights
    gate = tiles.project(x, gate_proj)
    up = tiles.project(x, up_proj)
    tiles.elementwise()
    product = pypto.cast(_activate(gate, activation) * up, pypto.DT_BF16)
    return tiles.project(product, down_proj)
