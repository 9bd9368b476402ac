"""Projections in C++: the bits of a number depend on its token and its row alone, and its error is bounded."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from at_length import MORE, pairwise_cases
from block_weights import TYPES, random_blocks, random_inputs, shapes
from op_tables import TABLES, every_table

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
