"""OSCAR: its rotations from moments, its bytes by a slow path in float64, each head in its own rotation."""

import numpy as np
import pytest
import torch

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import NonFiniteVectorError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from lab.rivals.oscar import _CLIP_SHARES, Oscar, moments, rotations

HEADS = 2
CLIP_SHARES = {"k": 0.96, "v": 0.92}


def moment(dim, seed):
    """[H, D, D] fp64 whose eigenvalues span four orders of magnitude."""
    x = torch.randn(HEADS, 4 * dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x *= torch.logspace(0, -2, dim, dtype=torch.float64)
    return x.mT @ x


def learn_format(side, dim=128):
    return Oscar([rotations(moment(dim, 10 * (side == "v") + layer)) for layer in range(2)], _CLIP_SHARES[side])


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- Rotations -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_rotation_spreads_what_counts_over_all_coordinates(dim):
    moment_matrix = moment(dim, 1)
    rotation = rotations(moment_matrix)
    assert torch.equal(rotation, rotation.bfloat16().float())
    product = rotation.mT @ rotation
    assert (product - torch.eye(dim)).abs().max() < 0.01
    diagonal = (rotation.double().mT @ moment_matrix @ rotation.double()).diagonal(dim1=1, dim2=2)
    assert (diagonal.amax(1) / diagonal.amin(1)).max() < 1.05  # of the trace each has the same share
    assert (moment_matrix.diagonal(dim1=1, dim2=2).amax(1) > 100 * moment_matrix.diagonal(dim1=1, dim2=2).amin(1)).all()
    assert not torch.equal(rotation[0], rotation[1])


def test_the_order_of_a_rotation_by_hand():
    """R = U H P of a diagonal moment, whose eigenvectors are the axes, 2, 0, 3 and 1 in ascending order."""
    values = torch.diag(torch.tensor([3.0, 8.0, 1.0, 5.0]))
    eigenvectors = torch.linalg.eigh(values.double()).eigenvectors.float()
    assert torch.equal(eigenvectors.abs(), torch.eye(4)[[2, 0, 3, 1]].T)
    hadamard = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    # Columns 3, 2, 1, 0 belong to the largest values in order; these go to places 00, 10, 01, 11.
    assert torch.equal(rotations(values[None])[0], eigenvectors @ hadamard[:, [3, 1, 2, 0]])


def test_moments_of_single_tokens_by_loops():
    q, k, v = vectors(5, 4, 8), vectors(5, 2, 8, seed=1), vectors(5, 2, 8, seed=2)
    k_moments, v_moments = moments(q, k, v)
    for head in range(2):
        head_queries = [q[token, h].double() for token in range(5) for h in (2 * head, 2 * head + 1)]
        expected = sum(torch.outer(x, x) for x in head_queries) / 10
        torch.testing.assert_close(k_moments[head], expected)
        weights = [float(k[token, head].double() @ expected @ k[token, head].double()) for token in range(5)]
        expected = sum(w / sum(weights) * torch.outer(x, x) for w, x in zip(weights, v[:, head].double(), strict=True))
        torch.testing.assert_close(v_moments[head], expected)


# -- Bytes -----------------------------------------------------------------------------------------------------------------
def slow(x, rotation, clip_share):
    """One vector in float64: values before they are cut to levels, scales and zeros by group, after clipping."""
    y = x.double() @ rotation.double()
    limit = sorted(y.abs().tolist())[min(int(clip_share * len(y)), len(y) - 1)]
    clipped_values = [max(-limit, min(limit, value)) for value in y.tolist()]
    size = min(len(y), 128)
    values, scales, zeros = [], [], []
    for begin in range(0, len(y), size):
        group = clipped_values[begin : begin + size]
        scale = max(max(group) - min(group), 1e-8) / 3
        zero = -min(group) / scale
        values += [value / scale + zero + 0.5 for value in group]
        scales.append(scale)
        zeros.append(zero)
    return values, scales, zeros


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("side", ["k", "v"])
def test_bytes_are_those_of_the_slow_path(side, dim):
    kv_format, x = learn_format(side, dim), vectors(HEADS, 7, dim, seed=3) * 3
    x[0, 0, 5], x[1, 1] = 80.0, 0.0
    rotation = kv_format._rotations[1]
    fields = kv_format.quantize(x, 1)
    packed, dequantized = kv_format.to_bytes(fields), kv_format.dequantize(fields, 1)
    groups = max(1, dim // 128)
    assert packed.shape[-1] == kv_format.bytes_per_vector(dim) == dim // 4 + 4 * groups
    for head in range(HEADS):
        for token in range(7):
            values, scales, zeros = slow(x[head, token], rotation[head], CLIP_SHARES[side])
            data = packed[head, token].numpy()
            level = [data[j % (dim // 4)] >> 2 * (j // (dim // 4)) & 3 for j in range(dim)]
            for level_read, value in zip(level, values, strict=True):
                assert level_read == min(3, int(value)) or abs(value - round(value)) < 1e-4  # a tie that FP32 breaks otherwise
            numbers = data[dim // 4 :].view("<f2").astype(float)
            np.testing.assert_allclose(numbers, [*scales, *zeros], rtol=2**-10, atol=2**-24)
            values_read = [
                (n - z) * s
                for n, s, z in zip(
                    level, *(np.repeat(numbers[i : i + groups], dim // groups) for i in (0, groups)), strict=True
                )
            ]
            expected = torch.tensor(values_read, dtype=torch.float64) @ rotation[head].double().T
            torch.testing.assert_close(dequantized[head, token].double(), expected, rtol=0, atol=1e-4)
    assert not dequantized[1, 1].any()


def test_the_largest_numbers_of_a_vector_are_clipped():
    """Behind a rotation that does nothing, six of K's numbers are cut back, eleven of V's."""
    eye = torch.eye(128).expand(HEADS, 128, 128).contiguous()
    x = torch.linspace(-1, 1, 128).expand(HEADS, 1, 128)
    for side, limit in (("k", sorted(x[0, 0].abs().tolist())[122]), ("v", sorted(x[0, 0].abs().tolist())[117])):
        kv_format = Oscar([eye], _CLIP_SHARES[side])
        fields = kv_format.quantize(x, 0)
        assert float(fields["scale"][0, 0, 0]) == pytest.approx(2 * limit / 3, rel=2**-10)
        assert kv_format.dequantize(fields, 0).abs().max().item() == pytest.approx(limit, rel=2**-9)


# -- In a cache ------------------------------------------------------------------------------------------------------------
def test_the_cache_stores_each_head_in_its_own_rotation(monkeypatch):
    by_side = {side: learn_format(side) for side in "kv"}
    monkeypatch.setitem(formats.BY_NAME, "oscar2", tuple(by_side.values()))
    plan = KVSpec("oscar2").plan(2)
    assert len(plan.formats) == 2
    cache = PagedKVCache(plan, KVShape(HEADS, 128), num_blocks=2, block_size=16)
    paging = PagedSequences(2, 16)
    k, v = vectors(20, HEADS, 128, seed=1), vectors(20, HEADS, 128, seed=2)
    cache.view(1, paging.batch([paging.add()], [20])).write(k, v)
    for side, x, dequantized in zip("kv", (k, v), cache.kv[1].read(torch.tensor([[0, 1]])), strict=True):
        kv_format, by_head = by_side[side], x.transpose(0, 1)
        expected = kv_format.dequantize(kv_format.quantize(by_head, 1), 1)
        torch.testing.assert_close(dequantized[0, :, :20], expected, rtol=0, atol=1e-5)
        others = kv_format.dequantize(kv_format.quantize(by_head, 0), 0)
        assert not torch.allclose(dequantized[0, :, :20], others, atol=1e-2)


def test_what_is_refused():
    kv_format = learn_format("k")
    with pytest.raises(InputError, match="learned of vectors of 128 numbers, not 64"):
        kv_format.fields(64)
    x = torch.ones(HEADS, 3, 128)
    x[1, 2, 7] = torch.nan
    with pytest.raises(NonFiniteVectorError) as excinfo:
        kv_format.quantize(x, 0)
    assert excinfo.value.index == (1, 2)
    x = vectors(HEADS, 3, 128)
    x[0, 1] *= 1e6
    with pytest.raises(NonFiniteVectorError) as excinfo:
        kv_format.quantize(x, 0)
    assert excinfo.value.index == (0, 1)
