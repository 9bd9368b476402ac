"""Compiles the Triton kernels as they are launched, for GPUs that need not be here, and prints what came of it as JSON.

    python tests/support/cuda_compile.py CAPABILITY[,CAPABILITY …] [KERNEL …] [--keep FOLDER]
    python tests/support/cuda_compile.py CAPABILITY --everything [--head-dim HEAD_DIM]

The first compiles one launch of each kernel (`decode 128`); the second every launch that differs, as the first card would.
Triton keeps what it has compiled: once interrupted, a second run goes on where the first one ended.
A process of its own: where Triton has been imported to interpret, it does not compile.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import machine_code
import torch
import triton
from cuda_launches import (
    LEARNED,
    MIXTURES,
    SHAPES,
    STATES,
    TAIL,
    TQ4,
    Asked,
    because,
    deltas,
    everything,
    learned,
    mixtures,
    recorded,
    serve,
    shaped_model,
)  # fmt: skip
from triton.backends import nvidia

_BIN = Path(nvidia.__file__).parent / "bin"
_COUNTED = ("LDL", "STL", "PRMT", "LOP3", "SHF")
_TENSOR_CORES = ("HGMMA", "HMMA", "UTCHMMA")


def compiled(asked: Asked, keep: Path | None = None, *, read: bool = True) -> dict:
    """Registers, spills, shared memory and instructions of a launch; its hottest loop per coordinate of K and V.

    Args:
        read: False leaves out what takes reading the machine code, unless there is a stack: without one nothing is spilled.
    """
    began = time.monotonic()
    binary = triton.compile(asked.source, target=asked.target, options=asked.options)
    seconds = time.monotonic() - began
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        usage = subprocess.run([_BIN / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        row = {
            "registers": int(found[1]), "stack": int(found[2]), "shared": binary.metadata.shared, "seconds": round(seconds, 2),
            "warps": binary.metadata.num_warps,
        }  # fmt: skip
        if not read and not row["stack"]:
            return row | {"LDL": 0, "STL": 0, "spilled": vars(machine_code.Spilled(0, 0, 0))}
        text = machine_code.disassemble(path)
    code, _ = machine_code.parse(text)
    counts = machine_code.count(code)
    row |= {
        "tensor": sum(counts[op] for op in _TENSOR_CORES),
        "copies_of_16_bytes": sum(one.op == "LDGSTS" and one.modifiers.endswith(".128") for one in code),
        **{op: counts[op] for op in _COUNTED},
        "spilled": vars(machine_code.spilled(text)),
    }  # fmt: skip
    constants = asked.named_constants()

    if asked.source.fn.__name__ == "attend_kernel":
        row |= _of_loop(machine_code.hottest_loop(text), constants["TOKENS"] * 2 * constants["D"], row["warps"])
        row |= _ahead(binary.asm["ttgir"], binary.asm["ptx"])
    return row


def _ahead(layouts: str, ptx: str) -> dict:
    """Tiles of codes that have a place in shared memory, and copies that may be on their way when the loop goes on."""
    places = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+xi8", layouts)
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)
    return {"buffers": min(map(int, places), default=0), "in_flight": max(map(int, waits), default=0)}


def _of_loop(loop: machine_code.Code, coordinates: int, warps: int) -> dict:
    """What one pass of the loop costs for each of the coordinates of K and V that it reads."""
    counts = machine_code.count(loop)
    looked_up = sum(counts[op] for op in ("PRMT", "LOP3", "SHF"))
    memory = machine_code.load_of(loop, warps).memory
    return {
        "look_ups_a_coordinate": round(looked_up * 32 * warps / coordinates, 3),
        "memory_cycles_a_coordinate": round(memory / coordinates, 4),
        "copies_in_loop": counts["LDGSTS"],
    }


_LEARNED_POINTERS = {"gains"}
"""Arguments that are None of a rotation."""


def named(capability: int, head_dim: int | str) -> dict[str, Asked]:
    """A launch of each kernel of a BF16 model of two layers, by a name such as `decode 128`."""
    with recorded(capability) as asked:
        of_head_dim = partial(learned, LEARNED[head_dim], head_dim, 2)
        for spec in (TQ4, TAIL, of_head_dim(), of_head_dim(tail=128, sink=4)):
            serve(shaped_model(head_dim, torch.bfloat16, 2), spec, 128, [130], 1)
        if head_dim == 128:
            deltas(STATES[:1])
            mixtures(MIXTURES[:1], [torch.bfloat16])
    found = {}
    for one in asked.values():
        kernel, constants = one.source.fn.__name__, one.named_constants()
        constants = {key: getattr(value, "value", value) for key, value in constants.items()}
        one_each = constants.get("tokens.ONE_EACH")
        name = {
            "attend_kernel": "decode" if one_each else "prefill",
            "quantize_kernel": "store" if constants.get("WRITE") else "look for faults",
            "merge_kernel": "merge" if constants.get("ROWS") == 1 else "merge of one part",
            "kept_kernel": "tail of one token" if one_each else "tail of a chunk",
            "expert_kernel": "gate and up" if constants.get("ACT") else "down",
        }.get(kernel, kernel.removesuffix("_kernel"))
        if constants.get("k.LEARNED") or _LEARNED_POINTERS & one.pointers():
            name += " of learned keys"
        if kernel != "kept_kernel" and (constants.get("tokens.TAIL") or constants.get("keeping.RING")):
            name += " beside a tail"
        if constants.get("tokens.WINDOW"):
            name += " in a window"
        found[f"{name} {head_dim}"] = one
    return found


def report(name: str, capability: int, asked: Asked, keep: Path | None = None, *, read: bool = True) -> None:
    """Compile and print; what is refused is a row as well."""
    row = {"kernel": name, "capability": capability, "triton": triton.__version__}
    try:
        row |= compiled(asked, keep, read=read)
    except Exception as error:
        row["refused"] = because(error)
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--everything", action="store_true")
    parser.add_argument(
        "--head-dim",
        type=lambda text: int(text) if text.isdecimal() else text,
        choices=tuple(SHAPES),
        help="with --everything: of these models alone",
    )
    parser.add_argument("--keep", type=Path, help="a folder for the cubins")
    given = parser.parse_args()
    for capability in given.capabilities:
        if given.everything:
            for name, asked in everything(capability, [given.head_dim] if given.head_dim else tuple(SHAPES)).items():
                report(name, capability, asked, read=False)
            continue
        for head_dim in SHAPES:
            if given.kernels and not any(name.endswith(f" {head_dim}") for name in given.kernels):
                continue
            for name, asked in named(capability, head_dim).items():
                if not given.kernels or name in given.kernels:
                    keep = given.keep and given.keep / f"{name.replace(' ', '_')}_sm{capability}.cubin"
                    report(name, capability, asked, keep)


if __name__ == "__main__":
    main()
