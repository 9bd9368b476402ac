"""Learned nibbles: their bytes by a slow path in float64, what they cost in error, and tq4 as their special case."""

import itertools
from dataclasses import replace

import pytest
import torch
from bases import calibration, vectors_of
from learned_slow import GOLDEN_NIBBLES, ROWS, golden_basis, slow
from small_models import SMALL, resized

from haarkv.codebooks import haar_rotation
from haarkv.codebooks.learned import Basis, errors, stages
from haarkv.engine.plans import plan_for
from haarkv.models.parallel import Split
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape

HEADS, DIM = 2, 128
MADE_UP = calibration(heads=HEADS, dim=DIM)


@pytest.mark.parametrize("nibbles", [64, 128, 208])
@pytest.mark.parametrize("side", ["k", "v"])
def test_bytes_are_those_of_the_slow_path(side, nibbles):
    x = vectors_of(MADE_UP, 1, side, 6)
    kv_format, basis = MADE_UP.format(side, nibbles), getattr(MADE_UP, side)[1]
    fields = kv_format.quantize(x, 1)
    assert {name: (f.dtype, f.shape) for name, f in kv_format.fields(DIM).items()} == {
        "codes": (torch.uint8, (nibbles // 2,)),
        "scale": (torch.float16, ()),
    }
    restored = kv_format.dequantize(fields, 1)
    different = 0
    for head in range(HEADS):
        for token in range(6):
            expected = slow(x[head, token], basis, head, nibbles)
            got = fields["codes"][head, token].tolist()
            differ = sum(a != b for a, b in zip(got, expected.codes(), strict=True))
            different += differ
            if not differ:
                assert float(fields["scale"][head, token]) == pytest.approx(expected.scale, rel=2**-10)
                torch.testing.assert_close(restored[head, token].double(), expected.restored, rtol=2**-7, atol=2**-7)
    assert different <= 2  # ties that FP32 breaks the other way


@pytest.mark.parametrize("nibbles", GOLDEN_NIBBLES)
def test_golden_bytes(golden, nibbles):
    """What a version has stored, later ones store and read alike; nothing here lies where rounding decides."""
    data = golden("learned/lr")
    of = golden_basis(data)
    kv_format = Calibration((of,), (of,), "golden").format("k", nibbles)
    fields = kv_format.quantize(torch.from_numpy(data[f"x{nibbles}"]), 0)
    assert fields["scale"].numel() == 2 * ROWS
    assert torch.equal(fields["codes"], torch.from_numpy(data[f"codes{nibbles}"]))
    assert torch.equal(fields["scale"], torch.from_numpy(data[f"scale{nibbles}"]))
    for head, token in itertools.product(range(2), range(3)):
        expected = slow(torch.from_numpy(data[f"x{nibbles}"])[head, token], of, head, nibbles).restored
        restored = kv_format.dequantize(fields, 0)[head, token].double()
        assert (restored - expected).norm() < 3e-3 * expected.norm()  # FP16 of the scale, BF16 of the rows


def test_a_rotation_of_one_nibble_a_coordinate_reads_tq4_and_stores_it_nearer():
    rotation = haar_rotation(1, DIM).float().expand(HEADS, DIM, DIM).contiguous()
    haar = Basis(torch.zeros(HEADS, DIM), rotation, rotation.mT.contiguous(), torch.ones(HEADS, DIM))
    learned, tq4 = Calibration((haar,) * 2, (haar,) * 2, "haar").format("k", DIM), formats.get("tq4")
    x = torch.randn(HEADS, 500, DIM, generator=torch.Generator().manual_seed(2))
    stored, ours = tq4.quantize(x, 1), learned.quantize(x, 1)
    by_tq4 = tq4.dequantize(stored, 1)
    torch.testing.assert_close(learned.dequantize(stored, 1), by_tq4, rtol=1e-5, atol=1e-5)
    # A third of these vectors want no other gain than 1, which is tq4 itself but for ties.
    differing = (learned.levels(ours) != tq4.levels(stored)).float().mean(-1)
    assert (differing < 0.02).float().mean() > 0.3
    cosines = [torch.cosine_similarity(x, found, dim=-1) for found in (learned.dequantize(ours, 1), by_tq4)]
    # A rotation of BF16 numbers is not quite one: what is nearest in the coordinates may not be, by a little.
    assert (cosines[0] > cosines[1] - 5e-4).all()
    assert (1 - cosines[0]).mean() < 0.92 * (1 - cosines[1]).mean()


def test_every_nibble_lowers_the_error_that_counts():
    x, basis = vectors_of(MADE_UP, 0, "k", 400), MADE_UP.k[0]
    left = []
    for nibbles in (32, 64, 96, 128, 192, 256):
        kv_format = MADE_UP.format("k", nibbles)
        error = (kv_format.dequantize(kv_format.quantize(x, 0), 0) - x) @ basis.forward
        left.append(float((error.square() * basis.weights.unsqueeze(1)).sum()))
    assert all(b < 0.8 * a for a, b in itertools.pairwise(left)), left


def test_owners_are_first_coordinates_and_the_best_choice():
    """Against every other split of six nibbles over four coordinates."""
    weights = torch.tensor([[8.0, 1.0, 0.02, 0.0001]])
    left = errors()
    costs = {
        (a, b, c, d): 8 * left[a] + left[b] + 0.02 * left[c] + 0.0001 * left[d]
        for a in range(4)
        for b in range(4)
        for c in range(4)
        for d in range(4)
        if a + b + c + d == 6
    }
    best = min(costs, key=costs.get)
    counts = stages(weights, 6)[0].tolist()
    assert [sum(n > stage for n in best) for stage in range(3)] == counts
    assert all(n >= m for n, m in itertools.pairwise(best))


def test_the_mean_zeros_and_large_vectors():
    kv_format, x = MADE_UP.format("v", 96), vectors_of(MADE_UP, 1, "v", 4)
    x[0, 0], x[0, 1], x[1, 2] = MADE_UP.v[1].mean[0], 0.0, 1e30
    fields = kv_format.quantize(x, 1)
    assert fields["scale"].isfinite().all()
    assert torch.equal(kv_format.dequantize(fields, 1)[0, 0], MADE_UP.v[1].mean[0])
    x[1, 3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\[1, 3\]"):
        kv_format.quantize(x, 1)


@pytest.mark.parametrize("nibbles", [96, 208])
def test_levels_are_judged_by_what_they_follow(nibbles):
    """A first nibble that fell the other way is explained, and so are those that refine it."""
    kv_format, x = MADE_UP.format("k", nibbles), vectors_of(MADE_UP, 0, "k", 300)
    # Less than a step of the third nibbles, which are the finest: more would move a level by two.
    noise, drawn = 1e-5, torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    x_off = x + noise * x.norm(dim=-1, keepdim=True) * (drawn * 2 - 1)
    theirs = kv_format.levels(kv_format.quantize(x_off, 0))
    choice = kv_format.choice(x, 0, 3 * noise, theirs)
    expected = (choice.value.unsqueeze(-1) >= choice.boundaries).sum(-1)
    off = (expected - theirs.int()).abs()
    near = (choice.value.unsqueeze(-1) - choice.boundaries).abs().amin(-1) <= choice.reach
    assert not torch.equal(theirs, kv_format.levels(kv_format.quantize(x, 0)))
    assert ((off <= 1) & near)[off > 0].all()
    assert (choice.reach < 0.5 * choice.boundaries.diff().median()).float().mean() > 0.9


def test_a_gain_that_fits_less_is_not_explained():
    """Rounding decides between gains that fit alike, and between no others."""
    kv_format, x = MADE_UP.format("k", 96), vectors_of(MADE_UP, 0, "k", 300)
    ours, theirs = (of.quantize(x, 0) for of in (kv_format, kv_format.altered(lambda of: replace(of, gains=(1.0,)))))
    assert torch.equal(kv_format.lengths(ours, 0) > 0, kv_format.lengths(theirs, 0) > 0)
    choice = kv_format.choice(x, 0, 1e-6, kv_format.levels(theirs))
    expected = (choice.value.unsqueeze(-1) >= choice.boundaries).sum(-1)
    wrong = (expected != kv_format.levels(theirs)).float().mean(-1) > 0.05
    chosen_otherwise = (kv_format.levels(ours) != kv_format.levels(theirs)).float().mean(-1) > 0.05
    assert chosen_otherwise.float().mean() > 0.4
    assert not (wrong & ~chosen_otherwise).any()
    assert wrong.sum() > 0.95 * chosen_otherwise.sum()


def test_names_need_a_calibration():
    assert formats.get("lr96", "v", MADE_UP) is MADE_UP.format("v", 96)
    with pytest.raises(InputError, match="lr96 needs the coordinates that `tq calibrate` learns"):
        formats.get("lr96")
    for nibbles in (0, 40, 400):
        with pytest.raises(InputError, match=rf"takes 16 to 384 learned nibbles in steps of 16, not {nibbles}"):
            MADE_UP.format("k", nibbles)
    with pytest.raises(InputError, match="learned of vectors of 128 numbers, not 64"):
        MADE_UP.format("k", 64).fields(64)
    with pytest.raises(InputError, match="the calibration is of 2 layers, and this model has 3"):
        KVSpec("lr64", calibration=MADE_UP).plan(3)


def test_the_cache_stores_each_head_in_its_own_coordinates():
    plan = KVSpec("k=lr128,v=lr64", calibration=MADE_UP).plan(2)
    cache = PagedKVCache(plan, KVShape(HEADS, DIM), num_blocks=2, block_size=16)
    paging = PagedSequences(2, 16, order=[1, 0])
    batch = paging.batch([paging.add()], [20])
    k, v = (vectors_of(MADE_UP, 1, side, 20).transpose(0, 1).contiguous() for side in ("k", "v"))
    cache.write(1, k, v, batch)
    for side, x, read in zip("kv", (k, v), cache.read(1, batch.block_table), strict=True):
        kv_format = plan.layers[1]["kv".index(side)]
        whole = x.transpose(0, 1)
        assert torch.equal(read[0, :, :20], kv_format.dequantize(kv_format.quantize(whole, 1), 1))
    assert cache.nbytes == 2 * HEADS * 32 * (64 + 2 + 32 + 2)


def test_a_rank_stores_its_heads_as_the_whole_does():
    whole, x = calibration(heads=4, seed=9), vectors_of(calibration(heads=4, seed=9), 1, "v", 30)
    spec, config = KVSpec("k=lr128,v=lr64", calibration=whole), resized(SMALL, num_layers=2, num_heads=8, num_kv_heads=4)
    stored = whole.format("v", 64).quantize(x, 1)
    for rank in range(2):
        split = Split(config, rank, 2)
        ours = plan_for(spec, config, split).v(1).quantize(x[split.kv_heads(1)], 1)
        assert all(torch.equal(ours[name], stored[name][split.kv_heads(1)]) for name in stored)
    with pytest.raises(InputError, match="lr128 was learned of 4 KV heads, and this model has 2"):
        plan_for(spec, split.part)
    with pytest.raises(InputError, match="learned of 4 KV heads"):
        PagedKVCache(spec.plan(2), KVShape(2, DIM), num_blocks=1)


def test_the_length_that_the_scale_keeps_is_the_weighted_one():
    x, of = vectors_of(MADE_UP, 1, "k", 50), MADE_UP.k[1]
    kv_format = MADE_UP.format("k", 208)
    kept = kv_format.lengths(kv_format.quantize(x, 1), 1)
    shifted = x - of.mean.unsqueeze(1)
    unit = (shifted / shifted.norm(dim=-1, keepdim=True)).bfloat16().float()
    owning = torch.arange(DIM) < stages(of.weights, 208)[:, :1]
    weights = (of.weights * owning).double()
    y = unit.double() @ of.forward.double() * weights.sqrt().unsqueeze(1)
    torch.testing.assert_close(kept, shifted.double().norm(dim=-1) * y.norm(dim=-1), rtol=2**-10, atol=0)
