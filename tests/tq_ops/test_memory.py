"""Memory of a cache on large pages, where the system has them."""

from __future__ import annotations

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
