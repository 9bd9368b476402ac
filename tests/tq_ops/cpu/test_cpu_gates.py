"""Gated products in C++: as near to their formulas as the bounds of an op ask, for gates of every size."""

import pytest
import torch
from op_tables import every_table, relative

from haarkv.validation import bounds


def gelu(x):
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


@every_table
@pytest.mark.parametrize(
    ("op", "gate_of"), [("silu_mul", torch.nn.functional.silu), ("gelu_mul", gelu), ("sigmoid_mul", torch.sigmoid)]
)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_a_product_is_that_of_its_formula(table, op, gate_of, size):
    gate, up = torch.randn(2, 40, 77, generator=torch.Generator().manual_seed(0))
    gate = size * gate
    expected = gate_of(gate.double()) * up.double()
    for dtype, bound in ((torch.float32, bounds.LAYER_FP32.op), (torch.bfloat16, bounds.LAYER_BF16.rounded_op)):
        found = getattr(table.open(), op)(gate, up, dtype)
        assert found.dtype == dtype
        assert relative(found, expected) <= bound


@every_table
def test_gates_that_are_not_ordinary_numbers(table):
    gate = torch.tensor([[float("nan"), float("inf"), -1e4, 1e30, 0.0]])
    found = table.open().gelu_mul(gate, torch.ones_like(gate), torch.float32)[0]
    assert found[0].isnan()
    assert found[1:].tolist() == [float("inf"), pytest.approx(0, abs=1e-33), pytest.approx(1e30), 0.0]
