"""What only some inputs show of the Triton op table, which also passes the contract of `test_op_tables.py`.

Compiled where there is a GPU, in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import bounds
import pytest
import torch
from at_length import MORE_CUDA, pairwise_cases
from cuda_caches import DEVICE, as_bytes, attention_bound, attention_error, check_stored, on_device, pad_batch, same
from learned_slow import other_than_golden
from op_tables import LAYER, Case, filled, poisoned_cache, relative

from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import PagedSequences

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import ops, schedule

FP32, BF16 = torch.float32, torch.bfloat16
GPU_ONLY = [pytest.mark.cuda, pytest.mark.skipif(DEVICE.type != "cuda", reason="no NVIDIA GPU")]

# -- Attention ---------------------------------------------------------------------------------------------------------
LONG = [
    Case("tq4", head_dim, group, 2, 128, (2047, 512, 128, 1), new, window=window)
    for head_dim in (64, 128, 256) for group in (1, 2, 5, 8) for new in ((1, 1, 1, 1), (1, 130, 7, 64)) for window in (0, 512)
]  # fmt: skip
WINDOWS = [
    # Shorter than a window and longer, rings that began anew; one new token, some, and enough for wide tiles.
    Case("tq4", 64, 2, 1, 8, (60, 3), (1, 1), window=20),
    Case("tq4", 64, 2, 2, 8, (60, 3, 300), (4, 2, 1), window=20),
    Case("tq4", 64, 8, 1, 8, (60, 3), (9, 1), window=20),
    Case("tq4", 64, 2, 1, 8, (70, 0), (1, 1), window=1),
    # A window that begins within a block, in blocks of several tiles; over all blocks of another owner.
    Case("tq3", 64, 2, 1, 128, (300, 130), (1, 1), window=140),
    Case("tq4", 64, 2, 1, 8, (60, 3), (4, 2), pages=True, window=20),
    # A tail within a window, one beyond it, and sinks that it has left.
    Case("tq4", 64, 2, 1, 8, (60, 3), (1, 1), tail=5, sink=2, window=20),
    Case("tq4", 64, 2, 1, 8, (60, 30), (4, 2), tail=5, sink=2, window=20),
    Case("k=lr3,v=tq4", 64, 2, 2, 16, (60, 30), (4, 1), tail=25, sink=2, window=20),
    # Gemma's shape.
    Case("tq4", 256, 4, 1, 128, (600, 3), (1, 1), window=512),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(case, dtype, marks=GPU_ONLY) for case in LONG for dtype in (FP32, BF16)),
        *((case, (FP32, BF16)[number % 2]) for number, case in enumerate(WINDOWS)),
    ],
    ids=str,
)
def test_attention_equals_the_references(case, dtype):
    """At length, and in sliding windows."""
    assert attention_error(ops, case, dtype) <= attention_bound(dtype)


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("case", "programs"),
    pairwise_cases(
        MORE_CUDA,
        [
            Case("tq4", 64, 2, 1, 8, (150, 0, 300), (1, 1, 1)),
            Case("tq4", 64, 2, 2, 8, (150, 0), (3, 2)),  # as narrow tiles, though ragged
            Case("k=tq3,v=tq4", 64, 8, 1, 8, (153, 3), (10, 6)),  # as wide tiles; by one program, each takes all
            Case("tq4", 64, 2, 1, 8, (150, 0, 300), (1, 2, 1), window=70),
        ],
        [1, 12, 3],
    ),
    ids=str,
)
def test_pieces_of_a_context_are_merged(monkeypatch, case, programs):
    """However many programs share the line of work, over V whose scales grow from tile to tile."""
    kv_cache, batch = filled(case)
    late = kv_cache.kv[LAYER].place(batch).block_table[:, 16:]
    kv_cache.kv[LAYER].v.fields["scale"][late[late >= 0].unique().long()] *= 3
    q = torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim).to(BF16)
    theirs = reference.paged_attention(q, kv_cache.view(LAYER, batch), case.head_dim**-0.5)
    monkeypatch.setattr(schedule, "count_programs", lambda *_: programs)
    ours = ops.paged_attention(q.to(DEVICE), on_device(kv_cache, case).view(LAYER, batch.to(DEVICE)), case.head_dim**-0.5)
    assert relative(ours, theirs) <= attention_bound(BF16)


def test_a_window_is_walked_and_not_its_context():
    """Programs of a decode step: as many as a window has tiles, however many blocks the table has room for."""
    assert schedule.most_visible(2**20, None, 1, 128) == 2**20
    assert schedule.most_visible(2**20, 512, 1, 128) == 512 + 127
    assert schedule.most_visible(256, 512, 1, 128) == 256


def test_one_program_takes_all_of_a_column_tile(monkeypatch):
    """Whose vectors are then merged 16 at a time, those of one head."""
    monkeypatch.setattr(schedule, "count_programs", lambda *_: 1)
    case = Case("k=lr3,v=tq4", 64, 8, 2, 16, (20,), (8,), tail=4, sink=2)
    assert attention_error(ops, case, BF16) <= attention_bound(BF16)


@pytest.mark.parametrize(
    ("case", "unusual"),
    [
        # Probabilities times scales go to the tensor cores in units of the largest scale, not below FP16's range.
        (Case("tq4", 64, 1, 1, 8, (20,), (1,)), {"v_scales": 2.0**-16}),
        # Learned matrices are of any size; here queries become ten times FP16's largest number.
        (Case("k=lr3,v=tq3", 64, 8, 1, 8, (20,), (1,)), {"size": 1e4, "scale": 0.125e-4}),
    ],
    ids=str,
)
def test_numbers_beyond_fp16_keep_their_precision(case, unusual):
    assert attention_error(ops, case, BF16, **unusual) <= attention_bound(BF16)


@pytest.mark.parametrize("window", [{}, {"tail": 3, "sink": 2}, {"tail": 40}, {"window": 6}], ids=str)
def test_a_dead_sequence_reads_and_stores_nothing(window):
    """What pads a captured batch: length 0, slot -1, a block table of zeros, row 0."""
    case = Case("tq4", 64, 2, 1, 8, (9,), (1,), **window)
    kv_cache, batch = filled(case)
    copy, q = on_device(kv_cache, case), torch.randn(1, 2, 64).to(DEVICE)
    alone = ops.paged_attention(q, copy.view(LAYER, batch.to(DEVICE)), 0.125)
    both = ops.paged_attention(torch.cat([q, q]), copy.view(LAYER, pad_batch(batch, 1).to(DEVICE)), 0.125)
    assert relative(both[:1], alone) <= bounds.LAYER_FP32.attention
    assert (both[1] == 0).all()
    before, fault = as_bytes(copy), ops.new_fault(DEVICE)
    kv = torch.full((2, 1, 64), float("nan"), device=DEVICE)
    kv[0] = 1.0
    dead = replace(pad_batch(batch, 1), slot_mapping=torch.tensor([-1, -1])).to(DEVICE)
    ops.append(kv, kv, copy.view(LAYER, dead), fault)
    ops.raise_fault(fault, copy, dead)  # a dead sequence has no fault
    assert same(before, as_bytes(copy))


# -- Quantize and append -----------------------------------------------------------------------------------------------
def new_tokens(case: Case):
    """Two untouched caches, ours and the reference's, a batch, and K and V with some unusual vectors among them."""
    paging = PagedSequences(99, case.block_size, order=list(reversed(range(poisoned_cache(case, DEVICE).num_blocks))))
    ids = [paging.add() for _ in case.new]
    if any(case.stored_lengths):
        paging.batch(ids, case.stored_lengths)
    batch = paging.batch(ids, case.new)
    k, v = torch.randn(2, len(batch.positions), case.kv_heads, case.head_dim, generator=torch.Generator().manual_seed(2))
    k[0, 0] = 0.0
    k[1, 0] *= 1e30  # its scale saturates
    k[2, 0] *= 1e-42  # denormal numbers
    v[0, 0] *= 1e-12  # and this one's is below FP16
    v[1, 0] = 0.0
    v[1, 0, 3] = -2.5
    return poisoned_cache(case, DEVICE), poisoned_cache(case, torch.device("cpu")), batch, k, v


