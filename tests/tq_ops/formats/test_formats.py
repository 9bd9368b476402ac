"""KV formats: golden levels and bytes, round trips, and what happens to zero, tiny and huge vectors."""

import numpy as np
import pytest
import torch

from haarkv.codebooks import haar_rotation
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.formats.rotated import choose_levels, exact_norm
from haarkv.tq_ops.formats.turboquant import TurboQuant, TurboQuant4Seed, codebook_on
from haarkv.validation import bounds
from haarkv.validation.layers.compare import compare_levels

LAYERS = [0, 1]
CPU = torch.device("cpu")
TQ4 = formats.get("tq4")


def rows_of(golden, layer):
    data = golden(f"turboquant_qwen3_14b/quant_layer{layer}")
    return data, torch.from_numpy(data["x"]), data["kind"]


def is_ordinary(x):
    """Rows on which the published 1e-6 inside the norm moves no level and no square overflows."""
    norm = x.double().norm(dim=-1).numpy()
    return (norm > 0.1) & (norm < 1e18)


@pytest.mark.parametrize("layer", LAYERS)
def test_seed_levels_norms_and_values_equal_the_device_golden(golden, published_rotation, layer):
    data, x, kind = rows_of(golden, layer)
    finite = torch.from_numpy(np.isfinite(data["npugolden_decode_scale"]))
    assert set(kind[~finite.numpy()]) == {"scaled_1e+30"}
    seed = TurboQuant4Seed(published_rotation)
    fields = seed.quantize(x[finite], layer)
    theirs = torch.from_numpy(data["npugolden_decode_idx"])[finite]
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])[finite]
    compared = compare_levels(fields["codes"], theirs, rotated, codebook_on(128, CPU).boundaries, bounds.ROTATED_FP32)
    assert compared.unexplained == 0
    assert compared.match > 0.9999
    np.testing.assert_allclose(fields["norm"].numpy(), data["npugolden_decode_scale"][finite.numpy()], rtol=3e-7)
    equal = (fields["codes"] == theirs).all(-1).numpy()
    assert equal.sum() >= len(equal) - 2
    restored = seed.dequantize(fields, layer).numpy()
    golden_restored = data["kernel_emulated_dequant_bf16_as_f32"][finite.numpy()]
    # Equal to the bit here; elsewhere a value may fall to the other side of its last BF16 rounding.
    np.testing.assert_allclose(restored[equal], golden_restored[equal], rtol=2**-7)


@pytest.mark.parametrize("layer", LAYERS)
def test_tq4_packs_the_golden_bytes(golden, published_rotation, layer):
    data, x, _ = rows_of(golden, layer)
    ordinary = is_ordinary(x)
    assert ordinary.sum() >= 340
    tq4 = TurboQuant(4, "", published_rotation)
    codes = tq4.quantize(x, layer)["codes"]
    level, theirs = tq4.unpack(codes), torch.from_numpy(data["npugolden_decode_idx"])
    rotated = torch.from_numpy(data["npugolden_decode_xrot"])
    boundaries = codebook_on(128, CPU).boundaries
    compared = compare_levels(level[ordinary], theirs[ordinary], rotated[ordinary], boundaries, bounds.ROTATED_FP32)
    assert compared.unexplained == 0
    equal = (level == theirs).all(-1).numpy() & ordinary
    assert equal.sum() >= ordinary.sum() - 2
    np.testing.assert_array_equal(codes.numpy()[equal], data["packed_halfhalf_from_decode_idx"][equal])


def test_packing_puts_the_first_half_in_the_low_nibbles():
    level = torch.arange(16, dtype=torch.uint8).repeat(8)[None]
    level[0, 64:] = 15 - level[0, 64:]
    codes = TQ4.pack(level)
    assert codes[0, 3] == 3 | (12 << 4)
    assert torch.equal(TQ4.unpack(codes), level)


def sphere_distortion(head_dim):
    """Squared error of the published codebook on a uniformly random unit vector, by integrating its exact marginal."""
    t = np.linspace(-1, 1, 2_000_001)
    density = (1 - t * t).clip(1e-300) ** ((head_dim - 3) / 2)
    book = codebook_on(head_dim, CPU)
    centroid = book.centroids.double().numpy()[np.searchsorted(book.boundaries.double().numpy(), t, side="right")]
    return head_dim * ((t - centroid) ** 2 * density).sum() / density.sum()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_four_bits_lose_what_theory_says(head_dim):
    x = torch.randn(100_000, head_dim, generator=torch.Generator().manual_seed(1))
    tq4, rotation = formats.get("tq4"), haar_rotation(3, head_dim).float()
    fields = tq4.quantize(x, 3)
    unit = torch.nn.functional.normalize(x, dim=-1)
    plain = codebook_on(head_dim, CPU).centroids[tq4.unpack(fields["codes"]).int()] @ rotation.T
    error = (unit - plain).square().sum(-1).mean().item()
    assert error == pytest.approx(sphere_distortion(head_dim), rel=0.005)
    # A coordinate of a unit vector has lighter tails than the Gaussian of the textbook figure, which is the limit.
    if head_dim >= 128:
        assert error == pytest.approx(bounds.TQ4_DISTORTION, rel=bounds.TQ4_DISTORTION_MARGIN)
    restored = tq4.dequantize(fields, 3)
    assert torch.cosine_similarity(x, restored, dim=-1).mean() >= bounds.TQ4_MEAN_COSINE
    # Folding the renormalisation into the scale keeps every length, up to FP16 and the rotation's BF16, and loses nothing.
    torch.testing.assert_close(restored.norm(dim=-1), x.norm(dim=-1), rtol=5e-3, atol=0)
    assert ((x - restored).square().sum(-1) / x.square().sum(-1)).mean() < error


