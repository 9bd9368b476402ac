"""Learned coordinates, the closed form against brute force; and their cubic levels, the best for a Gaussian."""

import pytest
import torch

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS, _root, expected_cost, learn


def random_moment(dim, seed, heads=2, spread=3.0):
    """Symmetric positive definite [heads, dim, dim] with uneven eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    scale = torch.exp(spread * torch.rand(heads, 1, dim, generator=generator, dtype=torch.float64))
    return (x * scale) @ (x * scale).mT / dim


def learned(dim=8, heads=2, damping=0.0, power=1.0):
    metric, spread = random_moment(dim, 1, heads), random_moment(dim, 2, heads)
    return metric, spread, learn(metric, spread, torch.zeros(heads, dim), damping, power)


# -- The closed form ------------------------------------------------------------------------------------------------------
def test_coordinates_are_uncorrelated_and_their_errors_cost_their_weights():
    """What the derivation promises, up to the rounding of the matrices to BF16."""
    metric, spread, basis = learned()
    forward, inverse, weights = basis.forward.double(), basis.back.double(), basis.weights.double()
    moments = forward.mT @ spread @ forward
    variance = moments.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(variance, variance[:, :1].expand_as(variance), rtol=0.05)
    assert (moments / variance[:, :1, None] - torch.eye(8).double()).abs().max() < 0.05
    costs = inverse @ metric @ inverse.mT
    assert torch.allclose(
        costs / costs.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] * 8, torch.diag_embed(weights), atol=0.05
    )
    assert (forward @ inverse - torch.eye(8).double()).abs().max() < 0.05
    assert (basis.weights.diff(dim=1) <= 0).all()
    assert torch.allclose(basis.weights.sum(1), torch.full((2,), 8.0))
    for matrix in (basis.forward, basis.back):
        assert torch.equal(matrix, matrix.bfloat16().float())


def test_no_other_subspace_costs_less():
    """Keeping the first n coordinates costs less than keeping any other n: here 300 random ones and perturbed own ones."""
    metric, spread, basis = learned(heads=1)
    s, c = metric[0], spread[0]
    generator = torch.Generator().manual_seed(0)

    def cost(columns):
        """Least expected cost of an error when only x @ columns is known: the error of the best linear estimate."""
        estimate = torch.linalg.solve(columns.T @ c @ columns, columns.T @ c)
        error = c - c @ columns @ estimate
        return float((s * error).sum())

    for n in (1, 3, 6):
        subspace = basis.forward[0, :, :n].double()
        least = cost(subspace)
        for trial in range(300):
            other = torch.randn(8, n, generator=generator, dtype=torch.float64)
            if trial % 2:
                other = subspace + 0.05 * subspace.abs().mean() * other
            assert cost(other) >= least * (1 - 2e-3), n
        assert cost(subspace) == pytest.approx(float((basis.weights[0, n:].sum() / 8) * (s * c).sum()), rel=0.02)


def test_the_scale_of_a_channel_changes_nothing_but_the_matrices():
    """An outlier channel whose queries are small: the same weights, the same coordinates of the scaled vectors."""
    metric, spread, basis = learned(8, damping=1e-3, power=0.4)
    scale = torch.ones(8, dtype=torch.float64)
    scale[3], scale[7] = 64.0, 1 / 128.0
    outer = torch.outer(scale, scale)
    scaled_basis = learn(metric / outer, spread * outer, torch.zeros(2, 8), 1e-3, 0.4)
    assert torch.allclose(scaled_basis.weights, basis.weights, rtol=1e-5)
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for head in range(2):
        plain, scaled_x = x @ basis.forward[head].double(), (x * scale) @ scaled_basis.forward[head].double()
        factor = (plain * scaled_x).sum(0) / plain.square().sum(0)  # signs of eigenvectors are free
        assert torch.allclose(factor.abs(), factor.abs()[:1].expand(8), rtol=0.02)
        assert torch.allclose(scaled_x, plain * factor, atol=0.03 * float(scaled_x.abs().max()))


def test_a_head_without_any_vectors_has_coordinates():
    """A dead head must not stop a calibration."""
    nothing = torch.zeros(2, 8, 8).double()
    for metric, spread in ((random_moment(8, 1), nothing), (nothing, random_moment(8, 1))):
        basis = learn(metric, spread, torch.zeros(2, 8))
        assert all(torch.isfinite(part).all() for part in (basis.forward, basis.back, basis.weights))


def test_channels_that_no_query_reads_come_back_as_the_mean():
    """As Gemma 3 has some. The inverse has numbers of 1e7 there; the others are not changed."""
    metric, spread = random_moment(16, 1), random_moment(16, 2)
    metric[:, 3], metric[..., 3] = 0.0, 0.0
    basis = learn(metric, spread, torch.zeros(2, 16))
    x = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(3))
    again = x @ basis.forward @ basis.back
    assert (again[..., 3] == 0).all()
    others = torch.arange(16) != 3
    assert torch.allclose(again[..., others], x[..., others], atol=0.05)


@pytest.mark.parametrize("broken", ["metric", "spread", "mean"])
def test_moments_that_are_not_finite_or_do_not_fit_are_refused(broken):
    moments = {"metric": random_moment(8, 1), "spread": random_moment(8, 2), "mean": torch.zeros(2, 8)}
    with pytest.raises(ValueError, match="do not fit"):
        learn(**moments | {broken: moments[broken][:, :4]})
    moments[broken].view(-1)[5] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        learn(**moments)


def test_the_metric_is_tempered_between_its_diagonal_and_itself():
    metric = random_moment(8, 1)[0]

    def tempered(power):
        channel, root = _root(metric, power)
        return torch.outer(channel, channel) * (root @ root)

    assert torch.allclose(tempered(1.0), metric, rtol=1e-6)
    assert torch.allclose(tempered(0.0), torch.diag(metric.diagonal()), rtol=1e-6)
    # Two halves of the power are the whole, by channels of diagonal 1.
    channel = metric.diagonal().sqrt()
    outer = torch.outer(channel, channel)
    assert torch.allclose((tempered(0.5) / outer) @ (tempered(0.5) / outer) * outer, metric, rtol=1e-6)


def test_coordinates_of_an_eighth_weigh_alike_and_are_turned():
    metric, spread = (random_moment(32, seed, spread=1.0) for seed in (1, 2))
    basis = learn(metric, spread, torch.zeros(2, 32), 0.0)
    by_eighth = basis.weights.view(2, EIGHTHS, -1)
    assert torch.equal(by_eighth, by_eighth[..., :1].expand_as(by_eighth))
    assert (by_eighth[..., 0].diff(dim=1) <= 0).all()
    # Still uncorrelated and of equal spread all together: turning changes neither within an eighth, by its mean weight.
    moments = basis.forward.double().mT @ spread @ basis.forward.double()
    traces = moments.diagonal(dim1=-2, dim2=-1).view(2, EIGHTHS, -1).mean(-1)
    assert torch.allclose(traces, traces[:, :1].expand_as(traces), rtol=0.05)
    blocks = moments.view(2, EIGHTHS, 4, EIGHTHS, 4)
    for one in range(EIGHTHS):
        for other in range(one):
            assert (blocks[:, one, :, other].abs() < 0.05 * traces[:, :1, None]).all()


def test_what_levels_leave_is_weighed():
    weights = torch.linspace(8, 1, 16).expand(2, 16)
    widths = (6, 5, 4, 4, 4, 3, 3, 3)
    by_hand = sum(float(w) * cubic.ERRORS[widths[i // 2]] for i, w in enumerate(weights[0])) / float(weights[0].sum())
    assert expected_cost(weights, widths).tolist() == pytest.approx([by_hand] * 2)
    spent = torch.ones(2, 16)
    assert float(expected_cost(weights, widths, spent)[0]) == pytest.approx(sum(map(cubic.ERRORS.__getitem__, widths)) / 8)


# -- Cubic levels ---------------------------------------------------------------------------------------------------------


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
    loss = left(by_formula(bits, a, b))
    assert loss == pytest.approx(cubic.ERRORS[bits], rel=1e-4)
    for more in (0.995, 1.005):
        assert left(by_formula(bits, a * more, b)) > loss
        if bits > 1:
            assert left(by_formula(bits, a, b * (1 + 4 * (more - 1)))) > loss
