"""Projections, norms, RoPE and gated MLPs as PyPTO helpers: what a decoder layer does outside attention (scopes 1 and 3).

Helpers are inlined where a program calls them. Activations are BF16 between scopes and FP32 within; weights stay as
Hugging Face stores them, [out, in]. Rounding points are those of `tq_ops.reference`.
"""

import math
from dataclasses import dataclass

import pypto

_MOST_HEADS = 10  # of a vector tile
_NORM_TILE_BYTES = 24 * 2**10  # of one FP32 operand; a norm keeps several alive in 192 KiB of unified buffer


@dataclass(frozen=True)
class Tiles:
    """Tile shapes of a program's projections.

    Attributes:
        rows: of one tile of tokens; the cube's M tile divides it.
        k, n: L0 and L1 tiles of the cube, as `set_cube_tile_shapes` takes them.
        columns: of one vector tile after a projection.
    """

    rows: int
    k: tuple[int, int] = (256, 512)
    n: tuple[int, int] = (128, 128)
    columns: int = 256

    def project(self, x, weight):
        """x [rows, in] BF16 @ weight [out, in].T -> FP32."""
        m = min(self.rows, 128)
        pypto.set_cube_tile_shapes([m, m], list(self.k), list(self.n))
        return pypto.matmul(x, weight, pypto.DT_FP32, b_trans=True)

    def elementwise(self):
        """Set the vector tiles for what follows a projection."""
        pypto.set_vec_tile_shapes(16, self.columns)


def rms_norm(x, weight, width, eps):
    """FP32 -> FP32 over the last axis of `width`."""
    mean = pypto.sum(x * x, dim=-1, keepdim=True) * (1.0 / width)
    return x * pypto.rsqrt(mean + eps) * weight


def _fp32(x):
    """x as it is, or widened."""
    return x if x.dtype == pypto.DT_FP32 else pypto.cast(x, pypto.DT_FP32)


def _tile_for_norm(width):
    pypto.set_vec_tile_shapes(max(1, min(16, _NORM_TILE_BYTES // (4 * width))), width)


def hidden_norm(hidden, weight, width, eps):
    """hidden [rows, width] BF16 -> its norm in BF16. The weight [1, width] is BF16 or FP32."""
    _tile_for_norm(width)
    return pypto.cast(rms_norm(_fp32(hidden), _fp32(weight), width, eps), pypto.DT_BF16)


def norm_update(update, weight, width, eps):
    """What a mixer or an MLP gives, [rows, width] FP32, normed before it is added; FP32."""
    _tile_for_norm(width)
    return rms_norm(update, _fp32(weight), width, eps)


def head_norm(x, weight, heads, head_dim, eps):
    """Norm of each head: x [rows, heads, D] FP32 -> the same. The weight [1, 1, D] is BF16 or FP32."""
    pypto.set_vec_tile_shapes(1, heads, head_dim)
    weight = pypto.expand_clone(_fp32(weight), [1, heads, head_dim])  # one axis broadcasts at a time
    pypto.set_vec_tile_shapes(4, heads_per_tile(heads), head_dim)
    return rms_norm(x, weight, head_dim, eps)


def head_rope(x, cos, sin, rows, heads, head_dim):
    """Half-split RoPE.

    Args:
        x: [rows, heads, D] FP32.
        cos, sin: [rows, 1, D/2] FP32.
    Returns:
        low and high half, each [rows, heads, D/2] FP32.
    """
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
    """projected FP32 + hidden BF16, rounded once to BF16."""
    tiles.elementwise()
    return pypto.cast(update + pypto.cast(hidden, pypto.DT_FP32), pypto.DT_BF16)


def _activate(gate, activation):
    """`silu` of gate, FP32: x sigmoid(x); or `gelu_tanh`, GELU by its tanh: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x**3))."""
    if activation == "silu":
        return gate / (pypto.exp(gate * -1.0) + 1.0)
    slope = -2.0 * math.sqrt(2.0 / math.pi)
    return gate / (pypto.exp((gate * gate * (slope * 0.044715) + slope) * gate) + 1.0)


def gated_mlp(hidden, norm_weight, gate_proj, up_proj, down_proj, width, eps, tiles, activation):
    """Norm and gated MLP: hidden [rows, width] BF16 -> what it adds, FP32; of a rank's columns, a part of it."""
    x = hidden_norm(hidden, norm_weight, width, eps)
    gate = tiles.project(x, gate_proj)
    up = tiles.project(x, up_proj)
    tiles.elementwise()
    product = pypto.cast(_activate(gate, activation) * up, pypto.DT_BF16)
    return tiles.project(product, down_proj)
