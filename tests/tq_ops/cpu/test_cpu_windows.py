"""CPU attention of layers with a sliding window and of tails: what a query sees, in rings that have begun anew."""

from __future__ import annotations

from itertools import pairwise

import bounds
import pytest
import torch
from at_length import MORE, pairwise_cases
from op_tables import LAYER, TABLES, Case, bf16_windows, every_table, relative
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import OpTable

BOUNDS = {torch.float32: bounds.LAYER_FP32.attention, torch.bfloat16: bounds.LAYER_BF16.attention}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
CALIBRATION = synthetic.calibration(LAYER + 1, 2, 128)
KINDS = [
    KVSpec("tq4"), KVSpec("k=tq3,v=bf16"), KVSpec("k=fp32,v=tq8", sink=9), KVSpec("tq4", tail=33, sink=3),
    KVSpec("k=lr4,v=tq3", tail=7, calibration=CALIBRATION),
]  # fmt: skip
SIZES = (30, 1, 1, 64, 9, 1, 64, 64, 1, 1)
CHUNK = 64


def rings(kv: KVSpec, window: int, block_size: int = 32) -> tuple[PagedKVCache, PagedSequences]:
    """A cache whose rings are as short as chunks of `CHUNK` let them be."""
    cache = PagedKVCache(
        kv.plan(LAYER + 1), KVShape(2, 128, window), num_blocks=64, num_rows=2, row_blocks=64, block_size=block_size,
        ring_chunk=CHUNK, chunk=CHUNK,
    )  # fmt: skip
    return cache, PagedSequences(64, block_size, num_rows=2)


def store_random(cache: PagedKVCache, batch: Batch, seed: int) -> Tensor:
    """Store random K and V of a batch by the reference; queries [T, 10, 128] fp32 of it."""
    generator, tokens = torch.Generator().manual_seed(seed), len(batch.positions)
    k, v = torch.randn(2, tokens, 2, 128, generator=generator)
    if formats.needs_calibration(cache.plan.k(LAYER).name):
        k = synthetic.vectors(CALIBRATION.k[LAYER], tokens, generator).transpose(0, 1)
    reference.store_kv(k, v, cache.view(LAYER, batch))
    return 2 * torch.randn(tokens, 10, 128, generator=generator)


@every_table
@DTYPES
@pytest.mark.parametrize("kv", KINDS, ids=str)
def test_a_query_sees_its_window_alone(table, kv, dtype):
    """Two sequences, one further than the other; sinks count as long as the window holds them."""
    window = (40, 200, 1)[KINDS.index(kv) % 3]
    cache, paging = rings(kv, window)
    ids, ops = [paging.add(), paging.add()], table.open()
    for seed, sizes in enumerate(zip(SIZES, SIZES[::-1], strict=True)):
        batch = paging.batch(ids, sizes)
        q = store_random(cache, batch, seed).to(dtype)
        ours, theirs = (by.paged_attention(q, cache.view(LAYER, batch), 128**-0.5) for by in (ops, reference))
        assert relative(ours, theirs) <= BOUNDS[dtype]


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("table", "kv", "dtype"), pairwise_cases(MORE, TABLES, [KINDS[0], KINDS[1], KINDS[3]], list(BOUNDS)),
    ids=lambda part: getattr(part, "name", str(part)),
)  # fmt: skip
def test_bits_do_not_depend_on_chunks_threads_or_companions(table, kv, dtype):
    """Of tokens whose windows reach over the end of a split of 1,024 keys."""
    ops, first, tokens = table.open(), 15 * CHUNK, 1160
    k, v = torch.randn(2, tokens, 2, 128, generator=torch.Generator().manual_seed(0))
    q = torch.randn(tokens, 10, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    results, before = [], torch.get_num_threads()
    try:
        for threads, sizes, companion in ((1, (64,), False), (2, (64, 1, 7, 30), True), (5, (13,), True)):
            torch.set_num_threads(threads)
            cache, paging = rings(kv, 300, block_size=128)
            ids, outs, begin = [paging.add(), paging.add()], [], 0
            for step in range(tokens):
                size = CHUNK if begin < first else sizes[step % len(sizes)]
                batch = paging.batch(ids[1:], [min(tokens, begin + size) - begin])
                reference.store_kv(k[begin : begin + size], v[begin : begin + size], cache.view(LAYER, batch))
                if begin >= first:
                    outs.append(attend(ops, cache, batch, q[begin : begin + size], paging, ids[0] if companion else None))
                begin += size
                if begin >= tokens:
                    break
            results.append(torch.cat(outs))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in pairwise(results))


