"""Every op table against the reference: attention over stored codes, quantize-append, projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from op_tables import LAYER, Backend, Case, every_table, filled, poisoned_cache, relative
from small_models import cache_tensors
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats.rotated import RotatedFormat
from haarkv.tq_ops.formats.turboquant import codebook_on
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_levels

stored = cache(filled)
"""The same, filled once a case."""

# Every pair of format, head_dim, group, batch and length, as far as a format has the head_dim.
CASES = (
    Case("tq4", 128, 5, 2, 128, (0, 2, 126, 127, 128, 512), (1, 1, 1, 1, 1, 1)),
    Case("tq4", 128, 1, 3, 128, (2047,), (1,)),
    Case("tq4", 128, 8, 1, 8, (127, 2), (1, 1)),
    Case("tq4", 128, 2, 2, 16, (0, 120), (9, 7)),
    Case("tq4", 64, 8, 1, 128, (0, 1, 2, 3, 127, 128, 129, 500), (1,) * 8),
    Case("tq4", 64, 5, 2, 8, (0, 30), (13, 5)),
    Case("tq4", 64, 1, 1, 128, (2047, 3), (1, 1)),
    Case("tq4", 256, 2, 2, 128, (128, 512, 0), (1, 1, 3)),
    Case("tq4", 256, 5, 1, 24, (0, 40, 100), (11, 1, 2)),
    Case("tq4", 256, 8, 1, 128, (2047,), (1,)),
    Case("tbq4_0", 128, 5, 2, 128, (0, 126, 512), (3, 3, 1)),
    Case("tbq4_0", 128, 8, 1, 128, (2047,), (1,)),
    Case("tbq4_0", 128, 1, 2, 8, (0, 2, 120), (1, 1, 1)),
    Case("tbq4_0", 256, 2, 1, 128, (126, 127, 128), (1, 2, 1)),
    Case("tbq4_0", 256, 5, 2, 8, (0, 60), (17, 1)),
    Case("k=tbq4_0,v=tq4", 128, 2, 1, 128, (128, 30), (2, 20)),
    Case("k=tq4,v=tbq4_0", 256, 1, 2, 128, (200,), (1,)),
    Case("tq4", 128, 5, 2, 16, (0, 126, 300), (3, 1, 1), pages=True),
    Case("tbq4_0", 256, 2, 2, 128, (130,), (2,), pages=True),
)


@cache
def expected(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and what the reference makes of them."""
    made, batch = stored(case)
    generator = torch.Generator().manual_seed(1)
    shape = (len(batch.positions), case.kv_heads * case.group, case.head_dim)
    q = (2 * torch.randn(shape, generator=generator)).to(dtype)
    return q, reference.paged_attention(q, made, LAYER, batch, case.head_dim**-0.5)


def attention(table: Backend, case: Case, q: Tensor, batch: Batch) -> Tensor:
    return table.open().paged_attention(q, stored(case)[0], LAYER, batch, case.head_dim**-0.5)


@every_table
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_the_references(table, case):
    for dtype, bound in ((torch.float32, bounds.LAYER_FP32), (torch.bfloat16, bounds.LAYER_BF16)):
        q, theirs = expected(case, dtype)
        ours = attention(table, case, q, stored(case)[1])
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        assert relative(ours, theirs) <= bound.attention


@every_table
def test_bf16_attention_rounds_where_the_reference_does(table):
    q, theirs = expected(CASES[0], torch.bfloat16)
    ours = attention(table, CASES[0], q, stored(CASES[0])[1])
    unrounded = attention(table, CASES[0], q.float(), stored(CASES[0])[1]).bfloat16()
    if table.name.endswith("vnni"):
        distance, rounding = ((x.double() - theirs.double()).norm(dim=-1).mean() for x in (ours, unrounded))
        assert distance <= bounds.OP_TABLE_BF16_INTEGERS * rounding
    else:
        assert (ours != theirs).float().mean() <= bounds.OP_TABLE_BF16_DIFFERENT
    assert (unrounded != theirs).float().mean() > 2 * bounds.OP_TABLE_BF16_DIFFERENT


