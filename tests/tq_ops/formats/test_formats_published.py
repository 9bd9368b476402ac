"""What the formats' own authors check, each check one that can fail: ManthanQuant's ten and KIVI's five."""

import math

import format_oracles as slow
import numpy as np
import pytest
import torch
from distortion import gaussian_distortion
from small_models import at_slots
from torch.utils._python_dispatch import TorchDispatchMode

from haarkv.codebooks.lloyd_max import Codebook, converged_unit_centroids
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.kivi import KiviKeys, KiviValues
from haarkv.tq_ops.formats.manthan import BOUNDARIES, CENTROIDS
from haarkv.tq_ops.formats.packing import pack_stream, unpack_stream
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape

DISTORTION = {1: 0.3634, 2: 0.11748, 3: 0.03455, 4: 0.009497}  # of a Gaussian: Max, 1960
MANTHAN = formats.get("manthan3")


def gaussian(count, head_dim, seed=0):
    return torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed))


def round_trip(name, x, side="k"):
    kv_format = formats.get(name, side)
    return kv_format.dequantize(kv_format.quantize(x, 0), 0)


def mean_cosine(x, y):
    return torch.cosine_similarity(x.double(), y.double(), dim=-1).mean().item()


# -- ManthanQuant's ten ------------------------------------------------------------------------------------------------------
def test_1_centroids_are_optimal():
    """Each is its cell's mean, each boundary a midpoint; the distortion is the literature's, a tenth below even steps'."""
    np.testing.assert_allclose(CENTROIDS, converged_unit_centroids(8), atol=1.5e-6)
    np.testing.assert_allclose(BOUNDARIES, (np.array(CENTROIDS)[1:] + np.array(CENTROIDS)[:-1]) / 2, atol=1e-6)
    distortion = gaussian_distortion(Codebook(torch.tensor(CENTROIDS), torch.tensor(BOUNDARIES)), 1.0)
    assert distortion == pytest.approx(DISTORTION[3], rel=2e-4)

    def even(step):
        centroids = step * (torch.arange(8.0) - 3.5)
        return gaussian_distortion(Codebook(centroids, (centroids[1:] + centroids[:-1]) / 2), 1.0)

    assert min(even(step) for step in np.linspace(0.4, 0.8, 401)) == pytest.approx(0.03744, rel=1e-3)


def test_2_every_level_at_every_place_survives_packing():
    level = (torch.arange(256)[None] + torch.arange(8)[:, None]).remainder(8).to(torch.uint8)
    packed = pack_stream(level, 3)
    assert packed.shape == (8, 96)
    assert torch.equal(unpack_stream(packed, 3), level)
    # One level changed changes its own three bits and no other.
    changed = level.clone()
    changed[:, 100] ^= 7
    difference = (pack_stream(changed, 3) ^ packed).numpy()
    assert np.flatnonzero(np.unpackbits(difference[0], bitorder="little")).tolist() == [300, 301, 302]


@pytest.mark.parametrize(("head_dim", "size", "ratio"), [(64, 28, 4.57), (128, 52, 4.92), (256, 100, 5.12)])
def test_3_compression_ratio(head_dim, size, ratio):
    fields = MANTHAN.quantize(gaussian(10, head_dim), 0)
    assert sum(tensor.nbytes for tensor in fields.values()) == 10 * size
    assert 10 * head_dim * 2 / (10 * size) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_4_quality_on_gaussian_vectors(head_dim):
    """cos = sqrt(1 - distortion) = 0.983, as published."""
    x = gaussian(4000, head_dim)
    y = round_trip("manthan3", x)
    assert mean_cosine(x, y) == pytest.approx(math.sqrt(1 - DISTORTION[3]), abs=0.0015)
    error = ((x - y).square().sum(-1) / x.square().sum(-1)).mean().item()
    assert error == pytest.approx(DISTORTION[3], rel=0.04)


def test_5_the_factor_sqrt_d_is_needed():
    """Without it every coordinate falls to one of the two inner levels: signs alone, a cosine of sqrt(2 / pi) = 0.80."""
    x = gaussian(2000, 256)
    unit = x / x.norm(dim=-1, keepdim=True)
    centroids = torch.tensor(CENTROIDS)

    def cosine_of(scaled):
        return mean_cosine(x, centroids[torch.bucketize(scaled, torch.tensor(BOUNDARIES))])

    assert cosine_of(unit) == pytest.approx(math.sqrt(2 / math.pi), abs=0.005)
    assert cosine_of(unit * 16) == pytest.approx(0.983, abs=0.0015)
    assert cosine_of(unit * 16) == pytest.approx(mean_cosine(x, round_trip("manthan3", x)), abs=1e-5)