def attend(
    ops: OpTable, cache: PagedKVCache, batch: Batch, q: Tensor, paging: PagedSequences, companion: int | None
) -> Tensor:
    """Attention of a batch of one sequence, beside a token of a companion where there is one."""
    if companion is None:
        return ops.paged_attention(q, cache.view(LAYER, batch), 0.1)
    other = paging.batch([companion], [1])
    store_random(cache, other, 0)
    blocks = max(batch.block_table.shape[1], other.block_table.shape[1])
    tables = (torch.nn.functional.pad(x.block_table, (0, blocks - x.block_table.shape[1]), value=-1) for x in (other, batch))
    both = Batch(
        torch.cat([other.positions, batch.positions]), torch.cat([other.slot_mapping, batch.slot_mapping]),
        torch.cat(list(tables)), torch.cat([other.seq_lens, batch.seq_lens]),
        torch.cat([other.query_start_loc, batch.query_start_loc[1:] + 1]), torch.cat([other.rows, batch.rows]),
    )  # fmt: skip
    return ops.paged_attention(torch.cat([q[:1], q]), cache.view(LAYER, both), 0.1)[1:]


@every_table
@DTYPES
def test_what_lies_before_the_window_is_not_read(table, dtype):
    """Blocks of another owner are given to others once no window holds them: neither they nor their numbers are looked at."""
    whole = PagedKVCache(KVSpec("tq4", sink=5).plan(LAYER + 1), KVShape(2, 128), num_blocks=40, block_size=64)
    paging, ops, window = PagedSequences(40, 64), table.open(), 300
    sequence = paging.add()
    store_random(whole, paging.batch([sequence], [2000]), 0)
    batch = paging.batch([sequence], [3])
    q = store_random(whole, batch, 1).to(dtype)
    one = PagedKVCache.over(
        whole.plan.layers[LAYER],
        LAYER,
        (whole.kv[LAYER].k.fields, whole.kv[LAYER].v.fields),
        whole.kv[LAYER].windows,
        128,
        window,
    )
    theirs = reference.paged_attention(q, one.view(LAYER, batch), 0.1)
    before = (2000 - window + 1) // 64
    for vectors in (side.vectors for side in whole.kv[LAYER].windows):
        vectors.fill_(float("nan"))
    for fields in (whole.kv[LAYER].k.fields, whole.kv[LAYER].v.fields):
        fields["scale"][:before] = float("nan")
    batch.block_table[:, :before] = -(2**30)
    assert relative(ops.paged_attention(q, one.view(LAYER, batch), 0.1), theirs) <= BOUNDS[dtype]


@every_table
@DTYPES
@pytest.mark.parametrize("kv", ["k=tq4,v=tq3", "k=tq2,v=tq8"])
def test_a_tail_is_read_where_its_ring_begins_anew(table, kv, dtype):
    """Token by token, so that the end of the ring, which is none of a block, comes to lie at each place of the tail."""
    case = Case(kv, 128, 5, 2, 16, (), (), tail=40, sink=3)
    kv_cache = PagedKVCache(case.plan, KVShape(2, 128), block_size=16, num_blocks=16, num_rows=1, chunk=27)
    assert [window.ring for window in kv_cache.kv[LAYER].windows if window] == [67, 67]
    for vectors in bf16_windows(kv_cache):
        vectors.fill_(float("nan"))
    paging, generator, ops = PagedSequences(16, 16, num_rows=1), torch.Generator().manual_seed(0), table.open()
    sequence = paging.add()
    for tokens in (*(27,) * 6, *(1,) * 80):
        batch = paging.batch([sequence], [tokens])
        k, v = torch.randn(2, tokens, 2, 128, generator=generator)
        reference.store_kv(k, v, kv_cache.view(LAYER, batch))
        q = (2 * torch.randn(tokens, 10, 128, generator=generator)).to(dtype)
        ours, theirs = (by.paged_attention(q, kv_cache.view(LAYER, batch), 128**-0.5) for by in (ops, reference))
        assert relative(ours, theirs) <= BOUNDS[dtype]
