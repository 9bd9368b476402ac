"""KV formats: golden levels and bytes, round trips, and what happens to zero, tiny and huge vectors."""

import bounds
import numpy as np
import pytest
import torch
from levels import compare_levels

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.formats.rotated import TurboQuant, TurboQuant4Seed, codebook_on, exact_norm

LAYERS = [0, 1]
CPU = torch.device("cpu")


def golden_rows(golden, layer):
    data = golden(f"turboquant_qwen3_14b/quant_layer{layer}")
    return data, torch.from_numpy(data["x"]), data["kind"]


def is_ordinary(x):
    """Rows on which the published 1e-6 inside the norm moves no level and no square overflows."""
    norm = x.double().norm(dim=-1).numpy()
    return (norm > 0.1) & (norm < 1e18)


@pytest.mark.parametrize("layer", LAYERS)
def test_seed_levels_norms_and_values_equal_the_device_golden(golden, published_rotation, layer):
    data, x, kind = golden_rows(golden, layer)
    finite = torch.from_numpy(np.isfinite(data["npugolden_decode_scale"]))
    assert set(kind[~finite.numpy()]) == {"scaled_1e+30"}
    seed = TurboQuant4Seed(published_rotation)
    fields = seed.quantize(x[finite], layer)
    theirs = torch.from_numpy(data["npugolden_decode_idx"])[finite]
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])[finite]
    comparison = compare_levels(fields["codes"], theirs, rotated, codebook_on(128, CPU).boundaries, bounds.ROTATED_FP32)
    assert comparison.unexplained == 0
    assert comparison.match > 0.9999
    np.testing.assert_allclose(fields["norm"].numpy(), data["npugolden_decode_scale"][finite.numpy()], rtol=3e-7)
    equal = (fields["codes"] == theirs).all(-1).numpy()
    assert equal.sum() >= len(equal) - 2
    dequantized = seed.dequantize(fields, layer).numpy()
    golden_restored = data["kernel_emulated_dequant_bf16_as_f32"][finite.numpy()]
    # Equal to the bit here; elsewhere a value may fall to the other side of its last BF16 rounding.
    np.testing.assert_allclose(dequantized[equal], golden_restored[equal], rtol=2**-7)


@pytest.mark.parametrize("layer", LAYERS)
def test_tq4_packs_the_golden_bytes(golden, published_rotation, layer):
    data, x, _ = golden_rows(golden, layer)
    ordinary = is_ordinary(x)
    assert ordinary.sum() >= 340
    tq4 = TurboQuant(4, "", published_rotation)
    codes = tq4.quantize(x, layer)["codes"]
    level, theirs = tq4.unpack(codes), torch.from_numpy(data["npugolden_decode_idx"])
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])
    boundaries = codebook_on(128, CPU).boundaries
    comparison = compare_levels(level[ordinary], theirs[ordinary], rotated[ordinary], boundaries, bounds.ROTATED_FP32)
    assert comparison.unexplained == 0
    equal = (level == theirs).all(-1).numpy() & ordinary
    assert equal.sum() >= ordinary.sum() - 2
    np.testing.assert_array_equal(codes.numpy()[equal], data["packed_halfhalf_from_decode_idx"][equal])


def sphere_distortion(head_dim):
    """Squared error of the published codebook on a uniformly random unit vector, by integrating its exact marginal."""
    t = np.linspace(-1, 1, 2_000_001)
    density = (1 - t * t).clip(1e-300) ** ((head_dim - 3) / 2)
    book = codebook_on(head_dim, CPU)
    centroid = book.centroids.double().numpy()[np.searchsorted(book.boundaries.double().numpy(), t, side="right")]
    return head_dim * ((t - centroid) ** 2 * density).sum() / density.sum()


