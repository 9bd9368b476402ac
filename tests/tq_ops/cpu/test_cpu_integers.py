"""CPU attention of BF16 activations by 16-bit integers: what is hardest for their steps, sums and rounding."""

from __future__ import annotations

import bounds
import pytest
import torch
from op_tables import LAYER, Case, every_table, filled, relative
from torch import Tensor

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu.layout import LARGEST_LEVEL, READS, layout
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import readable

CASE = Case("tq4", 128, 5, 2, 128, (700, 255), (1, 1))
SCALE = CASE.head_dim**-0.5
# Against exact attention, at most so many times the distance that the reference's own rounding points leave.
BESIDE_BF16 = 1.5


def queries(case: Case, seed: int = 3) -> Tensor:
    tokens, generator = sum(case.new), torch.Generator().manual_seed(seed)
    return torch.randn(tokens, case.kv_heads * case.group, case.head_dim, generator=generator).bfloat16()


def check(table, q: Tensor, cache: PagedKVCache, batch: Batch) -> Tensor:
    """The result, as near to exact attention as the reference with its BF16 probabilities is, and within its bound of it."""
    ours = table.open().paged_attention(q, cache.view(LAYER, batch), SCALE)
    theirs = reference.paged_attention(q, cache.view(LAYER, batch), SCALE)
    exact = reference.paged_attention(q.float(), cache.view(LAYER, batch), SCALE)
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention
    assert relative(ours, exact) <= max(BESIDE_BF16 * relative(theirs, exact), 2.0**-8)
    return ours


@every_table
@pytest.mark.parametrize("rotated", [False, True])
def test_a_query_with_one_coordinate_a_hundred_times_the_others(table, rotated):
    cache, batch = filled(CASE)
    q = queries(CASE).float()
    q[..., 17] *= 100
    if rotated:  # so in the domain that the codes are in, where a rotation does not spread it
        q = q @ layout(formats.get("tq4"), LAYER, 128).rotate[0].T
    check(table, (0.05 * q).bfloat16(), cache, batch)


@every_table
def test_one_key_far_above_many(table):
    cache, batch = filled(CASE)
    q = queries(CASE)
    q[0, 0] = (6 * cache.kv[LAYER].read(batch.block_table)[0][0, 0, 131]).bfloat16()
    q[1, 7] = (2 * cache.kv[LAYER].read(batch.block_table)[0][1, 1, 127]).bfloat16()
    check(table, q, cache, batch)


@every_table
@pytest.mark.parametrize("block_size", [128, 512])
def test_many_equal_weights_and_one_spike(table, block_size):
    case = Case("tq4", 128, 5, 1, block_size, (20_000,), (1,))
    cache, batch = filled(case)
    q = torch.zeros(1, 5, 128)
    q[0, 1:] = 2 * cache.kv[LAYER].read(batch.block_table)[0][0, 0, 4321] * torch.tensor([0.1, 0.3, 0.5, 0.7]).view(4, 1)
    check(table, q.bfloat16(), cache, batch)


@every_table
def test_scales_from_1e_minus_4_to_1e4_in_one_block(table):
    cache, batch = filled(CASE)
    generator = torch.Generator().manual_seed(5)
    for fields, span in ((cache.kv[LAYER].k.fields, 1.0), (cache.kv[LAYER].v.fields, 4.0)):
        exponents = span * (2 * torch.rand(fields["scale"].shape, generator=generator) - 1)
        fields["scale"].copy_(10**exponents)
    check(table, queries(CASE), cache, batch)


LEARNED_CASES = [Case(kv, 128, 5, 2, 128, (700, 255), (1, 1)) for kv in ("k=lr4,v=tq3", "k=lr5,v=tq4")]


@every_table
@pytest.mark.parametrize("case", LEARNED_CASES, ids=str)
def test_learned_coordinates_of_very_different_size(table, case):
    """A query along one head's first row: levels that refine meet 0.18 and 0.06 of it, the others little."""
    cache, batch = filled(case)
    rows = cache.kv[LAYER].k.kv_format.description(128).transform.coordinates(LAYER).rows
    q = queries(case)
    q[0, 0] = (0.3 * rows[0, 0] / rows[0, 0].norm() ** 2 * 128).bfloat16()
    q[1, 9] = (3 * rows[1, 127] / rows[1, 127].norm() ** 2).bfloat16()
    check(table, q / 30, cache, batch)


@every_table
def test_scales_of_zero(table):
    cache, batch = filled(CASE)
    cache.kv[LAYER].v.fields["scale"][:, :, ::3] = 0
    check(table, queries(CASE), cache, batch)
    cache.kv[LAYER].k.fields["scale"].zero_()
    check(table, queries(CASE), cache, batch)
    cache.kv[LAYER].v.fields["scale"].zero_()
    assert (table.open().paged_attention(queries(CASE), cache.view(LAYER, batch), SCALE) == 0).all()


@every_table
@pytest.mark.parametrize("code", [0x00, 0xFF])
def test_the_largest_sums_there_can_be(table, code):
    """Every level at its largest, a rotated query all of one size, equal weights: 32 bits are used to the last one."""
    cache, batch = filled(CASE)
    for fields in (cache.kv[LAYER].k.fields, cache.kv[LAYER].v.fields):
        fields["codes"].fill_(code)
        fields["scale"].fill_(1.0)
    q = torch.ones(2, 10, 128) @ layout(formats.get("tq4"), LAYER, 128).rotate[0].T
    check(table, q.bfloat16(), cache, batch)


@every_table
def test_a_bf16_query_that_is_not_finite_gives_no_number(table):
    cache, batch = filled(CASE)
    for value in (float("nan"), float("inf")):
        q = queries(CASE)
        q[0, 3, 9] = value
        ours = table.open().paged_attention(q, cache.view(LAYER, batch), SCALE)
        assert ours[0, 3].isnan().all()
        assert ours.isnan().any(-1).sum() == 1


def has_integers(name: str) -> bool:
    description = formats.get(name).description(128)
    return description is not None and description.bits <= 4


@pytest.mark.parametrize("name", list(filter(has_integers, readable(READS))))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_integer_levels_lie_near_every_centroid(name, head_dim):
    side_layout = layout(formats.get(name), LAYER, head_dim)
    error = (
        side_layout.integers.double() * side_layout.unit - side_layout.centroids.double()
    ).abs().max() / side_layout.centroids.abs().max()
    assert side_layout.integers.dtype == torch.int16
    assert side_layout.integers.abs().max() <= LARGEST_LEVEL
    assert torch.equal(side_layout.integers, -side_layout.integers.flip(0))
    # A codebook of no special shape is off by half a level, 6e-5; a unit that suits it by a third of that.
    assert error <= 2.2e-5
