"""A fault planted in a step of a layer's attention, in the interpreter, which the bring-up of a device finds."""

import pytest
from npu_programs import needs_pypto
from planted_programs import IN_STEPS, NOT_SHRUNK, PlantedSteps

from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.validation.bringup.rungs import long_decode
from haarkv.validation.bringup.workbench import Request, Workbench

pytestmark = needs_pypto


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == NOT_SHRUNK else pytest.mark.npu_long) for n in IN_STEPS])
def test_a_bring_up_finds_it_in_a_decode_over_two_steps(name, monkeypatch):
    """With `tiny` and its steps of 2,048 keys."""
    call = SimRunner.call

    def faulty_call(self, program, tensors):
        wrong = PlantedSteps.with_fault(program, *IN_STEPS[name]) if isinstance(program, LayerProgram) else program
        call(self, wrong, tensors)

    monkeypatch.setattr(SimRunner, "call", faulty_call)
    finding = long_decode(Workbench(Request("npu", "sim", "tiny"), lambda _: None))
    assert (finding.passed, finding.where) == (False, "tq4, layer 0, attention"), finding.said
