"""Scope 2a on the device: quantize and append, bit for bit what the format stores."""

import pytest
import torch
from npu_programs import Case, empty_cache, needs_pypto, rotation, scatter, verify
from npu_verify import VerificationError, check_verified

from haarkv.tq_ops.npu.scopes import StoreProgram
from haarkv.tq_ops.npu.sides import SIDES, TQ4
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

pytestmark = needs_pypto
BLOCKS = 3


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


def awkward(tokens, kv_heads, seed):
    """Vectors [T, Hkv, 128] FP32 of very different lengths, one of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kv_heads, 128, generator=generator)
    x *= torch.logspace(-3, 3, tokens * kv_heads).view(tokens, kv_heads, 1)
    x[0, -1] = 0
    return x


def store_case(tokens, kv_heads=2, layer=1, rows=16, seed=0, side=TQ4):
    k, v = awkward(tokens, kv_heads, seed), awkward(tokens, kv_heads, seed + 1)
    slots = torch.randperm(BLOCKS * 128, generator=torch.Generator().manual_seed(seed))[:tokens]
    cache = empty_cache(BLOCKS, kv_heads, side)
    padded = -(-tokens // rows) * rows

    def flat(x):
        out = torch.zeros(padded, kv_heads, 128)
        out[:tokens] = x
        return out.view(-1, 128)

    goldens = {}
    for name, x in (("k", k), ("v", v)):
        goldens |= scatter(cache, x, name, slots, layer, kv_heads, side)
    tensors = {"k": flat(k), "v": flat(v), "rotation": rotation(layer), "slot": slots.int(), **cache}
    return Case(StoreProgram(kv_heads, rows, side=side), tensors, goldens)


@pytest.mark.parametrize(("tokens", "kv_heads"), [(1, 2), (5, 8), (20, 2)])
def test_codes_and_scales_are_those_of_the_format_after_every_pass(simulator, tokens, kv_heads):
    worst, run = verify(simulator, store_case(tokens, kv_heads))
    assert worst == 0
    assert len({row.pass_name for row in run.rows}) >= 6


@pytest.mark.parametrize("name", [name for name in SIDES if name != TQ4.name])
def test_the_fields_of_another_format_are_its_own_after_every_pass(simulator, name):
    """Bytes of levels and numbers in BF16 and FP32 alike, to the last bit."""
    case = store_case(20, side=SIDES[name])
    assert set(case.goldens) == {a.name for prefix in "kv" for a in SIDES[name].arguments(prefix) if a.output}
    worst, run = verify(simulator, case)
    assert worst == 0
    assert len({row.pass_name for row in run.rows}) >= 6


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
    goldens[4][0, 0] ^= 1
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
