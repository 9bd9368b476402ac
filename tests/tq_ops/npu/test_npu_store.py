"""Scope 2a on the device: quantize and append, bit for bit what the format stores."""

import pytest
from npu_programs import MEAN_AT, needs_pypto, store_case, verify
from npu_verify import VerificationError, check_verified

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.npu.sides import TQ4, fixed_sides
from haarkv.tq_ops.npu.sim.simulator import Mode

pytestmark = needs_pypto


@pytest.mark.parametrize(("tokens", "kv_heads"), [(20, 2), (5, 8), pytest.param(1, 2, marks=pytest.mark.npu_long)])
def test_codes_and_scales_are_those_of_the_format_after_every_pass(simulator, tokens, kv_heads):
    worst, run = verify(simulator, store_case(tokens, kv_heads))
    assert worst == 0
    assert len({row.pass_name for row in run.rows}) >= 6


@pytest.mark.parametrize("name", [name for name in fixed_sides(128) if name != TQ4.name])
def test_the_fields_of_another_format_are_its_own_after_every_pass(simulator, name):
    """Bytes of levels and numbers in BF16 and FP32 alike, to the last bit."""
    case = store_case(20, pair=(formats.get(name),) * 2)
    assert set(case.goldens) == {a.name for prefix in "kv" for a in fixed_sides(128)[name].arguments(prefix) if a.output}
    worst, run = verify(simulator, case)
    assert worst == 0
    assert len({row.pass_name for row in run.rows}) >= 6


@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.npu_long) for bits in (2, 3, 5))])
def test_learned_keys_are_those_of_the_format_after_every_pass(simulator, bits):
    """Levels of 1 to 6 bits, some of them in two bytes, rows of 32 to 80 bytes; a vector that is the mean stores scale 0."""
    case = store_case(20, pair=(made_up.calibration().format(bits), formats.get("tq4")))
    assert case.program.k.vectors.width == 16 * bits
    worst, run = verify(simulator, case)
    assert worst == 0
    assert len({row.pass_name for row in run.rows}) >= 6
    slot = int(case.tensors["slot"][MEAN_AT])
    assert case.tensors["k_scale"].view(-1, 2, 128)[slot // 128, 0, slot % 128] == 0


@pytest.mark.npu_long
def test_a_wrong_golden_is_refused(simulator):
    case = store_case(2)
    case.goldens["v_codes"][7, 3] ^= 1
    with pytest.raises(VerificationError, match=r"v_codes is off|gives FAIL"):
        verify(simulator, case)


def test_a_wrong_golden_is_refused_by_our_own_comparison_alone(simulator):
    """PyPTO has let a wrong byte through: the data are compared whatever it says."""
    case = store_case(2)
    goldens = case.indexed(case.goldens)
    tensors = [case.tensors[a.name] for a in case.program.arguments]
    run = simulator.run(case.program, tensors, Mode.VERIFY, goldens)
    assert all(row.verdict == "PASS" for row in run.rows)
    check_verified(case.program, run, {i: tensors[i] for i in goldens}, goldens, 0)
    goldens[[a.name for a in case.program.arguments].index("k_codes")][0, 0] ^= 1
    with pytest.raises(VerificationError, match="k_codes is off"):
        check_verified(case.program, run, {i: tensors[i] for i in goldens}, goldens, 0)


def test_zeros_for_inputs_are_refused(simulator):
    """PyPTO's stub runtime would have computed on zeros and said PASS."""
    case = store_case(2)
    for name in ("k", "v"):
        case.tensors[name].zero_()
    for name in case.goldens:
        case.tensors[name].zero_()
        case.goldens[name].zero_()
    with pytest.raises(VerificationError):
        verify(simulator, case)


def test_a_skipped_verification_is_refused(simulator):
    case = store_case(2)
    goldens = case.indexed(case.goldens)
    tensors = [case.tensors[a.name] for a in case.program.arguments]
    run = simulator.run(case.program, tensors, Mode.NUMBERS)
    outputs = {i: tensors[i] for i in goldens}
    with pytest.raises(VerificationError, match="Pass_36"):
        check_verified(case.program, run, outputs, goldens, 0)
    run.rows.clear()
    with pytest.raises(VerificationError, match="compared nothing"):
        check_verified(case.program, run, outputs, goldens, 0)
    with pytest.raises(VerificationError, match="nothing to compare"):
        check_verified(case.program, run, {}, {}, 0)
