"""Vectors that try a format: what is ordinary, and what is not."""

import torch


def fresh_rows(head_dim, seed):
    """[22, D] fp32: Gaussian, heavy-tailed, with outlier channels, coarse (full of ties), sparse, zero, tiny and large."""
    generator = torch.Generator().manual_seed(1000 * head_dim + seed)
    gauss = torch.randn(22, head_dim, generator=generator)
    x = gauss.clone()
    x[4:8] = x[4:8] ** 3
    x[8:10, 1] *= 50
    x[8:10, head_dim // 2] *= -30
    x[10:13] = (x[10:13] * 4).round() / 4
    x[13, ::2] = 0
    x[14] = 0
    x[14, head_dim // 3] = -1.5
    x[15] = 0
    x[16] = -0.25
    x[17:22] *= torch.tensor([[1e-30], [1e-9], [1e-6], [1e-3], [1e3]])
    return x
