"""What only some inputs show of the Triton op table, which also passes the contract of `test_op_tables.py`.

Compiled where there is a GPU, in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from dataclasses import replace

import bounds
import pytest
import torch
from at_length import MORE_CUDA, pairwise_cases
from cuda_caches import DEVICE, as_bytes, attention_bound, check_stored, on_device, pad_batch, same
from op_contract.caches import Store
from op_tables import LAYER, Case, filled, relative

from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import NonFiniteError

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import ops, schedule

BF16 = torch.bfloat16


# -- Attention ---------------------------------------------------------------------------------------------------------
def attention_error(case, cache, batch, size=1.0, scale=None):
    """How far attention over a cache is off, of BF16 queries of a size; the reference's are the same numbers in FP32."""
    scale = scale or case.head_dim**-0.5
    q = (size * torch.randn(len(batch.positions), case.kv_heads * case.group, case.head_dim)).to(BF16)
    theirs = reference.paged_attention(q.float(), cache.view(LAYER, batch), scale)
    ours = ops.paged_attention(q.to(DEVICE), on_device(cache, case).view(LAYER, batch.to(DEVICE)), scale)
    assert ours.dtype == BF16
    return relative(ours, theirs)


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("case", "programs"),
    [
        *pairwise_cases(
            MORE_CUDA,
            [
                Case("tq4", 64, 2, 1, 8, (150, 0, 300), (1, 1, 1)),
                Case("tq4", 64, 2, 2, 8, (150, 0), (3, 2)),  # as narrow tiles, though ragged
                Case("k=tq3,v=tq4", 64, 8, 1, 8, (153, 3), (10, 6)),  # as wide tiles; by one program, each takes all
                Case("tq4", 64, 2, 1, 8, (150, 0, 300), (1, 2, 1), window=70),
            ],
            [1, 12, 3],
        ),
        (Case("k=lr3,v=tq4", 64, 8, 2, 16, (20,), (8,), tail=4, sink=2), 1),  # whose vectors are merged 16 at a time
    ],
    ids=str,
)
def test_pieces_of_a_context_are_merged(monkeypatch, case, programs):
    """However many programs share the line of work, over V whose scales grow from tile to tile."""
    kv_cache, batch = filled(case)
    late = kv_cache.kv[LAYER].place(batch).block_table[:, 16:]
    kv_cache.kv[LAYER].v.fields["scale"][late[late >= 0].unique().long()] *= 3
    monkeypatch.setattr(schedule, "count_programs", lambda *_: programs)
    assert attention_error(case, kv_cache, batch) <= attention_bound(BF16)


@pytest.mark.parametrize(
    ("case", "v_scales", "queries"),
    [
        # Probabilities times scales go to the tensor cores in units of the largest scale, not below FP16's range.
        (Case("tq4", 64, 1, 1, 8, (20,), (1,)), 2.0**-16, (2.0,)),
        # Learned matrices are of any size; here queries become ten times FP16's largest number.
        (Case("k=lr3,v=tq3", 64, 8, 1, 8, (20,), (1,)), 1.0, (1e4, 0.125e-4)),
    ],
    ids=str,
)
def test_numbers_beyond_fp16_keep_their_precision(case, v_scales, queries):
    """`queries`: their size, and the softmax's scale if it is another."""
    kv_cache, batch = filled(case)
    kv_cache.kv[LAYER].v.fields["scale"].mul_(v_scales)
    assert attention_error(case, kv_cache, batch, *queries) <= attention_bound(BF16)


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
def store_args(**options):
    """K, V and a view of the reference's cache and of ours, whose slots hold nothing; 5 tokens, among them zeros."""
    store = Store(Case("tq4", 256, 1, 1, 24, (0,), (5,), **options))
    (k, v, theirs), (_, _, ours) = (store.arguments(torch.device(device)) for device in ("cpu", DEVICE))
    return k, v, theirs, ours


def test_denormal_numbers_are_stored_as_the_reference_stores_them():
    k, v, theirs, ours = store_args()
    k[2, 0] *= 1e-42
    ops.store_kv(k.to(DEVICE), v.to(DEVICE), ours)
    reference.store_kv(k, v, theirs)
    check_stored(ours.cache, theirs.cache, k, v, theirs.batch, bounds.ROTATED_FP32)


def test_what_a_step_refuses_is_kept_neither_packed_nor_in_bf16():
    """`append` alone, which does not wait: all vectors but that one are there."""
    k, v, theirs, ours = store_args(tail=3, sink=2)
    reference.store_kv(k, v, theirs)
    k[3, 0, 7] = torch.nan
    fault = ops.new_fault(DEVICE)
    ops.append(k.to(DEVICE), v.to(DEVICE), ours, fault)
    with pytest.raises(NonFiniteError, match="K of token 3"):
        ops.raise_fault(fault, ours.cache, theirs.batch)
    theirs.kv.windows[0].vectors[int(theirs.batch.rows[0]), 0, 2:][3] = torch.nan
    for mine, other in zip(ours.kv.windows, theirs.kv.windows, strict=True):
        assert torch.equal(mine.vectors.cpu().view(torch.uint8), other.vectors.view(torch.uint8))
