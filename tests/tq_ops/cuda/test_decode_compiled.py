"""csrc/decode.cu as machine code of four kinds of GPU: registers, and what its loop costs."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import machine_code
import pytest
import torch
from op_tables import LAYER, Case, filled
from places import ROOT

pytest.importorskip("triton", reason="Triton, which brings the disassembler, is not installed")

from triton.backends import nvidia

from haarkv.tq_ops import formats
from haarkv.tq_ops.cuda import decode, ops, schedule
from haarkv.tq_ops.cuda.layout import both_layouts, to_layout
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

if reason := decode.nvrtc_missing():
    pytest.skip(reason, allow_module_level=True)

MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}
"""Shared memory of a processor, by capability; each thread block takes 1 KB of it beside its own."""


@cache
def build_kernel(
    capability: int, head_dim: int, group: int, k_bits: int, v_bits: int, block: int, tail: int, sink: int,
    learned: int = 0, window: int = 0,
) -> tuple[str, int]:  # fmt: skip
    """Machine code as text, and registers a thread.

    Args:
        learned: 1 of learned keys, of which `k_bits` is the mean.
    """
    at_once = decode.blocks_a_processor(group, head_dim, MEMORY[capability])
    shape = (8, group, head_dim, k_bits, v_bits, block, at_once, tail, sink, learned, window)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decode.cubin"
        path.write_bytes(decode.compile_kernel(f"sm_{capability}", *shape))
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        match = re.search(r"REG:(\d+)", usage)
        assert match
        return machine_code.disassemble(path), int(match[1])


# capability, head_dim, group, bits, block, tail, sink            most   measured
BOUNDS = [
    ((90, 128, 5, 4, 4, 128, 0, 0), 638),  # 619
    ((80, 128, 5, 4, 4, 16, 0, 0), 638),  # 623
    ((100, 128, 5, 4, 4, 128, 0, 0), 638),  # 590
    ((120, 128, 5, 4, 4, 128, 0, 0), 638),  # 570
    ((120, 256, 8, 4, 4, 128, 0, 0), 1081),  # 944
    ((90, 128, 5, 3, 2, 128, 0, 0), 720),  # 685
    ((90, 128, 16, 4, 4, 128, 0, 0), 802),  # 770
    ((90, 64, 3, 4, 4, 128, 0, 0), 442),  # 433
    ((90, 256, 8, 4, 4, 128, 0, 0), 1081),  # 990
    ((90, 128, 5, 4, 4, 128, 128, 4), 648),  # 629
    ((90, 128, 5, 4, 4, 128, 0, 0, 1), 1081),  # 1029
    ((90, 128, 5, 3, 3, 128, 128, 4, 1), 1114),  # 1062
    ((90, 256, 8, 3, 3, 128, 0, 0, 1), 1900),  # 1802
    ((80, 128, 5, 2, 2, 16, 0, 0, 1), 983),  # 931
    ((90, 128, 16, 5, 4, 128, 0, 0, 1), 1245),  # 1183
    ((100, 128, 5, 5, 4, 128, 128, 4, 1), 1064),  # 1006
    ((120, 256, 8, 4, 4, 128, 0, 0, 1), 1769),  # 1678
    ((90, 256, 4, 4, 4, 128, 0, 0, 0, 512), 1037),  # 987: with a window
]
"""Instructions of the loop, of 256 tokens and eight warps."""


SPILLED_LOADS, SPILLED_STORES = 8, 8
"""At most, outside the loop: where a thread block's work begins and ends.

