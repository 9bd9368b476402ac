"""Products with weights in GGUF blocks, restored in registers, and rows of them: in Triton's interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch
from at_length import MORE_CUDA, rest
from block_weights import random_blocks

pytest.importorskip("triton", "3.6", reason="needs the cuda extra")

from haarkv.tq_ops.cuda import block_products, ops
from haarkv.tq_ops.cuda.block_planes import PLANES, by_planes, placed
from haarkv.tq_ops.weight import Blocks, dense, weight_numbers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 1.5e-7
"""Of a product, as a share of the sum of its terms' sizes: FP32 sums of 512 numbers. Measured 7e-8."""


def product_error(y, x, weight):
    numbers = weight_numbers(weight).double()
    exact, sizes = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    return float(((y.cpu() - exact).abs() / sizes).max())


def powers(count, seed):
    return 2.0 ** torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", PLANES)
def test_planes_hold_the_numbers_of_the_file_to_the_bit(kind):
    # Of 8 rows several are restored at a time.
    for rows, inputs in ((7, 512), (8, 256)) if PLANES[kind].together == 8 else ((7, 512), (8, 96), (7, 32)):
        weight = random_blocks(kind, rows, inputs)
        planes = by_planes(weight, torch.device("cpu"))
        ours, theirs = dense(planes), dense(weight)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
        assert planes.shape == weight.shape
        assert planes.nbytes <= weight.nbytes * 148 / 144


@pytest.mark.parametrize("tokens", rest(MORE_CUDA, [3, 1, 40], lambda index, _: index == 0))
@pytest.mark.parametrize("kind", PLANES)
def test_a_product_is_the_restored_weights_but_for_fp32_sums(kind, tokens):
    """Of rows and tokens that fill no tile; scales of rows and columns, which are powers of two, change nothing else."""
    generator = torch.Generator().manual_seed(1)
    plain = random_blocks(kind, 37, 512)
    scaled_weight = plain * powers(37, 2).unsqueeze(1) * powers(512, 3)
    for dtype, weight in ((torch.bfloat16, plain), (torch.float32, scaled_weight)):
        x = torch.randn(tokens, 512, generator=generator).to(dtype)
        y = ops.linear(x.to(DEVICE), placed(weight, DEVICE))
        assert y.dtype == torch.float32
        assert product_error(y, x, weight) < ERROR


def swap_blocks(data, planes, blocks):
    """The same bytes with the first block's codes in the second's place, and the other way about."""
    width = planes.low * 4
    data = data.clone()
    data[:, :width], data[:, width : 2 * width] = data[:, width : 2 * width].clone(), data[:, :width].clone()
    return data


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("Q8_0", "a neighbour's block"), ("Q4_K", "a neighbour's block"), ("Q5_0", "no fifth bits"), ("Q5_K", "no fifth bits"),
        ("Q4_K", "another block's minimum"), ("Q4_1", "another block's minimum"), ("Q6_K", "a scale one less"),
        ("Q4_K", "a scale one less"),
    ],
)  # fmt: skip
def test_planted_faults_are_far_beyond_the_bound(kind, fault):
    weight, x = random_blocks(kind, 9, 512), torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    wrong = by_planes(weight, DEVICE)
    planes, blocks = wrong.planes, 16
    high, scales, minima, d, m = planes.places(blocks)
    data = wrong.data.clone()
    match fault:
        case "a neighbour's block":
            data = swap_blocks(data, planes, blocks)
        case "no fifth bits":
            data[:, high:scales] = 0
        case "another block's minimum":
            part = slice(minima, d) if planes.scales else slice(m, data.shape[1])
            data[:, part] = data[:, part].roll(1 if planes.scales else 2, 1)
        case "a scale one less":
            data[:, scales] -= 1
    y = ops.linear(x.to(DEVICE), replace(wrong, data=data))
    assert product_error(y, x, weight) > 100 * ERROR


@pytest.mark.parametrize("kind", PLANES)
def test_rows_have_the_bits_that_the_file_restores(kind):
    plain, index = random_blocks(kind, 12, 512), torch.tensor([11, 0, 3, 3])
    for weight in (plain, plain * powers(12, 2).unsqueeze(1) * powers(512, 3)):
        planes = by_planes(weight, DEVICE)
        for dtype in (torch.float32, torch.bfloat16):
            ours = block_products.gather_rows(planes, index.to(DEVICE), dtype)
            assert torch.equal(ours.cpu(), Blocks.rows(weight, index, dtype))


def test_other_types_are_restored_on_their_way():
    weight = placed(random_blocks("IQ4_NL", 4, 64), DEVICE)
    assert not isinstance(weight, Blocks)
    assert weight.device.type == DEVICE.type
