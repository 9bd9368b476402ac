"""Compiles the Triton kernels as they are launched, for a GPU that need not be here, and prints what came of it as JSON.

    python tests/support/cuda_compile.py CAPABILITY [KERNEL …]

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from cuda_launches import SHAPES, Asked, recorded, serve, shaped_model
from triton.backends import nvidia

_BIN = Path(nvidia.__file__).parent / "bin"
_COUNTED = ("HGMMA", "HMMA", "LDL", "STL", "PRMT", "UTCHMMA")


def built(asked: Asked) -> dict:
    """Registers, spills and instructions of a launch."""
    binary = triton.compile(asked.source, target=asked.target, options=asked.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([_BIN / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    counts = {op: len(re.findall(rf"\b{op}\b", sass)) for op in _COUNTED}
    copies = len(re.findall(r"LDGSTS\S*\.128", sass))
    shared = binary.metadata.shared
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": shared, "copies_of_16_bytes": copies, **counts}


def named(capability: int, head_dim: int) -> dict[str, Asked]:
    """A launch of each kernel of a BF16 model of two layers, by a name such as `decode 128`."""
    with recorded(capability) as asked:
        serve(shaped_model(head_dim, torch.bfloat16, 2), "tq4", 128, [130], 1)
    found = {}
    for one in asked.values():
        kernel, constants = one.source.fn.__name__, one.named_constants()
        name = {
            "attend_kernel": "decode" if constants.get("ONE_EACH") else "prefill",
            "quantize_kernel": "store" if constants.get("WRITE") else "look for faults",
            "merge_kernel": "merge" if constants.get("ROWS") == 1 else "merge of one part",
        }.get(kernel, kernel.removesuffix("_kernel"))
        found[f"{name} {head_dim}"] = one
    return found


def main(capability: int, names: list[str]) -> None:
    for head_dim in SHAPES:
        if names and not any(name.endswith(f" {head_dim}") for name in names):
            continue
        for name, asked in named(capability, head_dim).items():
            if not names or name in names:
                print(json.dumps({"kernel": name, "triton": triton.__version__, **built(asked)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
