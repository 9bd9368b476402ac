"""Codebooks and rotations: the published bits, the fixed point, the same on every machine; and shipped tables are current."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from haarkv.codebooks import haar_rotation, hadamard_signs, lloyd_max, tables
from haarkv.codebooks.haar import draw_gaussian, orthogonal_factor
from haarkv.codebooks.tables import gaussian_centroids


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_published_codebook_has_the_published_bits(golden, bits, head_dim):
    rows = golden("turboquant_qwen3_14b/codebooks")
    book = lloyd_max(bits, head_dim)
    np.testing.assert_array_equal(book.centroids.numpy(), rows[f"fp32_analytic_d{head_dim}_b{bits}_centroids"])
    np.testing.assert_array_equal(book.boundaries.numpy(), rows[f"fp32_analytic_d{head_dim}_b{bits}_boundaries"])


@pytest.mark.parametrize("bits", range(1, 9))
def test_converged_codebook_satisfies_lloyds_conditions(bits):
    """Independent check by brute-force integration: each centroid is its cell's mean."""
    c = gaussian_centroids(bits).numpy()
    x = np.linspace(-9, 9, 1_800_001)
    density = np.exp(-x * x / 2)
    cell = np.searchsorted((c[1:] + c[:-1]) / 2, x)
    mass = np.bincount(cell, density, minlength=len(c))
    mean = np.bincount(cell, density * x, minlength=len(c)) / mass
    np.testing.assert_allclose(mean, c, atol=2e-5)


@pytest.mark.parametrize(
    ("bits", "head_dim", "solver"), [(0, 128, "published"), (9, 128, "published"), (4, 0, "published"), (4, 128, "x")]
)
def test_impossible_codebooks_are_refused(bits, head_dim, solver):
    with pytest.raises(ValueError, match=r"bits|head_dim|solver"):
        lloyd_max(bits, head_dim, solver)


def digest(books):
    return hashlib.sha256(b"".join(part.numpy().tobytes() for book in books for part in book)).hexdigest()


PUBLISHED = {
    64: "8654c96e56d1a0065eeb4006f5001a9153d414ab96a22b92509e5bb01fbbe4c9",
    128: "70cb5b1610389dcdaed58daa2fa142c6c700db569293d67acc4171d83342ae01",
    256: "6478805bbee8d0629462b07927dc15dd708a263d5a2feddd6fbc13c9e07e0a25",
}
CONVERGED = {
    64: "5540e02f5ec17d2f1136c36bf2178b34ad17410dc98cba8209916c1479d96926",
    128: "76702dcbade0cd3e30bcab9bacc4038c5578b39a71dc1d039117575d0b6ce458",
    256: "ac731b5de743f728cfec1eea8e498bd5576083da8ee3843f45b3a45bc05f4ac3",
}
OTHERS = {
    32: "df14d3b9ea712c95b38feb8f3dacc645136d74942ea28b734f356d420b3a86fb",
    80: "bcd7fe6e98ea6c0767dafceb4927343a1211a55dec549aa3a5126bc7b25212fc",
    96: "6a870d63955653af523514de41ffbf79924df1493a988c266657a60aabb44c7a",
    112: "7887b263da71daeb07116f58f03e5898f81485f0568a6d0f9610d704090b450a",
    192: "8ee1468335b5b61f56e20084187fcb9f4b92743b46762c3043c25fc6f69d883b",
}
"""Of head_dims without a published table: the optimum, by either solver's name."""


