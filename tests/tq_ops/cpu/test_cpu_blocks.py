"""Projections by weights in blocks: the error is that of x in integers of 16 or 8 bits; bits depend on a token and a row."""

from dataclasses import replace
from itertools import product

import bounds
import pytest
import torch
from at_length import MORE, pairwise_cases
from block_weights import HALVES, TYPES, block_bytes, block_minima, random_blocks, random_inputs, shapes
from op_tables import TABLES, every_table

from haarkv.models.gguf_file import block_type
from haarkv.tq_ops.cpu import library
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.weight import Blocks, dense, rounding_to

every_type = pytest.mark.parametrize("kind", TYPES)
every_pair = pytest.mark.parametrize(
    ("table", "kind"), pairwise_cases(MORE, TABLES, TYPES), ids=lambda part: getattr(part, "name", part)
)


def exact(x, weight):
    return x.double() @ dense(weight).double().T


def bound(x, weight):
    """What each number may be off by: half a step of each x, and half a step of FP32 for each addition."""
    inputs = weight.shape[1]
    blocks = x.double().abs().view(len(x), -1, 32)
    largest, total = (
        blocks.amax(-1) / (127.0 if weight.x_bits == 8 else bounds.BLOCK_X_LARGEST),
        blocks.sum(-1) / bounds.BLOCK_X_TOTAL,
    )
    half_steps = torch.maximum(largest, total).repeat_interleave(32, dim=1) * bounds.BLOCK_X_HALF_STEP
    numbers, minima = dense(weight).double(), block_minima(weight).double()
    sizes = (numbers - minima).abs() + 2 * minima.abs()
    additions = inputs / 256 * 2 + bounds.BLOCK_ADDITIONS
    return half_steps @ numbers.abs().T + additions * 2.0**-24 * (x.double().abs() @ sizes.T)


@every_pair
def test_the_error_is_that_of_x_in_integers(table, kind):
    ops, bf16 = table.open(), torch.bfloat16
    for inputs, outputs in shapes(kind):
        weight, x = random_blocks(kind, outputs, inputs), random_inputs(40, inputs)
        for bits, tokens in product((16, 8), (1, 2, 3, 5, 8, 40)):
            rounded_weight = rounding_to(weight, bits)
            for inputs_part in (x[:tokens], x[:tokens].to(bf16)):
                error = (ops.linear(inputs_part, rounded_weight).double() - exact(inputs_part, weight)).abs()
                assert (error <= bound(inputs_part, rounded_weight)).all(), (inputs, outputs, bits, tokens)
                # And it is as coarse as is said.
                assert bool(error.mean() > bound(inputs_part, weight).mean()) == (bits == 8)


@every_type
def test_instructions_for_bytes_give_the_bits_that_others_give(kind):
    """Of one token, some, and panels; of groups of blocks that are cut short. `portable` has no fused products."""
    tables = [CpuOps(isa) for isa in library.isas()[1:]]
    for inputs, outputs in shapes(kind):
        weight, x = rounding_to(random_blocks(kind, outputs, inputs), 8), random_inputs(40, inputs)
        for tokens in (1, 3, 9, 12, 13, 40):
            first, *others = (ops.linear(x[:tokens], weight) for ops in tables)
            assert all(torch.equal(first, other) for other in others), (inputs, outputs, tokens)


@every_table
@every_type
def test_rows_may_lie_apart(table, kind):
    ops = table.open()
    inputs, outputs = shapes(kind)[-1]
    weight, x = random_blocks(kind, outputs, inputs), random_inputs(9, inputs)
    wide = torch.cat([torch.full((outputs, weight.type.nbytes), 255, dtype=torch.uint8), weight.data], dim=1)
    strided_weight = replace(weight, data=wide[:, weight.type.nbytes :])
    assert not strided_weight.data.is_contiguous()
    for tokens in (1, 3, 9):
        assert torch.equal(ops.linear(x[:tokens], strided_weight), ops.linear(x[:tokens], weight))


@every_table
@every_type
def test_scales_of_rows_and_columns_are_those_of_the_restored_numbers(table, kind):
    ops = table.open()
    inputs, outputs = shapes(kind)[1]
    plain, x = random_blocks(kind, outputs, inputs), random_inputs(7, inputs)
    generator = torch.Generator().manual_seed(3)
    rows, columns = (2.0 ** torch.randint(-3, 4, (count,), generator=generator) for count in (outputs, inputs))
    for tokens in (1, 7):
        x_rows = x[:tokens]
        assert torch.equal(ops.linear(x_rows, plain * rows[:, None]), ops.linear(x_rows, plain) * rows)
        assert torch.equal(ops.linear(x_rows, plain * columns), ops.linear(x_rows * columns, plain))


@every_table
def test_the_largest_levels_and_numbers_do_not_overflow(table):
    """Q6_K: all factors -128 and all levels -32, in turns with 127 and 31; x as large as its step allows, each sign."""
    weight = random_blocks("Q6_K", 2, 512)
    data = block_bytes(weight).clone()
    data[..., :192], data[..., 192:208] = 0, 128
    data[1, :, :192], data[1, :, 192:208] = 255, 127
    weight = replace(weight, data=data.view(2, -1))
    x = torch.full((4, 512), 3.0)
    x[1] *= -1
    x[2, ::2] = 1e-3
    x[3, 40:] = 0.0
    for variant in (weight, rounding_to(weight, 8)):
        error = (table.open().linear(x, variant).double() - exact(x, variant)).abs()
        assert (error <= bound(x, variant)).all()


@every_table
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "MXFP4"])
@pytest.mark.parametrize("bad", [0x7E00, 0x7C00, 0xFC00], ids=["nan", "inf", "-inf"])
def test_a_scale_that_is_none_reaches_its_own_row(table, kind, bad):
    ops = table.open()
    inputs, outputs = shapes(kind)[1]
    weight, x = random_blocks(kind, outputs, inputs), random_inputs(9, inputs)
    data, at = block_bytes(weight).clone(), HALVES.get(kind, (0,))[0]
    data[5, -1, at : at + 2] = torch.tensor([bad & 0xFF, bad >> 8], dtype=torch.uint8)
    faulty_weight = replace(weight, data=data.view(outputs, -1))
    for tokens in (1, 9):
        output, sound = (ops.linear(x[:tokens], variant) for variant in (faulty_weight, weight))
        assert not output[:, 5].isfinite().any()
        others = [row for row in range(outputs) if row != 5]
        assert torch.equal(output[:, others], sound[:, others])


@every_table
def test_zeros_and_no_tokens_are_no_numbers(table):
    ops, weight = table.open(), random_blocks("Q4_K", 5, 256)
    assert ops.linear(torch.zeros(0, 256), weight).shape == (0, 5)
    assert torch.equal(ops.linear(torch.zeros(9, 256), weight), torch.zeros(9, 5))
    assert torch.equal(ops.linear(torch.full((1, 256), 1e-36), weight), torch.zeros(1, 5))


@every_table
def test_other_types_are_restored(table):
    kind = 10  # Q2_K
    data = torch.randint(0, 100, (7, block_type(kind).nbytes), dtype=torch.uint8)
    weight, x = Blocks(data, block_type(kind), torch.float32), random_inputs(3, 256)
    ops = table.open()
    assert torch.equal(ops.linear(x, weight), ops.linear(x, dense(weight)))
