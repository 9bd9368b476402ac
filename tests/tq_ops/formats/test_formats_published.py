"""Of what the formats' own authors check, what golden bytes and slow paths do not say already."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.manthan import CENTROIDS


def gaussian(count, head_dim, seed=0):
    return torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed))


def round_trip(name, x, side="k"):
    kv_format = formats.get(name, side)
    return kv_format.dequantize(kv_format.quantize(x, 0), 0)


def mean_cosine(x, y):
    return torch.cosine_similarity(x.double(), y.double(), dim=-1).mean().item()


def test_outlier_channels_cost_a_format_that_does_not_rotate(golden):
    """ManthanQuant's sixth check: channels as models make them, with which it loses the vector."""
    data = golden("common_rows")
    outliers = torch.from_numpy(data["d128"][data["kind"] == "outlier"])
    assert mean_cosine(outliers, round_trip("manthan3", outliers)) == pytest.approx(0.769, abs=0.001)
    assert mean_cosine(outliers, round_trip("tq4", outliers)) > 0.995
    # All of a one-hot vector's length in one coordinate, of which 2.15 / 16 is left: cos = a / sqrt(a^2 + 255 b^2).
    one_hot = torch.eye(256)
    theory = CENTROIDS[7] / math.hypot(CENTROIDS[7], math.sqrt(255) * CENTROIDS[4])
    assert mean_cosine(one_hot, round_trip("manthan3", one_hot)) == pytest.approx(theory, abs=1e-4)


class CountingOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", formats.names())
def test_no_format_goes_vector_by_vector(name, side):
    """The same number of tensor operations for two vectors and for a thousand, and no more than 300 a direction."""
    kv_format = formats.get(name, side)
    counts = []
    for count in (2, 2, 1000 // kv_format.group_tokens + 1):  # the first fills the tables
        x = gaussian(count * kv_format.group_tokens, 128)
        x = x.view(count, kv_format.group_tokens, 128) if kv_format.group_tokens > 1 else x
        with CountingOps() as ops:
            kv_format.dequantize(kv_format.quantize(x, 0), 0)
        counts.append(ops.count)
    assert counts[1] == counts[2] <= 600


@pytest.mark.parametrize("constant", [5.0, 0.0, -1e-3, 3e38, 1e-45])
def test_kivi_constants_come_back_exactly(constant):
    x = torch.full((32, 64), constant)
    for side in ("k", "v"):
        kivi2 = formats.get("kivi2", side=side)
        fields = kivi2.quantize(x, 0)
        assert not fields["codes"].any()
        assert (fields["scale"] == torch.tensor(1e-10)).all()
        assert torch.equal(kivi2.dequantize(fields, 0), x)
