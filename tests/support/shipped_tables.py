"""Regenerate the shipped tables: `make tables` writes them, this file with `--check` compares only.

Rotations, signs and the optimal levels come out the same on every machine. The published Lloyd-Max tables depend on the last
bit of the math library's `exp` and `erf`: their authors' bits come out of Intel MKL's machine-independent code path, so a
child process does the work and asks MKL for that path. Where torch has no MKL, the shipped Lloyd-Max tables are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from decimal import Decimal, localcontext
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from safetensors.torch import save

from haarkv.codebooks.haar import compute_rotation
from haarkv.codebooks.tables import (
    CHECKSUMS,
    DATA,
    HAAR,
    HADAMARD,
    LLOYD_MAX,
    MAX_BITS,
    PUBLISHED_HEAD_DIMS,
    SHIPPED_LAYERS,
    Codebook,
    codebook_key,
)
from haarkv.tq_ops.output_files import write_whole

_REPRODUCIBLE = {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
# llama.cpp's TQ3_0: one vector for every block of 32.
_TQ3_0 = "+-++--+-++-+-+--+--++-+--+++--+-"


def sign_tables() -> dict[str, str]:
    """Sign vectors of Walsh-Hadamard rotations by name, as other implementations fixed them: `+` or `-` a coordinate.

    TBQ4_0's two are drawn from numpy's generator, whose stream may change between its versions: hence a shipped table.
    """
    generator = np.random.default_rng(42)
    first, second = (generator.choice([-1, 1], 128) for _ in range(2))
    tables = {"tbq4_0/before": first, "tbq4_0/after": second}
    return {"tq3_0": _TQ3_0, **{name: "".join("+-"[int(s < 0)] for s in signs) for name, signs in tables.items()}}


def build() -> dict[str, bytes]:
    """Contents of every file in `codebooks/data`, by name."""
    rotations = torch.stack([compute_rotation(layer, 128) for layer in range(SHIPPED_LAYERS)])
    files = {
        LLOYD_MAX: _lloyd_max() if _has_mkl() else (DATA / LLOYD_MAX).read_bytes(),
        HAAR: save({"rotation": rotations}),
        HADAMARD: (json.dumps(sign_tables(), indent=1) + "\n").encode("ascii"),
    }
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
    return {**files, CHECKSUMS: sums.encode("ascii")}


def _lloyd_max() -> bytes:
    codebooks = {}
    for head_dim in PUBLISHED_HEAD_DIMS:
        for bits in range(1, MAX_BITS + 1):
            book = published_codebook(2**bits, 1.0 / math.sqrt(head_dim))
            rows = {"centroids": book.centroids.tolist(), "boundaries": book.boundaries.tolist()}
            codebooks[codebook_key(bits, head_dim)] = rows
    for bits in range(1, MAX_BITS + 1):
        codebooks[codebook_key(bits)] = {"positive": [float(c) for c in optimum(2**bits)]}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in codebooks.items())
    return f"{{\n{lines}\n}}\n".encode("ascii")


def published_codebook(levels: int, sigma: float) -> Codebook:
    """The published FP32 iteration, operation for operation.

    200 iterations amplify the last bit of `exp` and `erf`, so another math library ends up to 2e-6 away (in units of
    sigma: 2e-5).
    """
    reach = 3.5 * sigma
    centroids = torch.linspace(-reach, reach, levels + 2, dtype=torch.float32)[1:-1]
    outer = torch.tensor([-reach * 3, reach * 3], dtype=torch.float32)
    for _ in range(200):
        midpoints = (centroids[:-1] + centroids[1:]) / 2
        z = torch.cat([outer[:1], midpoints, outer[1:]]) / sigma
        density = (-0.5 * z * z).exp() * (1 / math.sqrt(2 * math.pi))
        cumulative = 0.5 * (1 + torch.erf(z * (1 / math.sqrt(2))))
        mass = cumulative[1:] - cumulative[:-1]
        # In FP32 the cells of 7 and 8 bits that lie far out can have no mass at all; they keep their place.
        mean = sigma * (density[:-1] - density[1:]) / mass.clamp(min=1e-15)
        new_centroids = torch.where(mass > 1e-15, mean, centroids)
        shift = (new_centroids - centroids).abs().max().item()
        centroids = new_centroids
        if shift < 1e-10:
            break
    return Codebook(centroids, (centroids[:-1] + centroids[1:]) / 2)


def optimum(levels: int) -> list[Decimal]:
    """The positive half of the Lloyd-Max centroids of N(0, 1), to 30 digits: no library rounds its last bit otherwise.

    Newton's method on `c_i - E[X | cell i] = 0`; Lloyd's own iteration would take thousands of rounds at 8 bits. The first
    cell begins at 0, where no boundary moves. d E / d edge = pdf(edge) * |edge - E| / mass, and an edge is half of two
    centroids, so the Jacobian has three diagonals.
    """
    with localcontext(prec=50):
        # Panter-Dite companding: quantiles of the density's cube root, which is a Gaussian of deviation sqrt(3).
        wide = NormalDist(0, math.sqrt(3))
        c = [Decimal(wide.inv_cdf(0.5 + (i + 0.5) / levels)) for i in range(levels // 2)]
        for _ in range(100):
            edges = [Decimal(0), *((a + b) / 2 for a, b in pairwise(c))]
            density = [(-e * e / 2).exp() for e in edges] + [Decimal(0)]
            beyond = [_beyond(e) for e in edges] + [Decimal(0)]
            mass = [a - b for a, b in pairwise(beyond)]
            mean = [(a - b) / m for (a, b), m in zip(pairwise(density), mass, strict=True)]
            low = [Decimal(0), *(density[i] * (mean[i] - edges[i]) / mass[i] / 2 for i in range(1, len(c)))]
            high = [density[i + 1] * (e - mean[i]) / mass[i] / 2 for i, e in enumerate(edges[1:])] + [Decimal(0)]
            step = _solve([-x for x in low], [1 - x - y for x, y in zip(low, high, strict=True)], [-x for x in high],
                          [x - m for x, m in zip(c, mean, strict=True)])  # fmt: skip
            c = [x - s for x, s in zip(c, step, strict=True)]
            if max(map(abs, step)) < Decimal("1e-30"):
                return c
    raise ArithmeticError(f"{levels} levels do not converge")


def _beyond(x: Decimal) -> Decimal:
    """The integral of exp(-t^2 / 2) from x >= 0 on: sqrt(pi / 2) less exp(-x^2 / 2) (x + x^3 / 3 + x^5 / 15 + ...)."""
    term, total, odd = x, x, 1
    while term > Decimal("1e-60") * total:
        odd += 2
        term = term * x * x / odd
        total += term
    return (_PI / 2).sqrt() - (-x * x / 2).exp() * total


def _solve(low: list[Decimal], middle: list[Decimal], high: list[Decimal], right: list[Decimal]) -> list[Decimal]:
    """x of a system of three diagonals, by elimination; low[0] and high[-1] are not read."""
    middle, right = list(middle), list(right)
    for i in range(1, len(middle)):
        factor = low[i] / middle[i - 1]
        middle[i] -= factor * high[i - 1]
        right[i] -= factor * right[i - 1]
    x = [right[-1] / middle[-1]]
    for i in reversed(range(len(middle) - 1)):
        x.append((right[i] - high[i] * x[-1]) / middle[i])
    return x[::-1]


def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the shipped files; write nothing")
    parser.add_argument("--into", type=Path, help="folder to write, in this very process (what the child is asked to do)")
    args = parser.parse_args(argv)
    if args.into:
        for name, content in build().items():
            (args.into / name).write_bytes(content)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        child = [sys.executable, __file__, "--into", scratch]
        subprocess.run(child, check=True, env={**os.environ, **_REPRODUCIBLE})
        fresh = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir())}
    if not _has_mkl():
        print(f"this torch has no MKL, which gives the published bits of {LLOYD_MAX}: it is kept", file=sys.stderr)
    stale = [name for name, content in fresh.items() if not (DATA / name).is_file() or (DATA / name).read_bytes() != content]
    if args.check:
        print(f"stale: {', '.join(stale)}" if stale else f"current: {', '.join(fresh)}")
        return int(bool(stale))
    for name in stale:
        write_whole(DATA / name, fresh[name])
    print(f"written: {', '.join(stale) or 'nothing, all current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
