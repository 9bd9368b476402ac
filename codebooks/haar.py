"""Haar-distributed rotations, one per layer, shared by K and V.

`rotation` of layer l: a 128 x 128 Gaussian from a CPU generator seeded `42 + 1000 * l`, its QR, the columns' signs fixed by
the diagonal of R, rounded to BF16. The publication factors in FP32, whose last bits depend on the LAPACK at hand; here the
same Gaussian is factored in float64, whose errors of 1e-15 lie too far below a BF16 step to show. What the publication
rounded otherwise in the three layers whose bits are known is kept below, entry by entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEED, SEED_STRIDE = 42, 1000

# layer -> (row, column, BF16 bits): where the published FP32 factorisation rounds otherwise, in 18 of 19 entries by one
# or two units in the last place, in one (a value of 1.6e-6 that FP32 cancels badly) by four.
_PUBLISHED_ROUNDING: dict[int, tuple[tuple[int, int, int], ...]] = {
    0: ((9, 15, 47470), (37, 86, 14331), (56, 56, 48548), (86, 122, 14862), (115, 105, 46852)),
    1: (
        (10, 125, 14731), (14, 117, 47433), (21, 34, 46652), (25, 127, 14343), (36, 18, 13779), (67, 31, 47296),
        (78, 88, 15009), (97, 125, 15336), (124, 62, 47018),
    ),
    39: ((38, 33, 47193), (40, 4, 46608), (41, 127, 15083), (58, 84, 14570), (96, 121, 47062)),
}  # fmt: skip


def compute_rotation(layer: int, head_dim: int) -> Tensor:
    """Compute a layer's rotation on the host; `codebooks.haar_rotation` reads the shipped one where there is one.

    Row vectors: `y = x @ rotation`, back with `y @ rotation.T`.

    Args:
        layer: index of the decoder layer, from 0.
        head_dim: D.
    Returns:
        [D, D] bf16, orthogonal up to BF16 rounding.
    Raises:
        ValueError: a negative layer or a head_dim below 1.
    Source: TurboQuant (arXiv 2504.19874); seeds of the public Qwen3-14B kernels.
    """
    if layer < 0 or head_dim < 1:
        raise ValueError(f"no rotation for layer {layer} and head_dim {head_dim}")
    generator = torch.Generator().manual_seed(SEED + SEED_STRIDE * layer)
    gaussian = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float32)
    q, r = torch.linalg.qr(gaussian.double())
    sign = torch.where(torch.diag(r) < 0, -1.0, 1.0).double()
    rotation: Tensor = (q * sign).to(torch.bfloat16).contiguous()
    if head_dim == 128:
        bits = rotation.view(torch.uint16)
        for row, column, value in _PUBLISHED_ROUNDING.get(layer, ()):
            bits[row, column] = value
    return rotation