STORES = [Case("tq4", 64, 1, 3, 8, (60, 2), (11, 4), window=12), Case("tq4", 256, 1, 1, 24, (0,), (5,))]
"""What the contract has no case of: lengths beyond FP16 and denormal ones. Formats and head_dims are the contract's."""


@pytest.mark.parametrize("case", STORES, ids=str)
def test_the_same_codes_and_scales_are_stored_at_the_same_slots_and_nowhere_else(case):
    ours, theirs, batch, k, v = new_tokens(case)
    ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours.view(LAYER, batch.to(DEVICE)))
    reference.store_kv(k, v, theirs.view(LAYER, batch))
    check_stored(ours, theirs, k, v, batch, bounds.ROTATED_FP32)


@pytest.mark.parametrize("bits", [3, 4])
def test_the_golden_bytes_of_learned_keys_are_stored(golden, bits):
    assert not other_than_golden(ops, golden("learned/lr"), bits, DEVICE)


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("bad_vector", "window"),
    pairwise_cases(
        MORE_CUDA,
        [("k", float("nan")), ("k", -float("inf")), ("v", float("inf"))], [{}, {"tail": 3, "sink": 2}, {"window": 2}],
    ),
    ids=str,
)  # fmt: skip
def test_a_refused_vector_is_named_as_the_reference_names_it_and_nothing_is_stored(bad_vector, window):
    side, value = bad_vector
    ours, theirs, batch, k, v = new_tokens(replace(STORES[1], **window))
    before = as_bytes(ours)
    (k if side == "k" else v)[2, 0, 127] = value
    with pytest.raises(NonFiniteError) as expected:
        reference.store_kv(k, v, theirs.view(LAYER, batch))
    with pytest.raises(NonFiniteError) as error:
        ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours.view(LAYER, batch.to(DEVICE)))
    assert str(error.value) == str(expected.value)
    assert f"{side.upper()} of token 2" in str(error.value)
    assert same(before, as_bytes(ours))


