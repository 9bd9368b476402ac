"""Learned coordinates: the closed form against brute force, nibbles against every other way to spend them."""

from itertools import product

import pytest
import torch

from haarkv.codebooks import haar_rotation, lloyd_max
from haarkv.codebooks.learned import errors, expected_cost, learn, refinements, stages


def random_moment(dim, seed, heads=2, spread=3.0):
    """Symmetric positive definite [heads, dim, dim] with uneven eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)
    scale = torch.exp(spread * torch.rand(heads, 1, dim, generator=generator, dtype=torch.float64))
    return (x * scale) @ (x * scale).mT / dim


def learned(dim=8, heads=2, damping=0.0):
    metric, spread = random_moment(dim, 1, heads), random_moment(dim, 2, heads)
    return metric, spread, learn(metric, spread, torch.zeros(heads, dim), damping)


# -- The closed form ------------------------------------------------------------------------------------------------------
def test_coordinates_are_uncorrelated_and_their_errors_cost_their_weights():
    """What the derivation promises, up to the rounding of the matrices to BF16."""
    metric, spread, basis = learned()
    forward, back, weights = basis.forward.double(), basis.back.double(), basis.weights.double()
    moments = forward.mT @ spread @ forward
    variance = moments.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(variance, variance[:, :1].expand_as(variance), rtol=0.05)
    assert (moments / variance[:, :1, None] - torch.eye(8).double()).abs().max() < 0.05
    costs = back @ metric @ back.mT
    assert torch.allclose(
        costs / costs.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] * 8, torch.diag_embed(weights), atol=0.05
    )
    assert (forward @ back - torch.eye(8).double()).abs().max() < 0.05


def test_weights_descend_and_sum_to_the_head_dim():
    _, _, basis = learned()
    assert (basis.weights.diff(dim=1) <= 0).all()
    assert torch.allclose(basis.weights.sum(1), torch.full((2,), 8.0))


def test_no_other_subspace_costs_less():
    """Keeping the first n coordinates costs less than keeping any other n: here 300 random ones and perturbed own ones."""
    metric, spread, basis = learned(heads=1)
    s, c = metric[0], spread[0]
    generator = torch.Generator().manual_seed(0)

    def cost(kept):
        """Least expected cost of an error when only x @ kept is known: the error of the best linear estimate."""
        estimate = torch.linalg.solve(kept.T @ c @ kept, kept.T @ c)
        error = c - c @ kept @ estimate
        return float((s * error).sum())

    for n in (1, 3, 6):
        own = basis.forward[0, :, :n].double()
        least = cost(own)
        for trial in range(300):
            other = torch.randn(8, n, generator=generator, dtype=torch.float64)
            if trial % 2:
                other = own + 0.05 * own.abs().mean() * other
            assert cost(other) >= least * (1 - 2e-3), n
        assert cost(own) == pytest.approx(float((basis.weights[0, n:].sum() / 8) * (s * c).sum()), rel=0.02)


def test_the_scale_of_a_channel_changes_nothing_but_the_matrices():
    """An outlier channel whose queries are small: the same weights, the same coordinates of the scaled vectors."""
    metric, spread, basis = learned(16, damping=1e-3)
    scale = torch.ones(16, dtype=torch.float64)
    scale[3], scale[7] = 64.0, 1 / 128.0
    outer = torch.outer(scale, scale)
    planted = learn(metric / outer, spread * outer, torch.zeros(2, 16), 1e-3)
    assert torch.allclose(planted.weights, basis.weights, rtol=1e-5)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for head in range(2):
        plain, scaled = x @ basis.forward[head].double(), (x * scale) @ planted.forward[head].double()
        factor = (plain * scaled).sum(0) / plain.square().sum(0)  # signs of eigenvectors are free
        assert torch.allclose(factor.abs(), factor.abs()[:1].expand(16), rtol=0.02)
        assert torch.allclose(scaled, plain * factor, atol=0.03 * float(scaled.abs().max()))


def test_matrices_are_bf16_numbers():
    _, _, basis = learned(16)
    for matrix in (basis.forward, basis.back):
        assert torch.equal(matrix, matrix.bfloat16().float())


def test_a_head_without_any_vectors_has_coordinates():
    """A dead head must not stop a calibration."""
    basis = learn(random_moment(8, 1), torch.zeros(2, 8, 8).double(), torch.zeros(2, 8))
    assert all(torch.isfinite(part).all() for part in (basis.forward, basis.back, basis.weights))
    basis = learn(torch.zeros(2, 8, 8).double(), random_moment(8, 1), torch.zeros(2, 8))
    assert all(torch.isfinite(part).all() for part in (basis.forward, basis.back, basis.weights))


@pytest.mark.parametrize("broken", ["metric", "spread", "mean"])
def test_what_is_not_finite_is_refused(broken):
    moments = {"metric": random_moment(8, 1), "spread": random_moment(8, 2), "mean": torch.zeros(2, 8)}
    moments[broken].view(-1)[5] = torch.nan
    with pytest.raises(ValueError, match="finite"):
        learn(**moments)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="fit"):
        learn(random_moment(8, 1), random_moment(4, 2), torch.zeros(2, 8))


# -- Nibbles --------------------------------------------------------------------------------------------------------------
def test_the_scales_of_later_nibbles_are_the_best_for_a_gaussian():
    """On drawn numbers, beside each scale's neighbours and the closed form's errors."""
    book, dim = lloyd_max(4, 64), 64
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) / dim**0.5

    def left(rest, step):
        return rest - step * book.centroids[torch.bucketize(rest / step, book.boundaries, right=True)]

    rest = left(x, 1.0)
    for step, error in zip(refinements()[1:], errors()[2:], strict=True):
        found = float(left(rest, step).square().mean() * dim)
        assert found == pytest.approx(error, rel=0.05)
        for other in (0.8, 0.93, 1.07, 1.2):
            assert float(left(rest, step * other).square().mean() * dim) > found
        rest = left(rest, step)


def test_each_nibble_saves_less_than_the_one_before():
    """Without this the greedy choice would not be the best one."""
    saved = -torch.tensor(errors()).diff()
    assert (saved > 0).all()
    assert (saved.diff() < 0).all()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nibbles", [0, 1, 3, 5, 8, 12, 15])
def test_no_other_way_to_spend_nibbles_costs_less(seed, nibbles):
    """Every one of 4**5 allocations is tried."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.exp(9 * torch.rand(1, 5, generator=generator)).sort(descending=True).values
    weights *= 5 / weights.sum()
    costs = [
        sum(float(w) * errors()[k] for w, k in zip(weights[0], owned, strict=True))
        for owned in product(range(4), repeat=5)
        if sum(owned) == nibbles
    ]
    owners = stages(weights, nibbles)[0]
    own = sum(float(w) * errors()[int((owners > i).sum())] for i, w in enumerate(weights[0]))
    assert own == pytest.approx(min(costs), rel=1e-12)
    assert float(expected_cost(weights, nibbles)[0]) == pytest.approx(own / 5, rel=1e-6)


def test_owners_of_more_nibbles_come_first_and_every_nibble_is_spent():
    weights = torch.exp(-torch.arange(128) / 9.0).repeat(2, 1)
    weights[1] = 1.0
    for nibbles in range(0, 385, 16):
        owners = stages(weights, nibbles)
        assert owners.sum(1).tolist() == [nibbles, nibbles]
        assert (owners.diff(dim=1) <= 0).all()
        assert owners.max() <= 128


def test_equal_weights_are_a_rotation_with_one_nibble_each():
    assert stages(torch.ones(1, 128), 128).tolist() == [[128, 0, 0]]
    rotation = haar_rotation(0, 128).double()
    eye = torch.eye(128, dtype=torch.float64).unsqueeze(0)
    basis = learn(eye, eye, torch.zeros(1, 128), 0.0)
    assert torch.allclose(basis.weights, torch.ones(1, 128))
    assert (basis.forward.double() @ basis.back.double() - eye).abs().max() < 0.02
    assert rotation.shape == basis.forward[0].shape


@pytest.mark.parametrize("nibbles", [-1, 385])
def test_more_nibbles_than_can_be_owned_are_refused(nibbles):
    with pytest.raises(ValueError, match="nibbles"):
        stages(torch.ones(1, 128), nibbles)
