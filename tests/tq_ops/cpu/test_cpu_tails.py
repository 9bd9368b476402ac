"""CPU attention over tails whose ring of places has begun anew, and over levels of 2 and 3 bits of every head_dim."""

from __future__ import annotations

import pytest
import torch
from op_tables import LAYER, Case, every_table, relative, windows_of

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation import bounds
from haarkv.validation.ops.cases import Attention

BOUNDS = {torch.float32: bounds.LAYER_FP32.attention, torch.bfloat16: bounds.LAYER_BF16.attention}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])


@every_table
@DTYPES
@pytest.mark.parametrize("kv", ["k=tq4,v=tq3", "k=tq2,v=tq8"])
def test_a_tail_is_read_where_its_ring_begins_anew(table, kv, dtype):
    """Token by token, so that the end of the ring, which is none of a block, comes to lie at each place of the tail."""
    case = Case(kv, 128, 5, 2, 16, (), (), tail=40, sink=3)
    made = PagedKVCache(case.plan, KVShape(2, 128), block_size=16, num_blocks=16, num_rows=1, chunk=27)
    assert [window.ring for window in made.kept(LAYER) if window] == [67, 67]
    for vectors in windows_of(made):
        vectors.fill_(float("nan"))
    paging, generator, ops = PagedSequences(16, 16, num_rows=1), torch.Generator().manual_seed(0), table.open()
    sequence = paging.add()
    for tokens in (*(27,) * 6, *(1,) * 80):
        batch = paging.batch([sequence], [tokens])
        k, v = torch.randn(2, tokens, 2, 128, generator=generator)
        reference.store_kv(k, v, made, LAYER, batch)
        q = (2 * torch.randn(tokens, 10, 128, generator=generator)).to(dtype)
        ours, theirs = (by.paged_attention(q, made, LAYER, batch, 128**-0.5) for by in (ops, reference))
        assert relative(ours, theirs) <= BOUNDS[dtype]


@every_table
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv", ["tq2", "tq3"])
def test_levels_of_two_and_three_bits_are_unpacked_at_every_head_dim(table, kv, head_dim, dtype):
    case = Attention(Case(kv, head_dim, 5, 1, 16, (37, 0), (1, 9)), dtype)
    found = case.check(table.open(), torch.device("cpu"))
    assert found.passed, found
