"""What no golden file holds, against loops over single numbers, to the byte: KIVI's groups, rotated levels, packing, sums."""

import bounds
import format_oracles as slow
import numpy as np
import pytest
import torch
from format_rows import fresh_rows
from levels import compare_levels

from haarkv.codebooks import haar_rotation, lloyd_max
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.arithmetic import round_half_away, sum_in_order, sum_pairwise
from haarkv.tq_ops.formats.compared import Kivi
from haarkv.tq_ops.formats.packing import pack_planes, pack_stream, unpack_planes, unpack_stream
from haarkv.tq_ops.formats.rotated import choose_levels, exact_norm

CPU = torch.device("cpu")
GROUP_OF_ONE = ["manthan3", "tq3_0", "tbq4_0", "q4_0", "q8_0", "fp8_e4m3"]


@pytest.mark.parametrize("name", GROUP_OF_ONE)
def test_bf16_vectors_and_views_are_stored_as_the_same_numbers_in_fp32(name):
    kv_format = formats.get(name)
    x = torch.randn(128, 6, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    plain = kv_format.to_bytes(kv_format.quantize(x.float()[:, 1::2].contiguous(), 0))
    assert torch.equal(kv_format.to_bytes(kv_format.quantize(x[:, 1::2], 0)), plain)
    strided_view = x.float().transpose(0, 2).contiguous().transpose(0, 2)  # the last axis is not the contiguous one
    assert not strided_view.is_contiguous()
    assert torch.equal(kv_format.to_bytes(kv_format.quantize(strided_view[:, 1::2], 0)), plain)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("side", "group", "head_dim"),
    [
        *(("v", *sizes) for sizes in ((32, 64), (32, 128), (64, 64), (64, 256), (128, 128), (128, 256))),
        *(("k", *sizes) for sizes in ((32, 64), (64, 128), (128, 64))),
    ],
)
def test_kivi_equals_the_slow_path(side, bits, group, head_dim):
    keys, x = side == "k", fresh_rows(head_dim, bits)[::2]
    if keys:
        generator = torch.Generator().manual_seed(bits)
        x = torch.randn(2, group, head_dim, generator=generator) * torch.rand(head_dim, generator=generator) * 9
        x[0, :, 0], x[0, :, 1], x[0, :, 2] = 0, 7.5, (x[0, :, 2] * 2).round() / 2
    kv_format = Kivi(bits, group, keys=keys)
    fields = kv_format.quantize(x, 0)
    packed, dequantized = kv_format.to_bytes(fields).numpy(), kv_format.dequantize(fields, 0).numpy()
    nbytes = packed.shape[1] / kv_format.group_tokens
    assert nbytes == kv_format.bytes_per_vector(head_dim) == head_dim * (bits + 64 / group) / 8
    for numbers, ours, restored in zip(x.numpy(), packed, dequantized, strict=True):
        encoded = slow.encode_kivi_keys(numbers, bits) if keys else slow.encode_kivi_values(list(numbers), bits, group)
        assert ours.tobytes() == encoded
        expected = np.array(slow.decode_kivi(ours.tobytes(), bits, group, numbers.size), np.float32)
        np.testing.assert_array_equal(restored, expected.reshape(head_dim, group).T if keys else expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("bits", "side"), [*((bits, "k") for bits in (2, 3, 4, 5, 6, 8)), (2, "v"), (3, "v")])
