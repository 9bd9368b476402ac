"""Projections, norms, RoPE and SwiGLU as PyPTO helpers: what a decoder layer does outside attention (scopes 1 and 3).

Helpers are inlined where a program calls them. Activations are BF16 between scopes and FP32 within; weights stay as
Hugging Face stores them, [out, in]. Rounding points are those of `tq_ops.reference`.
"""

from dataclasses import dataclass

import pypto

HALF = 64
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


def hidden_norm(hidden, weight, width, eps):
    """hidden [rows, width] BF16 -> its norm in BF16."""
    pypto.set_vec_tile_shapes(max(1, min(16, _NORM_TILE_BYTES // (4 * width))), width)
    normed = rms_norm(pypto.cast(hidden, pypto.DT_FP32), pypto.cast(weight, pypto.DT_FP32), width, eps)
    return pypto.cast(normed, pypto.DT_BF16)


def head_norm_rope(x, weight, cos, sin, rows, heads, eps):
    """Norm of each head, then half-split RoPE.

    Args:
        x: [rows, heads, 128] FP32.
        weight: [1, 1, 128] BF16.
        cos, sin: [rows, 1, 64] FP32.
    Returns:
        low and high half, each [rows, heads, 64] FP32.
    """
    per_tile = heads if heads <= 10 else 8
    pypto.set_vec_tile_shapes(1, heads, 2 * HALF)
    weight = pypto.expand_clone(pypto.cast(weight, pypto.DT_FP32), [1, heads, 2 * HALF])  # one axis broadcasts at a time
    pypto.set_vec_tile_shapes(4, per_tile, 2 * HALF)
    normed = rms_norm(x, weight, 2 * HALF, eps)
    low = pypto.view(normed, [rows, heads, HALF], [0, 0, 0])
    high = pypto.view(normed, [rows, heads, HALF], [0, 0, HALF])
    pypto.set_vec_tile_shapes(4, per_tile, HALF)
    return low * cos - high * sin, high * cos + low * sin


def residual(projected, hidden, tiles):
    """projected FP32 + hidden BF16, rounded once to BF16."""
    tiles.elementwise()
    return pypto.cast(projected + pypto.cast(hidden, pypto.DT_FP32), pypto.DT_BF16)


def swiglu(hidden, norm_weight, gate_proj, up_proj, down_proj, width, eps, tiles):
    """Norm and SwiGLU: hidden [rows, width] BF16 -> what the MLP adds to it, FP32; of a rank's columns, a part of it."""
    x = hidden_norm(hidden, norm_weight, width, eps)
    gate = tiles.project(x, gate_proj)
    up = tiles.project(x, up_proj)
    tiles.elementwise()
    product = pypto.cast(gate / (pypto.exp(gate * -1.0) + 1.0) * up, pypto.DT_BF16)
    return tiles.project(product, down_proj)


def mlp(hidden, norm_weight, gate_proj, up_proj, down_proj, width, eps, tiles):
    """Second half of a layer: norm, SwiGLU, residual. hidden [rows, width] BF16 -> the same."""
    return residual(swiglu(hidden, norm_weight, gate_proj, up_proj, down_proj, width, eps, tiles), hidden, tiles)
