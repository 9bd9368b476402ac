"""Cubic levels: the best cubics for a Gaussian, and what they leave of its variance."""

import pytest
import torch

from haarkv.codebooks import cubic
from haarkv.codebooks.tables import gaussian_centroids


def left(table):
    """Of a Gaussian's variance, by a fine grid."""
    y = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) * (16 / (1 << 16)) - 8
    density = torch.exp(-y.square() / 2)
    nearest = table[torch.bucketize(y, (table[1:] + table[:-1]) / 2)]
    return float((density * (y - nearest).square()).sum() / density.sum())


def by_formula(bits, a, b):
    m = 2 * torch.arange(2**bits, dtype=torch.float64) + 1 - 2**bits
    return m * (a + b * m**2)


@pytest.mark.parametrize("bits", cubic.WIDTHS)
def test_no_cubic_beside_leaves_less(bits):
    a, b = cubic.FACTORS[bits]
    found = left(by_formula(bits, a, b))
    assert found == pytest.approx(cubic.ERRORS[bits], rel=1e-4)
    for more in (0.995, 1.005):
        assert left(by_formula(bits, a * more, b)) > found
        if bits > 1:
            assert left(by_formula(bits, a, b * (1 + 4 * (more - 1)))) > found


@pytest.mark.parametrize(("bits", "more"), [(1, 1e-4), (2, 1e-4), (3, 0.003), (4, 0.021), (5, 0.06), (6, 0.12)])
def test_lloyd_max_levels_leave_little_less(bits, more):
    exact = left(gaussian_centroids(bits))
    assert exact * (1 - 1e-4) <= cubic.ERRORS[bits] <= exact * (1 + more)


@pytest.mark.parametrize("bits", cubic.WIDTHS)
def test_tables_ascend_and_are_odd(bits):
    table = cubic.centroids(bits)
    assert (table.diff() > 0).all()
    assert torch.equal(table, -table.flip(0))
    assert torch.equal(cubic.boundaries(bits), ((table[1:].double() + table[:-1].double()) / 2).float())
