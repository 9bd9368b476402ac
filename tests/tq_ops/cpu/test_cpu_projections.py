"""Projections in C++: the bits of a number depend on its token and its row alone, and its error is bounded."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from at_length import MORE, pairwise_cases
from block_weights import TYPES, random_blocks, random_inputs, shapes
from op_tables import CPU, TABLES, every_table, open_table

from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.weight import rounding_to

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (33, 17), (96, 70), (1040, 70), (2063, 33)]
"""[inputs, outputs]: tiles and registers that are full, cut short, and several stretches of inputs."""
MOST = 530  # tokens: more than one pass takes


def random_product(inputs, outputs, dtype):
    generator = torch.Generator().manual_seed(inputs)
    x, weight = torch.randn(MOST, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    return x.to(dtype), weight.to(dtype)


def products(weight):
    """x [MOST, inputs] and weights of each shape: dense ones of a dtype, or blocks of a type for integers of some bits."""
    if isinstance(weight, torch.dtype):
        return [random_product(inputs, outputs, weight) for inputs, outputs in SHAPES]
    kind, bits = weight
    inputs, outputs = shapes(kind)[-1]
    return [(random_inputs(MOST, inputs), rounding_to(random_blocks(kind, outputs, inputs), bits))]


# Of blocks the rest runs with `make test-long`.
every_product = pytest.mark.parametrize(
    ("table", "weight"),
    [*product(TABLES, DTYPES), *pairwise_cases(MORE, TABLES, list(product(TYPES, (16, 8))))],
    ids=lambda part: getattr(part, "name", str(part)),
)


@every_product
def test_a_token_gets_the_same_bits_beside_any_others_on_any_threads(table, weight):
    ops, before = table.open(), torch.get_num_threads()
    for x, matrix in products(weight):
        alone = torch.cat([ops.linear(x[t : t + 1], matrix) for t in range(40)])
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(together := ops.linear(x, matrix), ops.linear(x.clone(), matrix))
                assert torch.equal(together[:40], alone)
                for count in (*range(2, 20), 31, 32, 33, 50, 64, 100, 512):
                    begin = MOST - count if count % 2 else 7
                    assert torch.equal(ops.linear(x[begin : begin + count], matrix), together[begin : begin + count])
        finally:
            torch.set_num_threads(before)


@every_product
def test_a_row_of_the_weight_gives_the_same_bits_beside_any_others(table, weight):
    ops = table.open()
    for x, matrix in products(weight):
        outputs = matrix.shape[0]
        for tokens in (1, 3, 5, 9, 40):
            whole = ops.linear(x[:tokens], matrix)
            for begin, end in ((0, 1), (outputs // 2, outputs), (outputs // 3, outputs // 3 + 1)):
                # Nothing may be read behind the part.
                part = matrix[begin:end] if isinstance(weight, torch.dtype) else rows_of(matrix, begin, end)
                assert torch.equal(ops.linear(x[:tokens], part), whole[:, begin:end])


def rows_of(matrix, begin, end):
    return replace(matrix, data=matrix.data[begin:end].clone())


@every_product
def test_numbers_that_are_none_reach_their_own_token_alone(table, weight):
    ops = table.open()
    x, matrix = products(weight)[0]
    x = x[:40].clone()
    whole = ops.linear(x, matrix)
    x[3, 0], x[21, -1] = float("nan"), float("inf")
    others = [t for t in range(40) if t not in (3, 21)]
    for tokens in (40, 1):
        output = torch.cat([ops.linear(x[t : t + tokens], matrix) for t in range(0, 40, tokens)])
        assert not output[3].isfinite().any()
        assert not output[21].isfinite().any()
        assert torch.equal(output[others], whole[others])


@every_table
@pytest.mark.parametrize(("x_dtype", "dtype"), [(a, b) for a in DTYPES for b in DTYPES], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_error_of_a_sum_is_that_of_so_many_additions(table, x_dtype, dtype, inputs, outputs):
    """Each number takes part in at most inputs / 8 + 24 roundings, each of half a step of FP32."""
    x, weight = random_product(inputs, outputs, torch.float32)
    x, weight = x[:20].to(x_dtype), weight.to(dtype)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    ours = table.open().linear(x, weight).double()
    assert ((ours - exact).abs() <= (inputs / 8 + 24) * 2**-24 * sizes).all()


def fused_multiply_add(a, b, c):
    """c + a * b rounded once to FP32, of BF16 a and b: FP64 holds their sum but for bits that cannot decide a rounding."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def sum_by_halves(lanes):
    """The last axis added up: the upper half to the lower one, again and again."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("table", CPU[:-1], ids=lambda table: table.name)
def test_registers_add_pairs_of_inputs_in_lanes_that_are_added_by_halves(table, tokens):
    """Lane l takes inputs 2 l and 2 l + 1 of each step, the even one first; `vdpbf16ps` takes the odd one first."""
    ops, (x, weight) = open_table(table), random_product(2063, 33, torch.bfloat16)
    x, lanes = x[:tokens], 8 if table.name.endswith(("portable", "avx2")) else 16
    odd_first = table.name.endswith("vnni") and library.load().haarkv_isas() & library.BF16_PRODUCTS
    padded_inputs = -(-2063 // (2 * lanes)) * 2 * lanes
    a, b = (torch.nn.functional.pad(m.float(), (0, padded_inputs - 2063)).numpy() for m in (x, weight))
    sums = np.zeros((tokens, 33, lanes), np.float32)
    for first in range(0, padded_inputs, 2 * lanes):
        for i in (1, 0) if odd_first else (0, 1):
            columns = slice(first + i, first + 2 * lanes, 2)
            sums = fused_multiply_add(a[:, None, columns], b[None, :, columns], sums)
    assert torch.equal(ops.linear(x, weight), torch.from_numpy(sum_by_halves(sums)))


@pytest.mark.parametrize("tokens", [1, 20])
def test_tiles_add_even_inputs_then_odd_ones_then_both_to_the_sum(tokens):
    """What `tdpbf16ps` is said to do, 32 inputs at a time."""
    ops, (x, weight) = open_table(CPU[-1]), random_product(2063, 33, torch.bfloat16)
    x = x[:tokens]
    a, b = (torch.nn.functional.pad(m.float(), (0, 2080 - 2063)).numpy() for m in (x, weight))
    sums = np.zeros((tokens, 33), np.float32)
    for first in range(0, 2080, 32):
        halves = np.zeros((2, tokens, 33), np.float32)
        for i in range(first, first + 32):
            halves[i % 2] = fused_multiply_add(a[:, None, i], b[None, :, i], halves[i % 2])
        sums = sums + (halves[0] + halves[1])
    assert torch.equal(ops.linear(x, weight), torch.from_numpy(sums))
