"""The rotations of OSCAR, from what its calibration measures: arXiv 2605.17757, in words of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis


def rotations(moment: Tensor) -> Basis:
    """Rotations that spread evenly what counts most.

        moment = U diag(e) U.T;   R = U @ H @ P

    H is Sylvester's Hadamard matrix over the root of its size. P puts the column with the number of the i-th largest
    eigenvalue at the place whose binary digits are those of i reversed.

    Args:
        moment: [H, D, D], symmetric; E[q q^T] of the queries that read a KV head, for K; E[w v v^T] for V, w being how much a
            token's key is asked for. D is a power of two.
    Returns:
        R and its transpose as a basis without a mean, every weight 1, rounded to BF16.
    Source: the public code of its authors, `compute_kv_rotation.py`: targets `qqt` and `sst`, composition `r_h_pbr`.
    """
    heads, dim = moment.shape[:2]
    values, vectors = torch.linalg.eigh(moment.double())
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]) / 2**0.5
    digits = dim.bit_length() - 1
    reversed_digits = torch.tensor([int(f"{i:0{digits}b}"[::-1], 2) for i in range(dim)])
    places = torch.empty(heads, dim, dtype=torch.int64)
    places[:, reversed_digits] = values.argsort(-1, descending=True)
    rotation = (vectors @ hadamard).gather(-1, places.unsqueeze(1).expand(-1, dim, -1)).to(torch.bfloat16).float()
    ones = torch.ones(heads, dim)
    return Basis(0 * ones, rotation, rotation.mT.contiguous(), ones)
