"""Regenerate the shipped tables: `make tables` writes them, this file with `--check` compares only.

Rotations and signs come out the same on every machine. The published Lloyd-Max table depends on the last bit of the math
library's `exp` and `erf` (see `lloyd_max.py`): its authors' bits come out of Intel MKL's machine-independent code path, so a
child process does the work and asks MKL for that path. Where torch has no MKL, the shipped Lloyd-Max table is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from haarkv.codebooks.haar import compute_rotation
from haarkv.codebooks.lloyd_max import MAX_BITS, Solver, solve
from haarkv.codebooks.tables import CHECKSUMS, DATA, HAAR, HADAMARD, LLOYD_MAX, SHIPPED_HEAD_DIMS, SHIPPED_LAYERS, codebook_key
from haarkv.tq_ops.output_files import write_whole

_REPRODUCIBLE = {"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
_SOLVERS: tuple[Solver, ...] = ("published", "converged")
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
    for solver in _SOLVERS:
        for head_dim in SHIPPED_HEAD_DIMS:
            for bits in range(1, MAX_BITS + 1):
                book = solve(bits, head_dim, solver)
                rows = {"centroids": book.centroids.tolist(), "boundaries": book.boundaries.tolist()}
                codebooks[codebook_key(solver, bits, head_dim)] = rows
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in codebooks.items())
    return f"{{\n{lines}\n}}\n".encode("ascii")


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