def test_6_kv_as_models_make_them(golden):
    """Through a paged cache; and with outlier channels, where a format that does not rotate loses the vector."""
    cache = PagedKVCache(KVPlan.uniform(MANTHAN, MANTHAN, 1), KVShape(2, 128), num_blocks=3)
    k, v = gaussian(200, 256, 1).view(200, 2, 128), gaussian(200, 256, 2).view(200, 2, 128)
    cache.write(0, k, v, at_slots(torch.arange(200) + 100))
    restored_k, restored_v = (x[0, :, 100:300].transpose(0, 1) for x in cache.read(0, torch.tensor([[0, 1, 2]])))
    assert torch.equal(restored_k, round_trip("manthan3", k))
    assert torch.equal(restored_v, round_trip("manthan3", v))
    q = gaussian(1, 128, 3)

    def attend(k, v):
        return (q @ k[:, 0].T / 128**0.5).softmax(-1) @ v[:, 0]

    assert mean_cosine(attend(k, v), attend(restored_k, restored_v)) > 0.95
    data = golden("common_rows")
    outliers = torch.from_numpy(data["d128"][data["kind"] == "outlier"])
    assert mean_cosine(outliers, round_trip("manthan3", outliers)) == pytest.approx(0.769, abs=0.001)
    assert mean_cosine(outliers, round_trip("tq4", outliers)) > 0.995
    # The longer the vector, the less of it two outlier channels may have: 2.15 / sqrt(D) of its length each.
    outliers = gaussian(4000, 256) * torch.ones(256).index_fill(0, torch.tensor([3]), 50).index_fill(
        0, torch.tensor([133]), -30
    )
    assert mean_cosine(outliers, round_trip("manthan3", outliers)) == pytest.approx(0.70, abs=0.01)
    assert mean_cosine(outliers, round_trip("tq4", outliers)) > 0.995
    # All of a one-hot vector's length in one coordinate, of which 2.15 / 16 is left: cos = a / sqrt(a^2 + 255 b^2).
    one_hot = torch.eye(256)
    theory = CENTROIDS[7] / math.hypot(CENTROIDS[7], math.sqrt(255) * CENTROIDS[4])
    assert theory == pytest.approx(0.48, abs=0.005)
    assert mean_cosine(one_hot, round_trip("manthan3", one_hot)) == pytest.approx(theory, abs=1e-4)


def test_7_more_bits_lose_less():
    """One to four bits as in the literature, and each further bit takes the error down three to four times."""
    x = gaussian(2000, 256)
    error = {
        bits: ((x - round_trip(f"tq{bits}", x)).square().sum(-1) / x.square().sum(-1)).mean().item()
        for bits in (2, 3, 4, 5, 6, 8)
    }
    for bits in (2, 3, 4):
        assert error[bits] == pytest.approx(DISTORTION[bits], rel=0.03)
    assert list(error.values()) == sorted(error.values(), reverse=True)
    for fewer, more in ((2, 3), (3, 4), (4, 5), (5, 6)):
        assert 3.2 < error[fewer] / error[more] < 4.2
    assert 3.2**2 < error[6] / error[8] < 4.2**2


def test_8_edge_cases():
    zero = MANTHAN.quantize(torch.zeros(1, 128), 0)
    assert MANTHAN.levels(zero).unique().tolist() == [3]  # 0 is a boundary, and a tie goes to the lower level
    assert not MANTHAN.dequantize(zero, 0).any()
    constant = round_trip("manthan3", torch.full((1, 128), 7.0))
    # Every scaled coordinate is 1 and gets the level of 0.756.
    np.testing.assert_allclose(constant, 7 * 0.756006, rtol=1e-6)
    assert MANTHAN.quantize(torch.full((1, 128), -0.0), 0)["radius"].item() == 0
    # The added 1e-8 makes short vectors shorter still: at a length of 1e-8, half as long, all levels nearer to the middle.
    short = torch.nn.functional.normalize(gaussian(1, 128))
    assert torch.equal(MANTHAN.levels(MANTHAN.quantize(short * 1e3, 0)), MANTHAN.levels(MANTHAN.quantize(short, 0)))
    assert MANTHAN.quantize(short * 1e-8, 0)["radius"].item() == pytest.approx(1e-8, rel=1e-3)
    assert round_trip("manthan3", short * 1e-8).norm() < 0.7e-8
    assert round_trip("manthan3", short).norm() == pytest.approx(1.0, abs=0.03)


class CountingOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", formats.names())
def test_9_performance_no_format_goes_vector_by_vector(name, side):
    """The same number of tensor operations for two vectors and for a thousand, and no more than 300 a direction.

    KVarN balances a tile in 16 rounds of 30 operations more.
    """
    kv_format = formats.get(name, side)
    counts = []
    for count in (2, 2, 1000 // kv_format.group_tokens + 1):  # the first fills the tables
        x = gaussian(count * kv_format.group_tokens, 128)
        x = x.view(count, kv_format.group_tokens, 128) if kv_format.group_tokens > 1 else x
        with CountingOps() as ops:
            kv_format.dequantize(kv_format.quantize(x, 0), 0)
        counts.append(ops.count)
    assert counts[1] == counts[2] <= (600 + 16 * 30 if name.startswith("kvarn") else 600)


def test_10_the_theory_of_centroids_that_are_means():
    """For Lloyd-Max <x, y> = ||y||^2 = (1 - distortion) ||x||^2 in expectation; hence the cosine, and y is never longer."""
    x = gaussian(20_000, 256).double()
    y = round_trip("manthan3", x.float()).double()
    kept = 1 - DISTORTION[3]
    squared = x.square().sum(-1)
    assert ((x * y).sum(-1) / squared).mean().item() == pytest.approx(kept, abs=1.5e-3)
    assert (y.square().sum(-1) / squared).mean().item() == pytest.approx(kept, abs=2e-3)
    # The published bound, cos >= 1 - distortion / 2, holds of the mean and not of each vector.
    cosine = torch.cosine_similarity(x, y, dim=-1)
    assert cosine.mean().item() == pytest.approx(math.sqrt(kept), abs=1.5e-3)
    assert (cosine < 1 - DISTORTION[3] / 2).any()


# -- KIVI's five --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kivi_round_trip_of_keys_errs_by_half_a_step(bits, group):
    x = gaussian(6 * group, 64).view(6, group, 64)
    keys = KiviKeys(bits, group, "k", "")
    fields = keys.quantize(x, 0)
    error = (keys.dequantize(fields, 0) - x).abs() / fields["scale"].unsqueeze(-2)
    assert error.max() <= 0.5 + 1e-5
    assert error.max() > 0.49
    level = keys.levels(fields)
    assert (level.amin().item(), level.amax().item()) == (0, 2**bits - 1)
    # Per channel over tokens: the smallest of each channel is restored exactly, and its range is its own.
    assert torch.equal(fields["zero"], x.amin(-2))
    assert torch.equal(keys.dequantize(fields, 0).amin(-2), x.amin(-2))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kivi_round_trip_of_values_errs_by_half_a_step(bits, group):
    x = gaussian(50, 256)
    values = KiviValues(bits, group, "v", "")
    fields = values.quantize(x, 0)
    grouped = x.view(50, -1, group)
    error = (values.dequantize(fields, 0).view(grouped.shape) - grouped).abs() / fields["scale"].unsqueeze(-1)
    assert 0.49 < error.max() <= 0.5 + 1e-5
    assert torch.equal(fields["zero"], grouped.amin(-1))


def test_kivi_known_values():
    """[1, 2, 3, 4]: scale 1, zero 1, one byte 228; four levels fit exactly. With four bits, levels 0, 5, 10, 15."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for fields in (KiviKeys(2, 4, "k", "").quantize(x[:, None], 0), KiviValues(2, 4, "v", "").quantize(x, 0)):
        assert {name: tensor.flatten().tolist() for name, tensor in fields.items()} == {
            "codes": [228],
            "scale": [1],
            "zero": [1],
        }
    assert KiviKeys(2, 4, "k", "").dequantize(KiviKeys(2, 4, "k", "").quantize(x[:, None], 0), 0).flatten().tolist() == [
        1,
        2,
        3,
        4,
    ]
    four = KiviValues(4, 4, "v", "").quantize(x, 0)
    assert four["codes"].tolist() == [0 | 5 << 4, 10 | 15 << 4]
    assert slow.encode_kivi_values(list(x.numpy()), 4, 4)[:2] == bytes(four["codes"].tolist())


def test_kivi_batches_and_heads_do_not_mix():
    x = gaussian(2 * 4 * 32, 64).view(2, 4, 32, 64)
    keys, values = formats.get("kivi2"), formats.get("kivi2", side="v")
    for kv_format in (keys, values):
        whole = kv_format.dequantize(kv_format.quantize(x, 0), 0)
        for b in range(2):
            for h in range(4):
                assert torch.equal(whole[b, h], kv_format.dequantize(kv_format.quantize(x[b, h], 0), 0))
    # A channel of keys does not see the others, nor a token of values.
    other = x.clone()
    other[..., 5] += 100
    unchanged = [c for c in range(64) if c != 5]
    assert torch.equal(keys.quantize(other, 0)["codes"][:, :, unchanged], keys.quantize(x, 0)["codes"][:, :, unchanged])
    other = x.clone()
    other[:, :, 5] *= 100
    unchanged = [t for t in range(32) if t != 5]
    assert torch.equal(values.quantize(other, 0)["codes"][:, :, unchanged], values.quantize(x, 0)["codes"][:, :, unchanged])


@pytest.mark.parametrize("constant", [5.0, 0.0, -1e-3, 3e38, 1e-45])
def test_kivi_constants_come_back_exactly(constant):
    x = torch.full((32, 64), constant)
    for side in ("k", "v"):
        kivi2 = formats.get("kivi2", side=side)
        fields = kivi2.quantize(x, 0)
        assert not fields["codes"].any()
        assert (fields["scale"] == torch.tensor(1e-10)).all()
        assert torch.equal(kivi2.dequantize(fields, 0), x)