def test_rotated_levels_are_chosen_and_packed_as_described(bits, side, head_dim):
    """Levels against float64, ties explained; bytes of those levels by a loop; restored in float64 from the bytes.

    All by what the format's description says, which is what backends read.
    """
    kv_format, layer = formats.get(f"tq{bits}", side), 2
    x = fresh_rows(head_dim, 7)
    fields = kv_format.quantize(x, layer)
    level = kv_format.levels(fields)
    book = lloyd_max(bits, head_dim, "published" if bits <= 4 else "converged")
    rotation, description = haar_rotation(layer, head_dim), kv_format.description(head_dim)
    assert (description.bits, description.head_dim, description.along) == (bits, head_dim, side == "v")
    assert (*description.centroids, *description.boundaries) == (*book.centroids.tolist(), *book.boundaries.tolist())
    assert torch.equal(description.transform.matrix(layer, head_dim), rotation)
    y = exact_norm(x)[0].bfloat16().double() @ rotation.double()
    expected = (y[..., None] >= book.boundaries.double()).sum(-1)
    assert compare_levels(level, expected, y, book.boundaries.double(), bounds.ROTATED_FP32).unexplained == 0
    assert torch.equal(level, choose_levels(exact_norm(x)[0], rotation.float(), book.boundaries)[0])
    dequantized = kv_format.dequantize(fields, layer).double()
    for row, ours in enumerate(kv_format.to_bytes(fields).numpy()):
        assert ours[:-2].tobytes() == slow.encode_tq_levels(level[row].tolist(), bits)
        centroids = book.centroids.double()[level[row].long()]
        scale = float(ours[-2:].view("<f2")[0])
        length = centroids.norm() if side == "k" else centroids @ y[row]
        exact = x[row].double().norm() / length if length > 0 else length
        # FP16: half a unit in the last place, or half its smallest number.
        assert abs(scale - exact) <= max(2.0**-11 * exact * 1.001, 2.0**-25)
        row_values = scale * centroids @ rotation.double().T
        torch.testing.assert_close(
            dequantized[row], row_values, rtol=0, atol=float(exact) * centroids.norm().item() * 1e-6 + 1e-12
        )


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_and_unpacking(bits):
    level = torch.randint(2**bits, (3, 5, 48), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    rows = level.view(15, 48).tolist()
    planes = pack_planes(level, bits)
    assert planes.view(15, -1).numpy().tobytes() == b"".join(slow.encode_tq_levels(row, bits) for row in rows)
    assert torch.equal(unpack_planes(planes, bits), level)
    if bits < 8:
        stream = pack_stream(level, bits)
        assert stream.view(15, -1).numpy().tobytes() == b"".join(slow.bit_string(row, bits) for row in rows)
        assert torch.equal(unpack_stream(stream, bits), level)
        assert unpack_stream(pack_stream(level[:0], bits), bits).shape == (0, 5, 48)


# -- Arithmetic --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 7, 8, 19, 64, 80, 128, 130, 256, 1000])
def test_sums_are_taken_in_the_order_that_they_say(count):
    x = torch.randn(400, count, generator=torch.Generator().manual_seed(count)) ** 2
    np.testing.assert_array_equal(sum_pairwise(x).numpy(), x.numpy().sum(axis=-1))
    np.testing.assert_array_equal(sum_in_order(x).numpy(), x.numpy().cumsum(axis=-1)[:, -1])
    if count >= 64:
        assert not torch.equal(sum_pairwise(x), sum_in_order(x))


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-30, 1e-3, 1.0, 1e18, 1e30, 3e36])
def test_exact_norm_neither_underflows_nor_overflows(scale):
    x = (torch.randn(64, 128, generator=torch.Generator().manual_seed(4)) * scale).float()
    unit, norm = exact_norm(x)
    truth = x.double().norm(dim=-1, keepdim=True)
    resolution = 2.0**-149 * 0.51  # half the smallest FP32 number: a norm that is denormal itself
    torch.testing.assert_close(norm.double(), truth, rtol=3e-7, atol=resolution)
    torch.testing.assert_close(unit.double(), x.double() / truth, rtol=5e-7, atol=1e-12)


def test_rounding_is_away_from_zero_at_ties_only():
    below_half = np.nextafter(np.float32(0.5), np.float32(0))
    x = torch.tensor([0.0, 0.5, -0.5, 1.5, 2.5, -2.5, float(below_half), -float(below_half), 8388609.0, 126.5])
    assert round_half_away(x).tolist() == [0, 1, -1, 2, 3, -3, 0, 0, 8388609, 127]
