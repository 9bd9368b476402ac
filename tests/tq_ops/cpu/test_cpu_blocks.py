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
def test_few_tokens_get_the_bits_of_many_by_long_rows_too(kind):
    """Of 12,544 inputs x does not fit the first cache in 16 bits."""
    ops = CpuOps()
    for inputs, outputs in ((4096, 3), (4352, 70), (12544, 33)):
        for bits in (16, 8):
            weight, x = rounding_to(random_blocks(kind, outputs, inputs), bits), random_inputs(16, inputs)
            whole = ops.linear(x, weight)
            for tokens in (1, 3, 12):
                assert torch.equal(ops.linear(x[:tokens], weight), whole[:tokens]), (inputs, bits, tokens)


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


# -- Rows, as embeddings are looked up ---------------------------------------------------------------------------------
@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_that_gguf_restores(kind, dtype):
    """One and many, twice the same, scattered ones whose rows lie apart, groups cut short, and every byte that there is."""
    ops, generator = CpuOps(), torch.Generator().manual_seed(5)
    for inputs, _ in shapes(kind):
        plain = random_blocks(kind, 70, inputs, dtype=dtype)
        drawn_bytes = torch.randint(0, 256, plain.data.shape, dtype=torch.uint8, generator=generator)
        wild = replace(plain, data=drawn_bytes)
        strided_weight = replace(plain, data=torch.cat([plain.data, drawn_bytes[:, :1]], dim=1)[:, :-1])
        scaled_weight = plain * (2.0 ** torch.randint(-3, 4, (70, 1), generator=generator))
        columns = plain * (2.0 ** torch.randint(-3, 4, (inputs,), generator=generator))
        for weight in (plain, wild, strided_weight, scaled_weight, columns):
            for index in (torch.tensor([69]), torch.tensor([3, 3, 0]), torch.randperm(70, generator=generator)):
                ours, theirs = ops.rows(weight, index), weight.rows(index)
                assert ours.dtype == theirs.dtype == dtype
                is_number = ~theirs.isnan()  # of drawn scales some are none, and a NaN has many bits
                assert torch.equal(is_number, ~ours.isnan())
                assert same_bits(ours[is_number], theirs[is_number])


def same_bits(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_rows_of_other_weights_are_looked_up_as_ever():
    ops, index = CpuOps(), torch.tensor([1, 0])
    plain = torch.randn(3, 8)
    assert torch.equal(ops.rows(plain, index), plain[index])
    blocks = random_blocks("Q8_0", 3, 32)
    assert torch.equal(ops.rows(blocks, torch.tensor([-1])), blocks.rows(torch.tensor([2])))
    for beyond in (3, -4, 2**40):
        with pytest.raises(IndexError):
            ops.rows(blocks, torch.tensor([0, beyond]))
