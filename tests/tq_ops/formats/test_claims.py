"""benchmarks/CLAIMS.md: sizes, cosines and errors that follow from the formats are what the page says."""

import math

import pytest
import torch
from places import ROOT

from haarkv.codebooks.tables import gaussian_centroids
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.compared import CENTROIDS

PAGE = (ROOT / "benchmarks" / "CLAIMS.md").read_text(encoding="utf-8").replace(",", "")
SIZES = {("tq4_seed", 128): (132, 8.25), ("tbq4_0", 128): (66, 4.125), ("manthan3", 256): (100, 3.125)}


def gaussian(head_dim):
    return torch.randn(4096, head_dim, generator=torch.Generator().manual_seed(0))


def round_trip(kv, x):
    kv_format = formats.get(kv)
    return kv_format.dequantize(kv_format.quantize(x, 0), 0)


def mean_cosine(kv, x):
    return float(torch.cosine_similarity(x.double(), round_trip(kv, x).double(), dim=-1).mean())


@pytest.mark.parametrize("kv_and_dim", SIZES)
def test_a_vector_takes_the_bytes_of_the_page(kv_and_dim):
    nbytes, bits = SIZES[kv_and_dim]
    assert formats.get(kv_and_dim[0]).bytes_per_vector(kv_and_dim[1]) == nbytes
    assert 8 * nbytes / kv_and_dim[1] == bits
    assert f"{nbytes} bytes" in PAGE


@pytest.mark.parametrize(
    ("kv", "head_dim", "scale", "cosine"),
    [
        ("tq4_seed", 128, 1.0, 0.9954),
        ("tq4", 128, 1.0, 0.9954),
        ("manthan3", 256, 1.0, 0.9828),
        ("manthan3", 256, 50.0, 0.6965),
    ],
)
def test_round_trips_have_the_cosine_of_the_page(kv, head_dim, scale, cosine):
    x = gaussian(head_dim)
    x[:, :2] *= torch.tensor([scale, -30.0 if scale > 1 else 1.0])
    assert mean_cosine(kv, x) == pytest.approx(cosine, abs=5e-5)
    assert str(cosine) in PAGE


def test_no_vector_of_the_lossless_cache_comes_back():
    x = gaussian(128).bfloat16().float()
    dequantized = round_trip("tbq4_0", x)
    assert not (dequantized.bfloat16() == x.bfloat16()).all(-1).any()
    assert float(((dequantized - x).norm(dim=-1) / x.norm(dim=-1)).mean()) == pytest.approx(0.0951, abs=5e-5)


def test_eight_levels_have_the_error_of_the_page():
    x = torch.linspace(-6, 6, 400_001, dtype=torch.float64)
    levels = gaussian_centroids(3)
    nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    density = torch.exp(-x * x / 2)
    assert float((density * (x - nearest) ** 2).sum() / density.sum()) == pytest.approx(0.03455, abs=5e-6)


def test_outlier_channels_cost_a_format_that_does_not_rotate(golden):
    """ManthanQuant's sixth check: channels as models make them, with which it loses the vector."""
    data = golden("common_rows")
    outliers = torch.from_numpy(data["d128"][data["kind"] == "outlier"])
    assert mean_cosine("manthan3", outliers) == pytest.approx(0.769, abs=0.001)
    assert mean_cosine("tq4", outliers) > 0.995
    # All of a one-hot vector's length in one coordinate, of which 2.15 / 16 is left: cos = a / sqrt(a^2 + 255 b^2).
    one_hot = torch.eye(256)
    theory = CENTROIDS[7] / math.hypot(CENTROIDS[7], math.sqrt(255) * CENTROIDS[4])
    assert mean_cosine("manthan3", one_hot) == pytest.approx(theory, abs=1e-4)