Measured: none or one of each; of 16 query heads over learned keys eight loads.
"""


def check_spills(text: str) -> None:
    whole = machine_code.count(machine_code.parse(text)[0])
    assert whole["LDL"] <= SPILLED_LOADS
    assert whole["STL"] <= SPILLED_STORES


PLAIN = [shape for shape, _ in BOUNDS if shape[1:6] == (128, 5, 4, 4, 128) and shape[8:] in ((), (1,))]
"""What is compiled in an ordinary run."""


@pytest.mark.parametrize(
    ("shape", "most"),
    [pytest.param(*row, marks=[] if row[0] in PLAIN else pytest.mark.cuda_compile) for row in BOUNDS],
    ids=str,
)
def test_the_loop_is_within_its_bounds(shape, most):
    """In it nothing is spilled, and a lookup of two centroids takes a permutation and a load and nothing else.

    Those of learned keys are no lookups.
    """
    (capability, head_dim, group), block, learned = shape[:3], shape[5], any(shape[8:9])
    text, registers = build_kernel(*shape)
    loop = machine_code.hottest_loop(text)
    counts = machine_code.count(loop)
    assert counts["STL"] == 0
    assert counts["LDL"] <= (block == 16)  # a number that stays the same, where two blocks a warp take its register
    check_spills(text)
    lookups = head_dim // 2 * (2 - learned)  # 32 tokens of K and of V, a lane each
    assert counts["LDS"] == lookups
    assert counts["PRMT"] <= lookups + 4 + 8 * learned  # those put V's scale beside K's
    assert len(loop) <= most
    at_once = decode.blocks_a_processor(group, head_dim, MEMORY[capability])
    assert registers * decode.THREADS * at_once <= 65536
    assert (decode.shared_bytes(group, head_dim) + 1024) * at_once <= MEMORY[capability]


def test_the_table_is_looked_up_where_shared_memory_begins():
    """That place is part of each look-up. Were it not the one that ptxas gives `shared`, the kernel would stop itself."""
    for capability in MEMORY:
        text, _ = build_kernel(capability, 128, 5, 4, 4, 128, 0, 0)
        looked_up = {
            re.sub(r".*\[R\d+", "", one.operands).strip() for one in machine_code.hottest_loop(text) if one.op == "LDS"
        }
        if capability < 90:  # ptxas knows both places, and leaves the check out
            assert (looked_up, "BPT.TRAP" in text) == ({"]"}, False)
        else:  # above its own place lies the thread block's number in its cluster, which is 0
            assert looked_up == {"+0x400]"}
            assert re.search(r"\bU?MOV U?R\d+, 0x400 ;", text)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_bindings_hand_the_driver_what_the_launch_says(tmp_path):
    """Their own code, over a driver that prints: machine code, shared memory, grid, stream and the bytes of the structure."""
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests/support/fake_cuda_driver.c"], check=True)
    command = [sys.executable, ROOT / "tests/support/cuda_launched_once.py"]
    libraries = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared = decode.shared_bytes(5, 128)
    # As C lays them out: seventeen pointers, two sides of two pointers and two strides, two numbers, a float, and a gap.
    sides = struct.pack("<qqiiqqii", *range(18, 26))
    arguments = struct.pack("<17q", *range(1, 18)) + sides + struct.pack("<iif4x", 26, 27, 0.5)
    most_dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert done.stdout.splitlines() == [
        "most 232448", "load 1", "function 0x11 decode", f"attribute 0x22 {most_dynamic_shared} {shared}",
        f"launch 0x22 33 8 1 256 1 1 {shared} 0x77 1 {arguments.hex()}",
    ]  # fmt: skip


def test_what_nvrtc_refuses_is_said():
    with pytest.raises(decode.CompileError, match="HEADS"):
        decode.compile_source("sm_90", {})


# -- Where it is launched -----------------------------------------------------------------------------------------------
def test_while_kernels_are_only_compiled_none_is_launched(monkeypatch):
    kv_cache, batch = filled(Case("tq4", 128, 5, 2, 128, (699, 2), (1, 1)))
    at, q = kv_cache.view(LAYER, batch), torch.randn(len(batch.positions), 10, 128).bfloat16()
    rotated = ops.rotate(q, at)
    compilations = []
    monkeypatch.setattr(decode, "only_compiles", lambda: True)
    monkeypatch.setattr(decode, "_kernel", lambda *given: compilations.append(given))
    assert decode.attend(q, rotated, at, both_layouts(at, q.device), 0.1).shape == q.shape
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "kv", "block", "accepts"),
    [
        (torch.bfloat16, 128, 5, "tq4", 128, True), (torch.bfloat16, 128, 5, "k=tq3,v=tq2", 16, True),
        (torch.float32, 128, 5, "tq4", 128, False), (torch.bfloat16, 128, 17, "tq4", 128, False),
        (torch.bfloat16, 64, 1, "tq2", 128, False), (torch.bfloat16, 128, 1, "tq4", 24, False),
        (torch.bfloat16, 128, 1, "tq8", 128, False), (torch.bfloat16, 256, 9, "tq4", 128, False),
        (torch.bfloat16, 128, 5, "k=lr5,v=tq4", 128, True), (torch.bfloat16, 256, 9, "k=lr3,v=tq3", 128, False),
        (torch.bfloat16, 64, 5, "k=lr4,v=tq4", 128, False), (torch.bfloat16, 128, 5, "k=lr4,v=tq5", 128, False),
    ],
)  # fmt: skip
def test_what_it_takes(monkeypatch, dtype, head_dim, group, kv, block, accepts):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    calibration = synthetic.calibration(1, 1, head_dim) if formats.needs_calibration(kv) else None
    kv_cache = PagedKVCache(KVSpec(kv, calibration=calibration).plan(1), KVShape(1, head_dim), num_blocks=1, block_size=block)
    q = torch.zeros(1, group, head_dim, dtype=dtype)
    k, v = (to_layout(kv_format, 0, head_dim, torch.device("cpu")) for kv_format in kv_cache.kv[0].formats)
    assert decode.takes(q, kv_cache.kv[0], k, v) == accepts
    monkeypatch.setattr(decode, "nvrtc_missing", lambda: "it is not there")
    assert not decode.takes(q, kv_cache.kv[0], k, v)


@pytest.mark.parametrize(
    ("group", "memory", "at_once"),
    [(5, 228, 2), (5, 164, 2), (5, 100, 1), (16, 228, 1)],
    ids=["sm_90", "sm_80", "sm_86, sm_89 and sm_120", "a group whose sums take all registers"],
)
def test_no_more_thread_blocks_share_the_work_than_processors_hold(group, memory, at_once):
    assert decode.blocks_a_processor(group, 128, memory * 1024) == at_once
    assert schedule.count_programs(1, decode.MOST_BLOCKS, torch.device("cpu"), at_once) == at_once * 4
