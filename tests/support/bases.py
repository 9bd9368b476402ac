"""Made-up learned coordinates, and vectors that suit them."""

import torch

from haarkv.tq_ops.formats.synthetic import basis, calibration, vectors

__all__ = ["basis", "basis_vectors", "calibration"]


def basis_vectors(calibration, layer, tokens, seed=0):
    """Keys [H, tokens, D] as a basis expects them."""
    return vectors(calibration.k[layer], tokens, torch.Generator().manual_seed(seed))