@pytest.mark.parametrize(
    ("solver", "first", "frozen"),
    [("published", 1, PUBLISHED), ("converged", 1, CONVERGED), ("published", 2, OTHERS), ("converged", 2, OTHERS)],
    ids=["published", "converged", "others, published", "others, converged"],
)
def test_tables_have_the_bits_that_files_were_written_with(solver, first, frozen):
    """From `first` bits on. Where nothing is published a table is odd: a zero never falls to the level below it."""
    for head_dim, expected in frozen.items():
        books = [lloyd_max(bits, head_dim, solver) for bits in range(first, 9)]
        assert digest(books) == expected, head_dim
        for centroids, boundaries in books if frozen is OTHERS else ():
            assert torch.equal(centroids, -centroids.flip(0))
            assert torch.equal(boundaries, -boundaries.flip(0))
            assert boundaries[len(boundaries) // 2] == 0


@pytest.mark.parametrize(("layer", "different", "ulps"), [(0, 5, 1), (1, 9, 4), (39, 5, 2)])
def test_how_many_entries_differ_from_the_published_bits(published_rotation, layer, different, ulps):
    """The publication factors in FP32; one value of 1.6e-6, which FP32 cancels badly, is off by four units."""
    distance = (haar_rotation(layer, 128).view(torch.int16) - published_rotation(layer, 128).view(torch.int16)).abs()
    assert int((distance != 0).sum()) == different
    assert int(distance.max()) == ulps


@pytest.mark.parametrize("layer", [0, 1, 39])
def test_gaussian_behind_a_rotation_is_the_published_one(golden, layer):
    gaussian = golden("turboquant_qwen3_14b/rotations")[f"layer{layer}_gauss_f32"]
    np.testing.assert_array_equal(draw_gaussian(42 + 1000 * layer, 128 * 128), gaussian.ravel())


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("layer", "head_dim"),
    [
        (39, 128), (3, 64), (2, 256), (1, 80),
        *(pytest.param(layer, 128, marks=pytest.mark.long) for layer in (0, 1, 63)),
    ],
)  # fmt: skip
def test_any_float64_factorization_rounds_to_the_same_bits(layer, head_dim):
    """LAPACK's QR is off by 1e-13 at most, and no entry lies so near a BF16 rounding point."""
    gaussian = draw_gaussian(42 + 1000 * layer, head_dim * head_dim).reshape(head_dim, head_dim).astype(np.float64)
    q, r = np.linalg.qr(gaussian)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    assert np.abs(orthogonal_factor(gaussian) - q).max() < 1e-12
    assert torch.equal(torch.from_numpy(q).bfloat16(), haar_rotation(layer, head_dim))


def test_rotations_do_not_depend_on_vector_instructions():
    """In a child whose torch and numpy may use none, where `torch.randn` gives other bits."""
    expression = (
        "__import__('torch').randn(16384, generator=__import__('torch').Generator().manual_seed(42)).numpy().tobytes()"
    )
    code = f"""
import hashlib
from haarkv.codebooks.haar import compute_rotation, draw_gaussian, orthogonal_factor
import torch
for layer, head_dim in ((0, 128), (39, 128), (1, 64)):
    print(hashlib.sha256(compute_rotation(layer, head_dim).view(torch.uint8).numpy().tobytes()).hexdigest())
print(hashlib.sha256({expression}).hexdigest())
"""
    plain = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F"}
    outputs = []
    for more in ({}, plain):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout.split())
    assert outputs[0][:3] == outputs[1][:3]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert outputs[0][3] != outputs[1][3], "the child was to have other instructions"


def test_a_damaged_table_is_refused(tmp_path, monkeypatch):
    for path in tables.DATA.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    table = tmp_path / tables.LLOYD_MAX
    table.write_bytes(table.read_bytes().replace(b"0.24", b"0.25", 1))
    monkeypatch.setattr(tables, "DATA", tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        tables.read_checked(tables.LLOYD_MAX)
    assert tables.read_checked(tables.HAAR)


def test_hadamard_signs_are_signs_of_their_origins():
    """TBQ4_0's are the first two draws of numpy's generator 42, TQ3_0's those of its C source."""
    generator = np.random.default_rng(42)
    for name in ("tbq4_0/before", "tbq4_0/after"):
        np.testing.assert_array_equal(hadamard_signs(name).numpy(), generator.choice([-1, 1], 128))
    tq3 = hadamard_signs("tq3_0")
    assert "".join("+" if sign == 1 else "-" for sign in tq3.tolist()) == "+-++--+-++-+-+--+--++-+--+++--+-"
    assert tq3.abs().unique().tolist() == [1]
