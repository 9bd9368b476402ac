"""Lloyd-Max tables, rotations and signs: the shipped ones, read once and checked against their SHA-256.

A rotated unit vector has coordinates close to N(0, 1/sqrt(D)), so one scalar codebook serves all of them. Levels are never
solved at run time: last bits would depend on the machine. Rotations that are not shipped are computed on the host and cached.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from safetensors.torch import load
from torch import Tensor

from haarkv.codebooks.haar import compute_rotation

DATA = Path(__file__).parent / "data"
LLOYD_MAX, HAAR, HADAMARD, CHECKSUMS = "lloyd_max.json", "haar_d128.safetensors", "hadamard_signs.json", "SHA256SUMS"
SHIPPED_LAYERS = 64  # Qwen3-32B, the deepest of the dense family

MAX_BITS = 8
Solver = Literal["published", "converged"]
"""`published` is the solver of the public Qwen3-14B TurboQuant kernels, which stops after 200 FP32 iterations short of the
optimum; caches written with its tables can only be read with them. `converged` is the optimum."""


class Codebook(NamedTuple):
    """A scalar quantizer of 2**bits levels.

    Attributes:
        centroids: [2**bits] fp32, ascending; in units of a unit vector's coordinate.
        boundaries: [2**bits - 1] fp32, ascending; level = #{b : y >= b}.
    """

    centroids: Tensor
    boundaries: Tensor


def read_checked(name: str) -> bytes:
    """Bytes of a shipped table; a ValueError if its SHA-256 differs."""
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


@cache
def gaussian_centroids(bits: int) -> Tensor:
    """The optimum for N(0, 1): [2**bits] float64, ascending, odd about zero, rounded to nearest. Do not write to it."""
    positive = torch.tensor(_shipped_codebooks()[f"gaussian/b{bits}"]["positive"], dtype=torch.float64)
    return torch.cat([-positive.flip(0), positive])


@cache
def lloyd_max(bits: int, head_dim: int, solver: Solver = "published") -> Codebook:
    """Codebook of 2**bits levels (1 to 8 bits) for a coordinate of a rotated unit vector of D = `head_dim`, whose deviation is
    1/sqrt(D): the optimum, exactly odd, which "published" is not at D 64, 128 and 256. Do not write to it.

    Rounding points: the optimum is scaled and halved in float64, and rounded to FP32 once.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"a codebook has 1 to {MAX_BITS} bits, not {bits}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, not {head_dim}")
    if solver not in get_args(Solver):
        raise ValueError(f"unknown solver {solver!r}; choose published or converged")
    if solver == "published" and (row := _shipped_codebooks().get(f"published/d{head_dim}/b{bits}")):
        return Codebook(torch.tensor(row["centroids"]), torch.tensor(row["boundaries"]))
    centroids = gaussian_centroids(bits) / math.sqrt(head_dim)
    return Codebook(centroids.float(), ((centroids[:-1] + centroids[1:]) / 2).float())


@cache
def haar_rotation(layer: int, head_dim: int) -> Tensor:
    """Rotation [D, D] bf16 of a layer, for K and V; see `codebooks.haar.compute_rotation`. Do not write to it.

    Shipped for head_dim 128 and layers 0 to 63.
    """
    if head_dim == 128 and 0 <= layer < SHIPPED_LAYERS:
        return _shipped_rotations()[layer]
    return compute_rotation(layer, head_dim)


@cache
def hadamard_signs(name: str) -> Tensor:
    """Signs [n] fp32 of a Walsh-Hadamard rotation: `tq3_0`, `tbq4_0/before`, `tbq4_0/after`. Do not write to it."""
    tables: dict[str, str] = json.loads(read_checked(HADAMARD))
    return torch.tensor([1.0 if sign == "+" else -1.0 for sign in tables[name]])
