"""The Triton kernels as launches ask for them, compiled to machine code for GPUs that need not be here.

Triton's own launch code says what is compiled: an integer that is 1 becomes a constant, one that 16 divides says so.
`make test-cuda-compile` takes every launch that differs, for four kinds of GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from cuda_rows import script_rows
from places import ROOT

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")

KERNELS = {"norm", "prologue", "rope", "gated_mul", "attend", "merge", "window", "delta_inputs", "delta_rule", "choose",
           "order", "expert", "share"}  # fmt: skip
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""That a program may have at most, by capability."""


SPILLED_ONCE = 12
"""Loads and stores of spilled registers outside of every loop: a few hundred cycles of a program."""


def test_no_kernel_takes_a_tuple_within_a_tuple_apart():
    """Triton 3.6 fails at it before it compiles anything, and later ones do not."""
    nested_uses = []
    for path in (ROOT / "tq_ops" / "cuda").glob("*.py"):
        for kernel in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(kernel, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in kernel.decorator_list):
                targets = [target for one in ast.walk(kernel) if isinstance(one, ast.Assign) for target in one.targets]
                nested_uses += [
                    f"{path.name}: {ast.unparse(target)}" for target in targets
                    if isinstance(target, ast.Tuple) and any(isinstance(part, ast.Tuple) for part in target.elts)
                ]  # fmt: skip
    assert nested_uses == []


# -- Everything, for every GPU: minutes --------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def other_triton(request) -> Path | None:
    folder = request.config.getoption("--triton")
    if folder and not (Path(folder) / "triton" / "__init__.py").exists():
        pytest.exit(f"--triton {folder}: no Triton was unpacked there", 2)
    return Path(folder) if folder else None


@pytest.mark.cuda_compile
@pytest.mark.parametrize("head_dim", [64, 128, 256, "gemma"])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_launch_compiles_and_no_loop_spills(capability, head_dim, other_triton):
    """What a card would refuse is refused here: by Triton, by ptxas, or for want of shared memory.

    Tiles are chosen for sm_90, which a card has run: others may spill.
    """
    rows = script_rows("cuda_compile.py", str(capability), str(head_dim), triton=other_triton)
    assert [(row["kernel"], row["refused"]) for row in rows if "refused" in row] == []
    assert {row["kernel"].split("_kernel")[0] for row in rows} >= KERNELS
    # FP32 models are run to compare with; of theirs some spill a few registers, and at head_dim 256 many.
    fp32 = ("'TYPE': 'fp32'", "'ROUNDED': 'fp32'")
    bf16 = [row for row in rows if not any(words in row["kernel"] for words in fp32)]
    spills = {row["kernel"]: row["spilled"] for row in bf16}
    assert max(row["shared"] for row in rows) <= SHARED_BYTES[capability]
    if capability == 90:
        assert {kernel: spill for kernel, spill in spills.items() if spill["in_loops"]} == {}
        assert max(spill["once"] for spill in spills.values()) <= SPILLED_ONCE
