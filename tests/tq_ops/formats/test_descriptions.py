"""What formats say of themselves: true of the bytes they store, and all that a backend needs to read a new one."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from op_contract import suite
from op_contract.caches import Attention, CacheCase, Store
from op_tables import open_table
from places import ROOT

from haarkv.codebooks.haar import draw_gaussian, orthogonal_factor
from haarkv.tq_ops import formats
from haarkv.tq_ops.cpu import layout as cpu_layout
from haarkv.tq_ops.cuda import layout as cuda_layout
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.formats.rotated import RotatedFormat, Transform
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.kernel_support import unsupported, unsupported_format
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.npu.sides import READS as NPU_READS
from haarkv.tq_ops.onnx import EXPORT_SUPPORT as ONNX_EXPORTED
from haarkv.tq_ops.onnx import READS as ONNX_READS

DTYPES = (torch.float32, torch.bfloat16)
# -- A new format runs on every backend that reads its kind ----------------------------------------------------------------
HEAD_DIM = 128
HALF = (0.01, 0.03, 0.052, 0.078, 0.1, 0.14, 0.185, 0.25)


def own_rotation(layer, head_dim):
    gaussian = draw_gaussian(7 + layer, head_dim * head_dim).reshape(head_dim, head_dim).astype(np.float64)
    return torch.from_numpy(orthogonal_factor(gaussian)).bfloat16()


CENTROIDS = (*(-c for c in reversed(HALF)), *HALF)
SYNTHETIC = replace(
    formats.get("tq4").description(HEAD_DIM), transform=Transform(own_rotation), centroids=CENTROIDS,
    boundaries=tuple((a + b) / 2 + 1e-4 for a, b in pairwise(CENTROIDS)),
)  # fmt: skip
LOPSIDED = replace(SYNTHETIC, centroids=tuple(c + 0.004 for c in CENTROIDS))
IN_TWO_PLANES = replace(
    SYNTHETIC, bits=3, centroids=LOPSIDED.centroids[::2],
    boundaries=tuple((a + b) / 2 for a, b in pairwise(LOPSIDED.centroids[::2])),
)  # fmt: skip


MADE_UP = {"mirrored": SYNTHETIC, "lopsided": LOPSIDED, "two_planes": IN_TWO_PLANES}


def made_up(name):
    return RotatedFormat(name, "of this test alone", MADE_UP[name].bits, lambda _: MADE_UP[name])


@pytest.fixture
def registered(monkeypatch):
    for name in MADE_UP:
        monkeypatch.setitem(formats.BY_NAME, name, (made_up(name), made_up(name)))


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize(
    "table", [*suite.CPU, pytest.param(suite.CUDA, marks=pytest.mark.cuda_long)], ids=lambda table: table.name
)  # fmt: skip
def test_a_made_up_format_runs_on_every_backend_that_reads_its_kind(table, name, registered):
    """Blocks of 8, two sequences: what is stored, and attention of both dtypes."""
    open_table(table)
    shape = (name, HEAD_DIM, 3, 2, 8)
    for case in (
        Store(CacheCase(*shape, (0, 0), (19, 9))),
        *(Attention(CacheCase(*shape, (12, 0), (7, 9)), d) for d in DTYPES),
    ):
        ((_, finding),) = suite.run(table, [case])
        assert finding.passed, (case, finding)


# -- What backends read ----------------------------------------------------------------------------------------------------
OTHERS = "--executor cpu and reference run every format"
CPU_READS = "the CPU kernels read tq4, tq2, tq3, tq5, tq6, tq8, bf16 and fp32"
GPU_READS = "the GPU kernels read tq4, tq2, tq3, tq5, tq6 and tq8"
ALL = {"cpu": cpu_layout.READS, "cuda": cuda_layout.READS, "npu": NPU_READS, "onnx": ONNX_READS}


@pytest.mark.parametrize(
    ("backend", "kv", "head_dim", "reason"),
    [
        ("cpu", "k=tq8,v=tq3", 64, None),
        ("cpu", "k=bf16,v=tq5", 128, None),
        *(("cpu", name, 128, f"{CPU_READS}, not {name}; {OTHERS}") for name in ("q8_0", "kivi2", "tq4_seed")),
        ("cpu", "bf16", 96, "the CPU kernels are made for a head_dim of 64, 128 or 256, not 96"),
        ("cpu", "tq4", 96, "the CPU kernels are made for a head_dim of 64, 128 or 256, not 96"),
        ("cpu", "q8_0", 80, "q8_0 stores blocks of 32 values and cannot hold head_dim 80"),
        ("cuda", "k=tq8,v=tq3", 64, None),
        ("cuda", "bf16", 128, f"{GPU_READS}, not bf16; {OTHERS}"),
        ("npu", "tq4", 128, None),
        ("npu", "k=bf16,v=tq4_seed", 128, None),
        ("npu", "tbq4_0", 128, f"its programs read tq4, tq4_seed and bf16, not tbq4_0; {OTHERS}"),
        ("npu", "bf16", 256, None),
        ("npu", "tq4", 96, "its programs are made for a head_dim of 64, 128 or 256, not 96"),
        ("onnx", "tq4", 256, None),
        ("onnx", "k=tq8,v=tq3", 64, None),
        ("onnx", "tq4_seed", 128, f"its graphs read tq4, tq2, tq3, tq5, tq6 and tq8, not tq4_seed; {OTHERS}"),
    ],
)
def test_a_backend_says_in_one_sentence_what_it_cannot_read(backend, kv, head_dim, reason):
    assert unsupported(ALL[backend], KVSpec(kv).plan(2), KVShape(2, head_dim)) == reason


def test_what_the_kernels_do_not_read_may_be_left_to_the_reference():
    """Their head_dim, tails and windows count all the same."""
    reads = replace(cpu_layout.READS, bf16_tokens=False, windows=False)
    assert unsupported(reads, KVSpec("q8_0").plan(2), KVShape(2, 128), others=True) is None
    assert "head_dim" in unsupported(reads, KVSpec("q8_0").plan(2), KVShape(2, 96), others=True)
    assert "leave out the tail" in unsupported(reads, KVSpec("q8_0", tail=8).plan(2), KVShape(2, 128), others=True)
    assert "sliding window" in unsupported(reads, KVSpec("q8_0").plan(2), KVShape(2, 128, 64), others=True)


def test_learned_keys_are_read_where_kernels_take_them():
    narrow, wide = calibration(heads=2, dim=64), calibration(heads=2, dim=128)
    for bits in COLUMNS:
        assert unsupported_format(cpu_layout.READS, narrow.format(bits), 64) is None
        assert unsupported_format(cuda_layout.READS, wide.format(bits), 128) is None
        assert unsupported_format(ONNX_READS, narrow.format(bits), 64) is None
        assert unsupported_format(NPU_READS, wide.format(bits), 128) is None
    assert "learned of vectors of 64 numbers, not 128" in unsupported_format(cpu_layout.READS, narrow.format(3), 128)
    without = replace(cpu_layout.READS, learned=False)
    assert "not lr3" in unsupported_format(without, narrow.format(3), 64)


def test_tables_that_are_built_in_are_those_of_one_format():
    for reads in (cpu_layout.READS, cuda_layout.READS, ONNX_READS):
        assert all(unsupported_format(reads, made_up(name), HEAD_DIM) is None for name in MADE_UP)
    assert (
        unsupported_format(ONNX_EXPORTED, made_up("mirrored"), HEAD_DIM) == f"exported graphs read tq4, not mirrored; {OTHERS}"
    )


def test_a_copy_of_a_format_under_another_name_is_read_by_all():
    """Names do not matter: equal descriptions are the same to every backend."""
    copy = RotatedFormat("copy", "", 4, formats.get("tq4").description)
    for reads in ALL.values():
        assert unsupported(reads, KVPlan(((copy, copy),) * 2), KVShape(2, 128)) is None


def test_nobody_outside_the_formats_knows_one_by_its_class_or_compares_its_name():
    """Descriptions and declarations are all that the rooms know of each other."""
    class_import = re.compile(r"formats\.compared\b.* import|import .*(TurboQuant|Hadamard)")
    name_test = re.compile(r"format\w*\.name (==|!=|in|not in)|isinstance\(\w*format")
    rooms = ("tq_ops", "models", "executors", "engine", "serving", "tq", "benchmarks", "validation")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if path.parent != ROOT / "tq_ops" / "formats"]
    assert len(files) > 100
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not class_import.search(text), path
        assert not name_test.search(text), path
    assert name_test.search('if kv_format.name != "tq4":')
    assert class_import.search("from haarkv.tq_ops.formats.compared import HadamardTBQ4")
