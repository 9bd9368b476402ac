"""CPU attention of BF16 activations by 16-bit integers: what is hardest for their steps, sums and rounding."""

from __future__ import annotations

import bounds
import pytest
import torch
from op_tables import LAYER, Case, every_table, filled, relative

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.cpu.layout import layout

CASE = Case("tq4", 128, 5, 2, 128, (700, 255), (1, 1))
LONG = [Case("tq4", 128, 5, 1, block, (20_000,), (1,)) for block in (128, 512)]
LEARNED = [Case(kv, 128, 5, 2, 128, (700, 255), (1, 1)) for kv in ("k=lr4,v=tq3", "k=lr5,v=tq4")]
SCALE = CASE.head_dim**-0.5
# Against exact attention, at most so many times the distance that the reference's own rounding points leave.
BESIDE_BF16 = 1.5


def queries(case=CASE):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(sum(case.new), case.kv_heads * case.group, case.head_dim, generator=generator)


def rotated(q):
    """Queries that a rotation makes these: in the domain of the codes it does not spread them."""
    return q @ layout(formats.get("tq4"), LAYER, 128).rotate[0].float().T


def one_large_coordinate(q, kv, k):
    q[..., 17] *= 100
    return 0.05 * q


def one_key_far_above_many(q, kv, k):
    q[0, 0], q[1, 7] = 6 * k[0, 0, 131], 2 * k[1, 1, 127]
    return q


def equal_weights_and_one_spike(q, kv, k):
    q[0, 0], q[0, 1:] = 0, 2 * k[0, 0, 4321] * torch.tensor([0.1, 0.3, 0.5, 0.7]).view(4, 1)
    return q


def scales_from_1e_minus_4_to_1e4(q, kv, k):
    generator = torch.Generator().manual_seed(5)
    for fields, span in zip(kv.fields, (1.0, 4.0), strict=True):
        fields["scale"].copy_(10 ** (span * (2 * torch.rand(fields["scale"].shape, generator=generator) - 1)))
    return q


def learned_coordinates_of_all_sizes(q, kv, k):
    """A query along one head's first row: levels that refine meet 0.18 and 0.06 of it, the others little."""
    rows = kv.k.kv_format.description(128).transform.coordinates(LAYER).rows
    q[0, 0], q[1, 9] = 0.3 * rows[0, 0] / rows[0, 0].norm() ** 2 * 128, 3 * rows[1, 127] / rows[1, 127].norm() ** 2
    return q / 30


def scales_of_zero(q, kv, k):
    kv.k.fields["scale"].zero_()
    kv.v.fields["scale"][:, :, ::3] = 0
    return q


def largest_sums(q, kv, k, code=0xFF):
    """Every level at its largest, a rotated query all of one size, equal weights: 32 bits are used to the last one."""
    for fields in kv.fields:
        fields["codes"].fill_(code)
        fields["scale"].fill_(1.0)
    return rotated(torch.ones_like(q))


CHANGES = {
    "one large coordinate": (one_large_coordinate, [CASE]),
    "one large coordinate of the codes": (lambda *args: rotated(one_large_coordinate(*args)), [CASE]),
    "one key far above many": (one_key_far_above_many, [CASE]),
    "equal weights and one spike": (equal_weights_and_one_spike, LONG),
    "scales from 1e-4 to 1e4 in one block": (scales_from_1e_minus_4_to_1e4, [CASE]),
    "learned coordinates of all sizes": (learned_coordinates_of_all_sizes, LEARNED),
    "scales of zero": (scales_of_zero, [CASE]),
    "largest sums": (largest_sums, [CASE]),
    "least sums": (lambda *args: largest_sums(*args, code=0x00), [CASE]),
}
"""Each changes queries [T, 10, 128] and what a layer of a cache holds; `k` are the keys, as they are restored."""


@every_table
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (_, cases) in CHANGES.items() for case in cases], ids=str)
def test_the_result_is_as_near_to_exact_attention_as_the_references(table, name, case):
    """With its BF16 probabilities, that is; and within its bound of it."""
    cache, batch = filled(case)
    kv = cache.kv[LAYER]
    q, view = CHANGES[name][0](queries(case), kv, kv.read(batch.block_table)[0]).bfloat16(), cache.view(LAYER, batch)
    ours, theirs = (ops.paged_attention(q, view, SCALE) for ops in (table.open(), reference))
    exact = reference.paged_attention(q.float(), view, SCALE)
    assert relative(ours, theirs) <= bounds.LAYER_BF16.attention
    assert relative(ours, exact) <= max(BESIDE_BF16 * relative(theirs, exact), 2.0**-8)


@every_table
def test_values_of_scale_zero_are_zero(table):
    cache, batch = filled(CASE)
    cache.kv[LAYER].v.fields["scale"].zero_()
    assert (table.open().paged_attention(queries().bfloat16(), cache.view(LAYER, batch), SCALE) == 0).all()


@every_table
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_gives_no_number_to_itself_alone(table, value, dtype):
    cache, batch = filled(CASE)
    q = queries().to(dtype)
    q[0, 3, 9] = value
    ours = table.open().paged_attention(q, cache.view(LAYER, batch), SCALE)
    assert ours[0, 3].isnan().all()
    assert ours.isnan().any(-1).sum() == 1
