"""Scope 2a on the device: quantize and append, bit for bit what the format stores."""

import pytest
import torch
from npu_programs import MEAN_AT, needs_pypto, store_case

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sides import TQ4, fixed_sides
from haarkv.tq_ops.npu.sim.simulator import Mode

pytestmark = needs_pypto


def check(simulator, case):
    """Every number that the program writes, and every other one in the cache, is the format's; an FP32 norm but for its last
    bit, as it may be summed otherwise."""
    simulator.run(case.program, order_arguments(case.program, case.tensors), Mode.NUMBERS)
    for name, golden in case.goldens.items():
        assert golden.any()
        rtol = 2.0**-22 if golden.dtype == torch.float32 else 0.0
        torch.testing.assert_close(case.tensors[name], golden, rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize(("tokens", "kv_heads"), [(20, 2), (5, 8), pytest.param(1, 2, marks=pytest.mark.npu_long)])
def test_codes_and_scales_are_those_of_the_format(simulator, tokens, kv_heads):
    check(simulator, store_case(tokens, kv_heads))


@pytest.mark.parametrize("name", [name for name in fixed_sides(128) if name != TQ4.name])
def test_the_fields_of_another_format_are_its_own(simulator, name):
    """Bytes of levels and numbers in BF16 and FP32 alike, to the last bit."""
    case = store_case(20, pair=(formats.get(name),) * 2)
    assert set(case.goldens) == {a.name for prefix in "kv" for a in fixed_sides(128)[name].arguments(prefix) if a.output}
    check(simulator, case)


@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.npu_long) for bits in (2, 3, 5))])
def test_learned_keys_are_those_of_the_format(simulator, bits):
    """Levels of 1 to 6 bits, some of them in two bytes, rows of 32 to 80 bytes; a vector that is the mean stores scale 0."""
    case = store_case(20, pair=(synthetic.calibration().format(bits), formats.get("tq4")))
    assert case.program.k.vectors.width == 16 * bits
    check(simulator, case)
    slot = int(case.tensors["slot"][MEAN_AT])
    assert case.tensors["k_scale"].view(-1, 2, 128)[slot // 128, 0, slot % 128] == 0


def test_a_wrong_byte_is_seen(simulator):
    case = store_case(2)
    case.goldens["v_codes"][7, 3] ^= 1
    with pytest.raises(AssertionError, match="v_codes"):
        check(simulator, case)
