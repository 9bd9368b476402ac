"""CPU attention of prompts: the same bits however they are cut, and by any instructions that sum integers; bounded memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bounds
import pytest
import torch
from op_contract import suite
from op_tables import LAYER, Case, every_table, filled, relative
from torch import Tensor

from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import calls, layout, library
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.cache import PagedKVCache

# Passes of 128 rows and less, blocks and items that end within a prompt, levels left over of a tile, and tokens in BF16.
PROMPTS = (
    Case("tq4", 128, 5, 2, 128, (1000, 0), (90, 41)),
    Case("tq4", 64, 2, 1, 16, (120,), (75,)),
    Case("k=tq4,v=tq3", 128, 2, 1, 128, (0,), (150,)),
    Case("k=lr5,v=tq4", 128, 4, 1, 128, (90,), (60,)),
    Case("k=lr4,v=tq3", 128, 2, 1, 32, (30,), (70,)),
    Case("k=tq6,v=tq4", 128, 4, 1, 128, (100,), (30,)),
    Case("tq4", 128, 5, 1, 128, (300,), (50,), tail=128, sink=4),
    Case("k=lr4,v=tq3", 128, 8, 1, 16, (0,), (60,), tail=17, sink=20),
    # Sides of numbers, whose sums are FP32, beside sums of integers and each other.
    Case("k=bf16,v=tq4", 128, 4, 1, 24, (90,), (60,), tail=17, sink=4),
    Case("k=fp32,v=bf16", 64, 2, 1, 128, (120,), (75,)),
    Case("k=bf16,v=tq8", 128, 5, 1, 128, (64,), (90,)),
    # Across a border of stretches, and two.
    Case("k=lr4,v=tq4", 64, 3, 2, 64, (1000,), (60,)),
    Case("k=lr4,v=tq4", 64, 3, 2, 64, (2040, 3), (20, 1)),
    # Sliding windows whose rings have begun anew, over the end of a split of 1,024 keys.
    Case("tq4", 128, 5, 2, 128, (1150, 9), (64, 1), window=300),
    Case("k=tq3,v=bf16", 128, 5, 2, 128, (1150, 9), (64, 1), window=300),
    Case("tq4", 128, 5, 2, 128, (1150, 9), (64, 1), window=300, tail=33, sink=3),
)


def queries(case: Case, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    shape = (sum(case.new), case.kv_heads * case.group, case.head_dim)
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


def attend_case(case: Case, ops: CpuOps) -> Tensor:
    cache, batch = filled(case)
    return ops.paged_attention(queries(case), cache.view(LAYER, batch), case.head_dim**-0.5)


@every_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_a_prompt_gets_the_same_bits_however_it_is_cut_on_any_threads(table, case, dtype):
    """Down to single tokens, which are what decoding asks for."""
    if dtype == torch.float32 and case not in PROMPTS[:2] and not case.window:
        pytest.skip("sums of FP32 queries have no passes of their own")
    ops, (cache, batch), q = table.open(), filled(case), queries(case, dtype)
    scale, before = case.head_dim**-0.5, torch.get_num_threads()
    whole = ops.paged_attention(q, cache.view(LAYER, batch), scale)
    try:
        for threads, size in ((1, 1), (2, 13), (5, 64)):
            torch.set_num_threads(threads)
            for tokens, piece in batch.cut(size):
                rows = slice(None) if tokens is None else tokens
                assert torch.equal(ops.paged_attention(q[rows], cache.view(LAYER, piece), scale), whole[rows]), size
    finally:
        torch.set_num_threads(before)


@every_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_lies_before_the_window_is_not_read(table, dtype):
    """Blocks of another owner are given to others once no window holds them: neither they nor their numbers are looked at."""
    case, window = Case("tq4", 128, 5, 2, 64, (2000,), (3,), sink=5), 300
    cache, batch = filled(case)
    kv, ops, q = cache.kv[LAYER], table.open(), queries(case, dtype)
    one = PagedKVCache.over(case.plan.layers[LAYER], LAYER, kv.fields, kv.windows, 128, window)
    theirs = reference.paged_attention(q, one.view(LAYER, batch), 0.1)
    outside = (2000 - window + 1) // 64
    for side in (kv.k, kv.v):
        side.window.vectors.fill_(float("nan"))
        side.fields["scale"][batch.block_table[0, :outside].long()] = float("nan")
    batch.block_table[:, :outside] = -(2**30)
    layer_bounds = bounds.LAYER_FP32 if dtype == torch.float32 else bounds.LAYER_BF16
    assert relative(ops.paged_attention(q, one.view(LAYER, batch), 0.1), theirs) <= layer_bounds.attention


def same_integers() -> list[str]:
    """Instruction sets of this CPU that sum integers, beside `avx512vnni`."""
    available = library.isas()
    first = library.ISAS.index("avx512vnni")
    return [isa for isa in library.ISAS[first + 1 :] if isa in available]


def rotate_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every instruction set rotate as it does where a matrix has other numbers than BF16 ones."""

    def without_pairs(*args: object) -> layout.Layout:
        return replace(layout.layout(*args), rotate_pairs=None, rotate_back_pairs=None)

    monkeypatch.setattr(calls, "layout", without_pairs)


