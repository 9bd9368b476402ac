"""Memory of a cache on large pages, where the system has them."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
from on_large_pages import asks_for_large_pages, needs_large_pages

from haarkv.tq_ops.formats import parse
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.memory import LARGE_PAGE, ask_for_large_pages


@needs_large_pages
def test_a_cache_asks_for_large_pages():
    plan = KVPlan((parse("bf16"),))
    cache = PagedKVCache(plan, KVShape(8, 128), num_blocks=160)
    assert all(asks_for_large_pages(field) for kv in cache.kv.values() for fields in kv.fields for field in fields.values())


@pytest.mark.parametrize("nbytes", [0, 1, LARGE_PAGE - 1, LARGE_PAGE, 2 * LARGE_PAGE + 5])
def test_memory_of_any_size_stays_what_it_was(nbytes):
    numbers = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8)
    before = numbers.clone()
    ask_for_large_pages(numbers.data_ptr() + 3, nbytes)
    assert torch.equal(numbers, before)


_ROUNDS = """
from resource import RUSAGE_SELF, getrusage
import torch
from haarkv.tq_ops.memory import keep_freed_memory

keep_freed_memory()
faults = [getrusage(RUSAGE_SELF).ru_minflt]
for _ in range(8):
    blocks = [torch.zeros(2**21) for _ in range(4)]
    del blocks
    faults.append(getrusage(RUSAGE_SELF).ru_minflt)
print(min(after - before for before, after in zip(faults, faults[1:])))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this system's malloc has no options")
def test_blocks_of_megabytes_are_used_again_without_page_faults():
    """By default each round of four blocks of 8 MiB takes 8,192 faults of 4 KiB."""
    printed = subprocess.run([sys.executable, "-c", _ROUNDS], check=True, capture_output=True, text=True).stdout
    assert int(printed) < 1000