@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.long)])
def test_four_bits_lose_what_theory_says(head_dim):
    x = torch.randn(30_000, head_dim, generator=torch.Generator().manual_seed(1))
    tq4, rotation = formats.get("tq4"), haar_rotation(3, head_dim).float()
    fields = tq4.quantize(x, 3)
    unit = torch.nn.functional.normalize(x, dim=-1)
    plain = codebook_on(head_dim, CPU).centroids[tq4.unpack(fields["codes"]).int()] @ rotation.T
    error = (unit - plain).square().sum(-1).mean().item()
    assert error == pytest.approx(sphere_distortion(head_dim), rel=0.005)
    # A coordinate of a unit vector has lighter tails than the Gaussian of the textbook figure, which is the limit.
    if head_dim >= 128:
        assert error == pytest.approx(bounds.TQ4_DISTORTION, rel=bounds.TQ4_DISTORTION_MARGIN)
    dequantized = tq4.dequantize(fields, 3)
    assert torch.cosine_similarity(x, dequantized, dim=-1).mean() >= bounds.TQ4_MEAN_COSINE
    # Folding the renormalisation into the scale keeps every length, up to FP16 and the rotation's BF16, and loses nothing.
    torch.testing.assert_close(dequantized.norm(dim=-1), x.norm(dim=-1), rtol=5e-3, atol=0)
    assert ((x - dequantized).square().sum(-1) / x.square().sum(-1)).mean() < error


@pytest.mark.parametrize(("bits", "shortfall"), [(2, 0.06), (3, 0.017)])
def test_values_of_few_bits_are_as_long_along_themselves_as_they_were(bits, shortfall):
    """The mean of many is then as long as it was; that of keys' format is not, and each of those has its own length."""
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(1))
    for side, expected in (("k", 1 - shortfall), ("v", 1.0)):
        kv_format = formats.get(f"tq{bits}", side)
        dequantized = kv_format.dequantize(kv_format.quantize(x, 3), 3)
        projection = (dequantized * x).sum(-1) / x.square().sum(-1)
        assert projection.mean() == pytest.approx(expected, abs=0.003)
        if side == "v":
            torch.testing.assert_close(projection, torch.ones_like(projection), rtol=0, atol=5e-3)
        else:
            torch.testing.assert_close(dequantized.norm(dim=-1), x.norm(dim=-1), rtol=5e-3, atol=0)


def test_tq4_seed_has_the_published_faults():
    """As its docstring says: zero comes back with norm 1e-3, short vectors shrink, overflow is refused instead of stored."""
    seed = formats.get("tq4_seed")
    unit = torch.nn.functional.normalize(torch.randn(1, 128, generator=torch.Generator().manual_seed(3)), dim=-1)

    def restored_norm(x):
        return seed.dequantize(seed.quantize(x, 0), 0).norm().item()

    assert restored_norm(torch.zeros(1, 128)) == pytest.approx(1e-3, rel=0.01)
    assert restored_norm(unit) == pytest.approx(1.0, rel=0.01)
    # The stored norm is sqrt(s**2 + 1e-6), the levels are those of a vector of length s / that: at s = 1e-3, 0.707.
    fields = seed.quantize(unit * 1e-3, 0)
    assert not torch.equal(fields["codes"], seed.quantize(unit, 0)["codes"])
    with pytest.raises(NonFiniteVectorError):
        seed.quantize(unit * 1e30, 0)


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e-3, 1.0, 1e18, 1e30, 3e36])
def test_exact_norm_neither_underflows_nor_overflows(scale):
    x = (torch.randn(64, 128, generator=torch.Generator().manual_seed(4)) * scale).float()
    unit, norm = exact_norm(x)
    truth = x.double().norm(dim=-1, keepdim=True)
    resolution = 2.0**-149 * 0.51  # half the smallest FP32 number: a norm that is denormal itself
    torch.testing.assert_close(norm.double(), truth, rtol=3e-7, atol=resolution)
    torch.testing.assert_close(unit.double(), x.double() / truth, rtol=5e-7, atol=1e-12)


def test_exact_norm_of_ordinary_vectors_has_the_bits_of_the_plain_formula():
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(5)) * 3
    unit, norm = exact_norm(x)
    plain = x.square().sum(-1, keepdim=True).sqrt()
    assert torch.equal(norm, plain)
    assert torch.equal(unit, x / plain)


@pytest.mark.parametrize("spec", ["tq9", "", "k=tq4", "k=tq4,k=bf16", "k=tq4,v=tq9", "k=tq4,v=bf16,x=bf16", "k=tq4 v=bf16"])
def test_unknown_formats_are_refused(spec):
    with pytest.raises(InputError, match=r"unknown KV format|cannot read"):
        formats.parse(spec)
