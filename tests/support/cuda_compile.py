"""Compiles the Triton kernels for a Hopper GPU, which needs none, and prints what came of it as JSON.

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from haarkv.tq_ops.cuda import attention, choices, quantize

_BIN = Path(nvidia.__file__).parent / "bin"


def compiled(kernel, pointers: dict[str, str], numbers: dict[str, str], constants: dict, **options: int) -> dict:
    """Registers, spills and instructions of a kernel for sm_90, its pointers aligned as torch's are, and so are its blocks."""
    names = kernel.arg_names
    types = {**pointers, **numbers}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *_STRIDES) if name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([_BIN / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout
            for tool, flags in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    counts = {op: len(re.findall(rf"\b{op}\b", sass)) for op in ("HGMMA", "HMMA", "LDL", "STL", "PRMT")}
    copies = len(re.findall(r"LDGSTS\S*\.128", sass))
    shared = binary.metadata.shared
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": shared, "copies_of_16_bytes": copies, **counts}


_STRIDES = {"codes_stride": "i32", "scales_stride": "i32"}


def attend(one_each: bool, head_dim: int, group: int, operand: tl.dtype = tl.float16) -> dict:
    """The attention kernel with the sizes that a launch would choose."""
    tile = choices.attention_tile(one_each, group, head_dim, operand)
    number = "*fp16" if operand == tl.float16 else "*fp32"
    pointers = dict.fromkeys(("parts", "maxima", "sums", "k_centroids", "v_centroids"), "*fp32") | {
        "q": number, "positions": "*i64", "query_start_loc": "*i32", "seq_lens": "*i32", "block_table": "*i32",
        "k_codes": "*u8", "v_codes": "*u8", "k_scales": "*fp16", "v_scales": "*fp16", "k_words": "*i32", "v_words": "*i32",
    }  # fmt: skip
    numbers = {"sequences": "i32", "table_width": "i32", "scale": "fp32", **_STRIDES}
    constants = {
        "HEADS": 8, "GROUP": group, "D": head_dim, "BLOCK": 128, "SPLITS": 6, "COLUMNS": tile.columns, "TOKENS": tile.tokens,
        "ONE_EACH": one_each, "TYPE": operand, "PERMUTE": operand == tl.float16,
    }  # fmt: skip
    return compiled(attention.attend_kernel, pointers, numbers, constants, num_warps=tile.warps, num_stages=tile.stages)


def store(head_dim: int) -> dict:
    """The kernel that quantizes and appends tq4."""
    tables = {f"{side}_{name}" for side in "kv" for name in ("centroids", "boundaries")}
    pointers = dict.fromkeys({"k", "v"} | tables, "*fp32") | {
        "k_rotation": "*bf16", "v_rotation": "*bf16", "k_codes": "*u8", "v_codes": "*u8", "k_scales": "*fp16",
        "v_scales": "*fp16", "slots": "*i64", "fault": "*i64",
    }  # fmt: skip
    sides = {"ROUNDS": True, "SMALLEST": 0.0, "SATURATES": True, "TYPE": tl.bfloat16}
    constants = {f"{side}_{name}": value for side in "KV" for name, value in sides.items()}
    constants |= {"HEADS": 8, "D": head_dim, "BLOCK": 128, "ROWS": 16, "WRITE": True}
    return compiled(quantize.quantize_kernel, pointers, {"tokens": "i32", "layer": "i32", **_STRIDES}, constants)


def merge(head_dim: int, splits: int) -> dict:
    """The kernel that merges the parts of a context and rotates them back."""
    pointers = {"parts": "*fp32", "maxima": "*fp32", "sums": "*fp32", "out": "*bf16", "rotation": "*bf16"}
    constants = {"D": head_dim, "SPLITS": splits, "ROWS": 16, "WIDTH": 32, "ROTATES_BACK": True}
    return compiled(attention.merge_kernel, pointers, {"vectors": "i32"}, constants)


KERNELS = {
    f"{kind} {head_dim}": (kind, head_dim) for kind in ("decode", "prefill", "store", "merge") for head_dim in (64, 128, 256)
}


def main(names: list[str]) -> None:
    run = {
        "decode": lambda d: attend(True, d, 5), "prefill": lambda d: attend(False, d, 5), "store": store,
        "merge": lambda d: merge(d, 6),
    }  # fmt: skip
    for name in names or KERNELS:
        kind, head_dim = KERNELS[name]
        print(json.dumps({"kernel": name, "triton": triton.__version__, **run[kind](head_dim)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
