"""Compiles every launch of the Triton kernels that differs, for a GPU that need not be here; prints what came of it as JSON.

    python tests/support/cuda_compile.py CAPABILITY SHAPE

Triton keeps what it has compiled: once interrupted, a second run goes on where the first one ended.
A process of its own: where Triton has been imported to interpret, it does not compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import machine_code
import triton
from cuda_launches import GEMMA, LaunchRequest, because, everything
from triton.backends import nvidia

_BIN = Path(nvidia.__file__).parent / "bin"


def compile_launch(launch: LaunchRequest) -> dict:
    """Shared memory of a launch, and what it spills."""
    binary = triton.compile(launch.source, target=launch.target, options=launch.options)
    spills = {"in_loops": 0, "once": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        usage = subprocess.run([_BIN / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        if int(re.search(r"STACK:(\d+)", usage)[1]):  # without a stack nothing is spilled
            spills = machine_code.count_spills(machine_code.disassemble(path))
    return {"shared": binary.metadata.shared, "spilled": spills}


def main(capability: int, shape: int | str) -> None:
    for name, launch in everything(capability, [shape]).items():
        row = {"kernel": name}
        try:
            row |= compile_launch(launch)
        except Exception as error:
            row["refused"] = because(error)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), GEMMA if sys.argv[2] == GEMMA else int(sys.argv[2]))