@pytest.mark.parametrize(
    ("case", "most", "error", "says"),
    [
        (STORES[1], None, IndexError, "slots must lie in"),
        (replace(STORES[1], tail=3), 4, ValueError, "at most 4 new tokens"),
        (replace(STORES[1], window=3), 4, ValueError, "at most 4 new tokens"),
    ],
    ids=["a slot outside the cache", "more than a tail has room for", "more than a ring has room for"],
)
def test_places_that_there_are_not_are_refused(case, most, error, says):
    ours, _, batch, k, v = new_tokens(case)
    if most is None:
        batch.slot_mapping[3] = ours.num_slots
    else:
        ours.most_new_tokens = most
    with pytest.raises(error, match=says):
        ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours.view(LAYER, batch.to(DEVICE)))


def test_what_a_step_refuses_is_kept_neither_packed_nor_in_bf16():
    """`append` alone, which does not wait: all vectors but that one are there."""
    case = replace(STORES[1], tail=3, sink=2)
    ours, theirs, batch, k, v = new_tokens(case)
    reference.store_kv(k, v, theirs.view(LAYER, batch))
    k[3, 0, 7] = torch.nan
    fault = ops.new_fault(DEVICE)
    ops.append(k.to(DEVICE), v.to(DEVICE), ours.view(LAYER, batch.to(DEVICE)), fault)
    with pytest.raises(NonFiniteError, match="K of token 3"):
        ops.raise_fault(fault, ours, batch)
    (k_window, v_window), (theirs_k, theirs_v) = ours.kv[LAYER].windows, theirs.kv[LAYER].windows
    ring = theirs_k.vectors[int(batch.rows[0]), 0, 2:]
    ring[3] = torch.nan
    assert torch.equal(k_window.vectors.cpu().view(torch.uint8), theirs_k.vectors.view(torch.uint8))
    assert torch.equal(v_window.vectors.cpu().view(torch.uint8), theirs_v.vectors.view(torch.uint8))
