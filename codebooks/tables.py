"""The shipped tables, read once and checked against their SHA-256; anything else is computed on the host and kept."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from haarkv.codebooks.haar import compute_rotation
from haarkv.codebooks.lloyd_max import Codebook, Solver, solve

DATA = Path(__file__).parent / "data"
LLOYD_MAX, HAAR, HADAMARD, CHECKSUMS = "lloyd_max.json", "haar_d128.safetensors", "hadamard_signs.json", "SHA256SUMS"
SHIPPED_HEAD_DIMS = (64, 128, 256)
SHIPPED_LAYERS = 64  # Qwen3-32B, the deepest of the dense family


def read_checked(name: str) -> bytes:
    """Bytes of a shipped table.

    Raises:
        ValueError: the file is not the one its SHA-256 was taken of.
    """
    lines = (DATA / CHECKSUMS).read_text(encoding="ascii").splitlines()
    sums = {file: digest for digest, file in (line.split() for line in lines)}
    content = (DATA / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != sums[name]:
        raise ValueError(f"{DATA / name} is damaged (its SHA-256 is not the recorded one); restore it from the repository")
    return content


@cache
def _shipped_codebooks() -> dict[str, dict[str, list[float]]]:
    tables: dict[str, dict[str, list[float]]] = json.loads(read_checked(LLOYD_MAX))
    return tables


@cache
def _shipped_rotations() -> Tensor:
    rotations: Tensor = load(read_checked(HAAR))["rotation"]
    return rotations


def codebook_key(solver: Solver, bits: int, head_dim: int) -> str:
    """Name of a codebook in the shipped file, such as `published/d128/b4`."""
    return f"{solver}/d{head_dim}/b{bits}"


@cache
def lloyd_max(bits: int, head_dim: int, solver: Solver = "published") -> Codebook:
    """Codebook of 2**bits levels for one coordinate of a rotated unit vector; see `codebooks.lloyd_max.solve`.

    Shipped for head_dim 64, 128 and 256, so that its bits do not depend on the machine. Do not write to the result.
    """
    row = _shipped_codebooks().get(codebook_key(solver, bits, head_dim))
    if row is None:
        return solve(bits, head_dim, solver)
    return Codebook(torch.tensor(row["centroids"]), torch.tensor(row["boundaries"]))


@cache
def haar_rotation(layer: int, head_dim: int) -> Tensor:
    """Rotation [D, D] bf16 of a layer, for K and V alike; see `codebooks.haar.compute_rotation`.

    Shipped for head_dim 128 and layers 0 to 63. Do not write to the result.
    """
    if head_dim == 128 and 0 <= layer < SHIPPED_LAYERS:
        return _shipped_rotations()[layer]
    return compute_rotation(layer, head_dim)


@cache
def hadamard_signs(name: str) -> Tensor:
    """Signs [n] fp32, each 1 or -1, of a Walsh-Hadamard rotation: `tq3_0`, `tbq4_0/before`, `tbq4_0/after`.

    Do not write to the result.
    """
    tables: dict[str, str] = json.loads(read_checked(HADAMARD))
    return torch.tensor([1.0 if sign == "+" else -1.0 for sign in tables[name]])