@pytest.mark.parametrize("isa", ["amx", "avx512vnni"])
def test_rotations_of_bf16_lose_next_to_nothing(isa, monkeypatch):
    """Beside FP32 rotations they move few of the BF16 results to a neighbour. Without the lower parts they move a third."""
    if isa not in library.isas() or not library.load().haarkv_isas() & library.BF16_PRODUCTS:
        pytest.skip(f"this CPU has no {isa} with BF16 products")
    ops, cases = CpuOps(isa), [PROMPTS[i] for i in (0, 1, 3, 6)]

    def outputs() -> list[Tensor]:
        return [attend_case(case, ops) for case in cases]

    bf16_outputs = outputs()
    rotate_in_fp32(monkeypatch)
    expected = outputs()
    changed_shares = [(x != y).float().mean() for x, y in zip(bf16_outputs, expected, strict=True)]
    assert 0 < max(changed_shares) < 0.01
    assert all(relative(x, y) <= 2.0**-8 for x, y in zip(bf16_outputs, expected, strict=True))


def sums_tiles_of_bf16(case: Case) -> bool:
    """Whether `amx` may sum BF16 numbers of a side, whose order no other instructions follow."""
    return any(kv_format.plain == torch.bfloat16 for kv_format in case.plan.layers[LAYER])


@pytest.mark.parametrize("case", [case for case in (*PROMPTS, *suite.ATTENTION) if not sums_tiles_of_bf16(case)], ids=str)
def test_integers_are_summed_to_the_same_bits_by_any_instructions(case, monkeypatch):
    """Of the same queries: some rotate them in BF16, unless a matrix has other numbers."""
    if not (others := same_integers()):
        pytest.skip("this CPU sums integers in one way at most")
    rotate_in_fp32(monkeypatch)
    expected = attend_case(case, CpuOps("avx512vnni"))
    for isa in others:
        assert torch.equal(attend_case(case, CpuOps(isa)), expected), isa


# Under a limit on its address space, which no load of the machine changes, as it does what is resident.
LIMITED_SCRIPT = """
import resource
from pathlib import Path
import torch
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

torch.set_num_threads(1)
ops, tokens = CpuOps(), 4096
cache = PagedKVCache(KVSpec("tq4").plan(1), KVShape(1, 128), num_blocks=40, num_rows=2)
paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=2)
batch, few = (paging.batch([paging.add()], [count]) for count in (tokens, 200))
k = torch.randn(tokens, 1, 128)
ops.store_kv(k, k, cache.view(0, batch))
q = torch.randn(tokens, 16, 128).bfloat16()
ops.paged_attention(q[:200], cache.view(0, few), 0.1)  # what loads at the first call is there now
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + q.numel() * 2 + 40 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
ops.paged_attention(q, cache.view(0, batch), 0.1)
try:
    torch.empty(85 * 2**20, dtype=torch.uint8)
except RuntimeError:
    print("there was no room for 85 MB")
"""


def test_a_long_prompt_takes_little_memory():
    """4,096 tokens of 16 heads at once would leave 85 MB of partial sums and 34 MB of rotated queries."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux tells a process its address space")
    run = subprocess.run([sys.executable, "-c", LIMITED_SCRIPT], capture_output=True, text=True, check=False)
    assert run.stdout == "there was no room for 85 MB\n", run.stderr
