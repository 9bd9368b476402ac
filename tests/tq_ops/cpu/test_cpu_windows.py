"""CPU attention of layers with a sliding window and of tails: what a query sees, in rings that have begun anew."""

from __future__ import annotations

from itertools import pairwise

import bounds
import pytest
import torch
from at_length import MORE, pairwise_cases
from op_contract.caches import bf16_windows
from op_tables import LAYER, TABLES, Case, every_table, relative

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

BOUNDS = {torch.float32: bounds.LAYER_FP32.attention, torch.bfloat16: bounds.LAYER_BF16.attention}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
KINDS = [KVSpec("tq4"), KVSpec("k=tq3,v=bf16"), KVSpec("tq4", tail=33, sink=3)]
CHUNK = 64


def tokens_of(count, seed):
    """q [T, 10, 128] fp32, k and v [T, 2, 128]."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, 2, 128, generator=generator)
    return 2 * torch.randn(count, 10, 128, generator=generator), k, v


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("table", "kv", "dtype"), pairwise_cases(MORE, TABLES, KINDS, list(BOUNDS)),
    ids=lambda part: getattr(part, "name", str(part)),
)  # fmt: skip
def test_bits_do_not_depend_on_chunks_threads_or_companions(table, kv, dtype):
    """Of tokens whose windows reach over the end of a split of 1,024 keys, in rings as short as chunks let them be."""
    ops, first, count = table.open(), 15 * CHUNK, 1160
    own, other = tokens_of(count, 0), tokens_of(count, 1)
    results, before = [], torch.get_num_threads()
    try:
        for threads, sizes, beside in ((1, (64,), False), (2, (64, 1, 7, 30), True), (5, (13,), True)):
            torch.set_num_threads(threads)
            cache = PagedKVCache(
                kv.plan(LAYER + 1),
                KVShape(2, 128, 300),
                num_blocks=64,
                num_rows=2,
                row_blocks=64,
                ring_chunk=CHUNK,
                chunk=CHUNK,
            )
            paging, outs, begin, step = PagedSequences(64, cache.block_size, num_rows=2), [], 0, 0
            sequence, companion = paging.add(), paging.add()
            while begin < count:
                size = min(count - begin, CHUNK if begin < first else sizes[step % len(sizes)])
                batch = paging.batch([companion, sequence][not beside :], [1, size][not beside :])
                parts = zip(other, own, strict=True)
                q, k, v = (torch.cat([x[step : step + beside], y[begin : begin + size]]) for x, y in parts)
                reference.store_kv(k, v, cache.view(LAYER, batch))
                if begin >= first:
                    outs.append(ops.paged_attention(q.to(dtype), cache.view(LAYER, batch), 0.1)[beside:])
                begin, step = begin + size, step + 1
            results.append(torch.cat(outs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in pairwise(results))


@every_table
@DTYPES
def test_what_lies_before_the_window_is_not_read(table, dtype):
    """Blocks of another owner are given to others once no window holds them: neither they nor their numbers are looked at."""
    whole = PagedKVCache(KVSpec("tq4", sink=5).plan(LAYER + 1), KVShape(2, 128), num_blocks=40, block_size=64)
    paging, ops, window, kv = PagedSequences(40, 64), table.open(), 300, whole.kv[LAYER]
    sequence = paging.add()
    for count in (2000, 3):
        batch, (q, k, v) = paging.batch([sequence], [count]), tokens_of(count, count)
        reference.store_kv(k, v, whole.view(LAYER, batch))
    one = PagedKVCache.over(whole.plan.layers[LAYER], LAYER, kv.fields, kv.windows, 128, window)
    theirs = reference.paged_attention(q.to(dtype), one.view(LAYER, batch), 0.1)
    before = (2000 - window + 1) // 64
    for side in (kv.k, kv.v):
        side.window.vectors.fill_(float("nan"))
        side.fields["scale"][:before] = float("nan")
    batch.block_table[:, :before] = -(2**30)
    assert relative(ops.paged_attention(q.to(dtype), one.view(LAYER, batch), 0.1), theirs) <= BOUNDS[dtype]


@every_table
@DTYPES
@pytest.mark.parametrize("kv", ["k=tq4,v=tq3", "k=tq2,v=tq8"])
def test_a_tail_is_read_where_its_ring_begins_anew(table, kv, dtype):
    """Token by token, so that the end of the ring, which is none of a block, comes to lie at each place of the tail."""
    case = Case(kv, 128, 5, 2, 16, (), (), tail=40, sink=3)
    cache = PagedKVCache(case.plan, KVShape(2, 128), block_size=16, num_blocks=16, num_rows=1, chunk=27)
    assert [window.ring for window in cache.kv[LAYER].windows if window] == [67, 67]
    for vectors in bf16_windows(cache):
        vectors.fill_(float("nan"))
    paging, ops = PagedSequences(16, 16, num_rows=1), table.open()
    sequence = paging.add()
    for seed, count in enumerate((*(27,) * 6, *(1,) * 80)):
        batch, (q, k, v) = paging.batch([sequence], [count]), tokens_of(count, seed)
        reference.store_kv(k, v, cache.view(LAYER, batch))
        ours, theirs = (by.paged_attention(q.to(dtype), cache.view(LAYER, batch), 128**-0.5) for by in (ops, reference))
        assert relative(ours, theirs) <= BOUNDS[dtype]
