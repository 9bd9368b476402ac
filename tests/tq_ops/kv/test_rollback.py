"""Tokens that are taken back: a cache and its bookkeeping as if they had never come."""

import copy
import random

import pytest
import torch

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.kv.stored import Advance, take

HEADS, DIM, BLOCK = 2, 64, 32
SPECS = {
    "packed": KVSpec("tq4"),
    "mixed": KVSpec("k=tq3,v=bf16"),
    "tail": KVSpec("tq4", tail=5),
    "sinks": KVSpec("tq4", sink=9),
    "tail and sinks": KVSpec("k=tq5,v=tq2", tail=3, sink=6),
    "groups": KVSpec("kivi2"),
    "groups, a tail and sinks": KVSpec("k=kivi2,v=tq4", tail=40, sink=3),
}


def new(plan, sequences=3):
    """A small chunk, so that the ring wraps often."""
    cache = PagedKVCache(plan, KVShape(HEADS, DIM), num_blocks=12 * sequences, num_rows=sequences, chunk=12, block_size=BLOCK)
    return cache, PagedSequences(cache.num_blocks, BLOCK, num_rows=sequences)


def write(cache, batch, rows, seeds):
    """Vectors that follow from a sequence's number, a token's position and a seed."""
    positions, counts = batch.positions.tolist(), batch.query_start_loc.diff().tolist()
    owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    for layer in range(len(cache.plan.layers)):
        x = [
            torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(hash((owner, position, seed, layer))))
            for owner, position, seed in zip(owners, positions, seeds, strict=True)
        ]
        cache.view(layer, batch).write(torch.stack([k for k, _ in x]), torch.stack([v for _, v in x]))


def books(paging):
    """All that is kept of sequences; of a table what its blocks fill, for what lies behind them belongs to no sequence."""
    state = copy.deepcopy(vars(paging))
    state["_tables"] = {
        sequence: table[: len(state["_blocks"][sequence])].tolist() for sequence, table in state["_tables"].items()
    }
    return state


def window_bytes(cache, sequences, paging):
    """Every byte of the windows of these sequences, held or not."""
    rows = [paging.places(sequence)[1] for sequence in sequences]
    return [window.vectors[rows].clone() for kv in cache.kv.values() for window in kv.windows if window]


def assert_same(one, other, sequences):
    (cache_a, paging_a), (cache_b, paging_b) = one, other
    tables, free = [[books(paging)[name] for paging in (paging_a, paging_b)] for name in ("_blocks", "_free")]
    # A wrong token of one sequence may have taken the block that another would have got, and no block more.
    assert sorted([*free[0], *(b for blocks in tables[0].values() for b in blocks)]) == list(range(cache_a.num_blocks))
    assert {s: len(blocks) for s, blocks in tables[0].items()} == {s: len(blocks) for s, blocks in tables[1].items()}
    assert len(sequences) > 1 or (tables[0], free[0]) == (tables[1], free[1])
    for sequence in sequences:
        assert paging_a.length(sequence) == paging_b.length(sequence)
        tokens = range(paging_a.length(sequence))
        a, b = (take(cache, paging, sequence, tokens).tensors for cache, paging in (one, other))
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
    for a, b in zip(window_bytes(cache_a, sequences, paging_a), window_bytes(cache_b, sequences, paging_b), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_taken_back_never_was(name, count):
    """Random steps of sequences, in one cache with wrong tokens that are taken back, in the other without them."""
    plan, draw = SPECS[name].plan(1), random.Random(name)
    rolled, plain = new(plan, count), new(plan, count)
    sequences = [(rolled[1].add(), plain[1].add())[0] for _ in range(count)]
    for _ in range(12):
        subset = draw.sample(sequences, draw.randint(1, count))
        counts = [draw.randint(1, 8) for _ in subset]
        keep_counts = [draw.randint(1, count) for count in counts]
        advance = Advance(*rolled, subset, counts)
        right = [i < stay for count, stay in zip(counts, keep_counts, strict=True) for i in range(count)]
        write(rolled[0], advance.batch, subset, [0 if ok else 1 + draw.randrange(9) for ok in right])
        advance.keep(keep_counts)
        batch = plain[1].batch(subset, keep_counts)
        write(plain[0], batch, subset, [0] * sum(keep_counts))
        assert_same(rolled, plain, sequences)


def test_nothing_may_stay_and_blocks_come_back_in_order():
    cache, paging = new(KVSpec("tq4", tail=5, sink=3).plan(1))
    sequences = [paging.add() for _ in range(3)]
    write(cache, paging.batch(sequences, [12, 2, 7]), sequences, [0] * 21)
    write(cache, paging.batch(sequences, [12, 12, 12]), sequences, [0] * 36)
    before, windows = books(paging), window_bytes(cache, sequences, paging)
    advance = Advance(cache, paging, sequences[::-1], [12, 11, 12])
    assert books(paging)["_free"] != before["_free"]
    write(cache, advance.batch, sequences[::-1], [1] * 35)
    advance.keep([0, 0, 0])
    assert books(paging) == before
    for now, then in zip(window_bytes(cache, sequences, paging), windows, strict=True):
        assert torch.equal(now, then)


def test_a_ring_of_blocks_keeps_what_a_window_sees_again():
    """As many tokens come and are taken back as the cache allows; one more would overwrite what the next query sees."""
    window, length = 40, 300
    shape = KVShape(HEADS, DIM, window)
    caches = [
        PagedKVCache(KVSpec("tq4").plan(1), shape, num_blocks=20, num_rows=1, ring_chunk=8, block_size=BLOCK) for _ in "ab"
    ]
    most, results = caches[0].most_undone, []
    for cache, undone in zip(caches, (0, most), strict=True):
        paging = PagedSequences(cache.num_blocks, BLOCK, num_rows=1)
        sequence = paging.add()
        for first in range(0, length + undone, 4):
            count = min(4, length + undone - first)
            batch = paging.batch([sequence], [count])
            write(cache, batch, [0], [0] * count)
        paging.take_back([sequence], [undone])
        batch = paging.batch([sequence], [1])
        write(cache, batch, [0], [0])
        q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1))
        results.append(reference.paged_attention(q, cache.view(0, batch), 1.0))
    assert torch.equal(*results)