def test_tq4_keeps_zero_and_saturates():
    tq4 = formats.get("tq4")
    shape = torch.randn(5, 128, generator=torch.Generator().manual_seed(2))
    x = shape / shape.norm(dim=-1, keepdim=True) * torch.tensor([[0.0], [1e-30], [1e30], [1e-42], [60000.0]])
    fields = tq4.quantize(x, 0)
    restored = tq4.dequantize(fields, 0)
    assert fields["scale"].tolist()[:4] == [0.0, 0.0, 65504.0, 0.0]
    assert restored[[0, 1, 3]].abs().max() == 0
    assert torch.isfinite(restored).all()
    # Saturated, the direction survives; only the length is lost. The codes are those of the same vector at length 1.
    assert torch.equal(fields["codes"][2], tq4.quantize(shape[2:3], 0)["codes"][0])
    assert torch.cosine_similarity(restored[2:3], shape[2:3]).item() > 0.99
    torch.testing.assert_close(restored[4].norm(), torch.tensor(60000.0), rtol=5e-3, atol=0)


def test_a_zero_vector_gets_level_8_everywhere():
    assert (formats.get("tq4").quantize(torch.zeros(1, 128), 0)["codes"] == 0x88).all()


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


def test_the_unit_vector_is_rounded_to_bf16_before_it_is_rotated():
    unit = torch.nn.functional.normalize(torch.randn(50, 128, generator=torch.Generator().manual_seed(6)), dim=-1)
    rotation = haar_rotation(4, 128)
    y = unit.bfloat16().double() @ rotation.double()
    boundaries = codebook_on(128, CPU).boundaries
    expected = (y[..., None] >= boundaries.double()).sum(-1)
    compared = compare_levels(
        choose_levels(unit, rotation.float(), boundaries), expected, y.float(), boundaries, bounds.ROTATED_FP32
    )
    assert compared.unexplained == 0


@pytest.mark.parametrize(("name", "size"), [("tq4", 66), ("tq4_seed", 132), ("bf16", 256), ("fp32", 512)])
def test_bytes_per_vector_at_head_dim_128(name, size):
    assert formats.get(name).bytes_per_vector(128) == size


def test_tq4_bytes_are_codes_then_scale():
    tq4 = formats.get("tq4")
    fields = tq4.quantize(torch.randn(1, 128, generator=torch.Generator().manual_seed(8)), 0)
    packed = tq4.to_bytes(fields)[0].numpy()
    np.testing.assert_array_equal(packed[:64], fields["codes"][0].numpy())
    assert packed[64:].view("<f2")[0] == fields["scale"][0].item()


def test_plain_formats_round_once():
    x = torch.randn(10, 128, generator=torch.Generator().manual_seed(9))
    assert torch.equal(formats.get("fp32").dequantize(formats.get("fp32").quantize(x, 0), 0), x)
    assert torch.equal(formats.get("bf16").dequantize(formats.get("bf16").quantize(x, 0), 0), x.bfloat16().float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["tq4", "tq4_seed"])
def test_a_vector_that_is_not_finite_is_refused_with_its_index(name, bad):
    x = torch.ones(4, 3, 128)
    x[2, 1, 77] = bad
    with pytest.raises(NonFiniteVectorError) as caught:
        formats.get(name).quantize(x, 0)
    assert caught.value.index == (2, 1)


def test_k_and_v_may_differ():
    k_format, v_format = formats.parse("k=bf16,v=tq4")
    assert (k_format.name, v_format.name) == ("bf16", "tq4")
    assert formats.describe(k_format, v_format) == "k=bf16,v=tq4"
    assert formats.describe(*formats.parse("tq4")) == "tq4"


@pytest.mark.parametrize("spec", ["tq9", "", "k=tq4", "k=tq4,k=bf16", "k=tq4,v=tq9", "k=tq4,v=bf16,x=bf16", "k=tq4 v=bf16"])
def test_unknown_formats_are_refused(spec):
    with pytest.raises(InputError, match=r"unknown KV format|cannot read"):
        formats.parse(spec)


def test_tq4_needs_an_even_head_dim():
    with pytest.raises(InputError, match="even"):
        formats.get("tq4").fields(65)