@every_table
@pytest.mark.parametrize("case", [CASES[3], CASES[10], CASES[14]], ids=str)
def test_a_token_by_itself_gets_the_same_bits_as_in_its_batch(table, case):
    q, _ = expected(case, torch.float32)
    _, batch = stored(case)
    together = attention(table, case, q, batch)
    for row, (begin, end) in enumerate(pairwise(batch.query_start_loc.tolist())):
        for token in range(begin, end):
            position = batch.positions[token : token + 1]
            alone = replace(
                batch,
                positions=position,
                slot_mapping=batch.slot_mapping[token : token + 1],
                block_table=batch.block_table[row : row + 1],
                seq_lens=position.int() + 1,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                rows=batch.rows[row : row + 1],
            )
            assert torch.equal(attention(table, case, q[token : token + 1], alone)[0], together[token])


@every_table
def test_results_do_not_depend_on_the_number_of_threads(table):
    case, ops = CASES[7], table.open()
    _, batch = stored(case)
    q, _ = expected(case, torch.float32)
    x, weight = torch.randn(3, 96).bfloat16(), torch.randn(501, 96).bfloat16()
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((attention(table, case, q, batch), ops.linear(x, weight)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@every_table
def test_a_query_that_is_not_a_number_gives_no_number(table):
    case = CASES[0]
    q, theirs = expected(case, torch.float32)
    q = q.clone()
    q[2, 4, 7] = float("nan")
    ours = attention(table, case, q, stored(case)[1])
    assert ours[2, 4].isnan().all()
    assert relative(torch.cat([ours[:2], ours[3:]]), torch.cat([theirs[:2], theirs[3:]])) <= bounds.LAYER_FP32.attention


# -- Quantize and append -----------------------------------------------------------------------------------------------
def new_tokens(case: Case, dtype: torch.dtype = torch.float32) -> tuple[PagedKVCache, Batch, Tensor, Tensor]:
    """An untouched cache, a batch for it, and K and V with some unusual vectors among them."""
    made = poisoned_cache(case)
    paging = PagedSequences(made.num_blocks, case.block_size, order=list(reversed(range(made.num_blocks))))
    batch = paging.batch([paging.add() for _ in case.new], case.new)
    k, v = torch.randn(2, len(batch.positions), case.kv_heads, case.head_dim, generator=torch.Generator().manual_seed(2))
    k[0, 0] = 0.0
    k[1, 0] *= 1e30  # its scale saturates
    v[0, 0] *= 1e-12  # and this one's is below FP16
    v[1, 0] = 0.0
    v[1, 0, 3] = -2.5
    return made, batch, k.to(dtype), v.to(dtype)


STORES = (
    Case("tq4", 64, 1, 3, 8, (0, 0), (11, 4)),
    Case("tq4", 128, 1, 8, 128, (0, 0, 0), (1, 1, 1)),
    Case("tq4", 128, 1, 9, 16, (0,), (40,)),
    Case("tq4", 256, 1, 2, 128, (0,), (5,)),
    Case("tbq4_0", 128, 1, 2, 128, (0,), (5,)),
    Case("k=tq4,v=tbq4_0", 256, 1, 2, 8, (0,), (12,)),
    Case("tq4", 128, 1, 2, 16, (0, 0), (40, 3), pages=True),
    Case("tbq4_0", 128, 1, 2, 8, (0,), (12,), pages=True),
)


@every_table
@pytest.mark.parametrize("case", STORES, ids=str)
def test_the_same_codes_and_scales_are_stored_at_the_same_slots_and_nowhere_else(table, case):
    for dtype in (torch.float32, torch.bfloat16):
        ours, batch, k, v = new_tokens(case, dtype)
        if "tbq4_0" in case.kv:
            k, v = (torch.where(x.abs() > 1e20, 1.0, x) for x in (k, v))  # which it refuses
        theirs = new_tokens(case)[0]
        table.open().store_kv(k, v, ours, LAYER, batch)
        reference.store_kv(k, v, theirs, LAYER, batch)
        block, offset = batch.slot_mapping // case.block_size, batch.slot_mapping % case.block_size
        for (layer, side, name, mine), (*_, other) in zip(cache_tensors(ours), cache_tensors(theirs), strict=True):
            written = torch.zeros(mine.shape[:3], dtype=torch.bool)
            if layer == LAYER:
                written[block, :, offset] = True
            assert torch.equal(mine[~written].view(torch.uint8), other[~written].view(torch.uint8)), "a slot was touched"
            kv_format = getattr(ours, f"{side}_format")(LAYER)
            if layer == LAYER and name == "codes" and kv_format.name == "tq4":
                same_levels(kv_format, mine[block, :, offset], other[block, :, offset], k if side == "k" else v)
            elif layer == LAYER:
                # One step of FP16 where a level fell to the other side of a boundary; in these cases none does.
                assert torch.equal(mine[written], other[written])


def same_levels(kv_format, ours: Tensor, theirs: Tensor, x: Tensor) -> None:
    ours, theirs = (kv_format.levels({"codes": codes}) for codes in (ours, theirs))
    choice = kv_format.choice(x.float(), LAYER, bounds.ROTATED_FP32)
    boundaries = codebook_on(x.shape[-1], x.device).boundaries
    assert compare_levels(theirs, ours, choice.value, boundaries, choice.reach).unexplained == 0


@every_table
@pytest.mark.parametrize(("side", "value"), [("k", float("nan")), ("k", -float("inf")), ("v", float("inf"))])
def test_a_vector_that_is_not_finite_is_named_as_the_reference_names_it_and_nothing_is_stored(table, side, value):
    ours, batch, k, v = new_tokens(STORES[2])
    before = [tensor.clone() for *_, tensor in cache_tensors(ours)]
    (k if side == "k" else v)[7, 8, 127] = value
    with pytest.raises(NonFiniteError) as error:
        table.open().store_kv(k, v, ours, LAYER, batch)
    with pytest.raises(NonFiniteError) as wanted:
        reference.store_kv(k, v, new_tokens(STORES[2])[0], LAYER, batch)
    assert str(error.value) == str(wanted.value)
    assert f"{side.upper()} of token 7" in str(error.value)
    for was, (*_, tensor) in zip(before, cache_tensors(ours), strict=True):
        assert torch.equal(was.view(torch.uint8), tensor.view(torch.uint8))


@every_table
def test_a_value_on_a_boundary_gets_the_level_above_it(table):
    _, batch, k, v = new_tokens(STORES[1])
    tq4 = formats.get("tq4").description(128)
    middle = replace(tq4, boundaries=(*tq4.boundaries[:7], 0.0, *tq4.boundaries[8:]))
    kv_format = RotatedFormat("tq4_middle", "", 4, lambda _: middle)
    plan = KVPlan.uniform(kv_format, kv_format, LAYER + 1)
    ours = PagedKVCache(plan, num_kv_heads=STORES[1].kv_heads, head_dim=128, num_blocks=5)
    table.open().store_kv(torch.zeros_like(k), torch.zeros_like(v), ours, LAYER, batch)
    block, offset = batch.slot_mapping // ours.block_size, batch.slot_mapping % ours.block_size
    assert (ours.k_fields(LAYER)["codes"][block, :, offset] == 0x88).all()


@every_table
@pytest.mark.parametrize("slot", [-1, 16 * 5])
def test_a_slot_outside_the_cache_is_refused(table, slot):
    ours, batch, k, v = new_tokens(STORES[2])
    assert ours.num_slots == 16 * 5
    batch.slot_mapping[3] = slot
    with pytest.raises(IndexError):
        table.open().store_kv(k, v, ours, LAYER, batch)


# -- Projections -------------------------------------------------------------------------------------------------------
def shapes() -> Sequence[tuple[int, int, int]]:
    """Tokens, in, out: rows and numbers left over of what is read at once, an odd one too, one item and many."""
    return (1, 64, 3), (1, 1000, 700), (2, 37, 9), (3, 128, 24), (5, 66, 17), (8, 4096, 40), (12, 96, 8), (40, 32, 16)


@every_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), shapes())
def test_linear_equals_the_references(table, dtype, tokens, inputs, outputs):
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (tokens, outputs))
    ours = table.open().linear(x, weight)
    assert ours.dtype == torch.float32
    exact = x.double() @ weight.double().T
    assert ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).max() <= bounds.LAYER_FP32.op
