"""Faults planted in a layer's attention, in the interpreter: each moves what the layer adds far beyond its bound."""

from functools import partial

import pytest
import torch
from npu_layers import LAYER, layer_call, learned_spec, worst_token
from npu_programs import needs_pypto
from planted_programs import FAULTS, IN_STEPS, NOT_SHRUNK, Planted, PlantedSteps
from small_models import SMALL, resized, small_model

from haarkv.models.qwen3_14b.npu import programs
from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.tq_ops.npu.sides import kept_shape, sides_of
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from haarkv.validation.bounds import NPU_LAYER_ADDED
from haarkv.validation.bringup.rungs import long_decode
from haarkv.validation.bringup.workbench import Request, Workbench

pytestmark = needs_pypto
CONFIG = resized(SMALL, hidden_size=128, intermediate_size=128, num_layers=2)
CLEAR = 10
"""A fault must exceed the bound by this factor."""
# In decode a second step of keys and a short sequence; in prefill a second sequence, whose blocks are others.
CASES = {"decode": ([1, 1, 1], [299, 17, 130]), "prefill": ([20, 9], [250, 3])}
TWO_STEPS = {"decode": ([1, 1], [511, 17]), "prefill": ([20, 9], [480, 3])}


@pytest.fixture(scope="module")
def model():
    return small_model(CONFIG, seed=3, dtype=torch.bfloat16)


def short_steps(config, *sides):
    return programs.decode_program(config, *sides, step_tokens=256)


MAKE = {"decode": short_steps, "prefill": programs.prefill_program}


def error_of(make, case, kv, model, plant=lambda program: program, blocks=12):
    spec = kv if isinstance(kv, KVSpec) else learned_spec(CONFIG, kv) if "lr" in kv else KVSpec(kv)
    plan = spec.plan(CONFIG.num_layers)
    program = make(CONFIG, *sides_of(plan, LAYER), kept_shape(plan, LAYER))
    arguments, goldens, out, tiling, expected = layer_call(program, *case, blocks, model, spec)
    assert {"k_kept" in (program.arguments[i].name for i in goldens)} == {program.kept is not None}
    with Simulator() as simulator:
        simulator.run(plant(program), arguments, Mode.NUMBERS)
    return worst_token(arguments[out][tiling.row], expected)


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.npu_long)])
@pytest.mark.parametrize("kv", ["tq4", *(pytest.param(kv, marks=pytest.mark.npu_long) for kv in ("bf16", "k=lr4,v=tq4"))])
def test_a_fault_in_attention_is_far_beyond_the_bound(kind, kv, model):
    assert error_of(MAKE[kind], CASES[kind], kv, model) < NPU_LAYER_ADDED
    for name, (honest, faulty) in FAULTS.items():
        plant = partial(Planted.of, honest=honest, faulty=faulty)
        error = error_of(MAKE[kind], CASES[kind], kv, model, plant)
        print(f"{name}: {error:.1e}")
        assert error > CLEAR * NPU_LAYER_ADDED, name


# The bring-up below finds the rest in `make test`.
@pytest.mark.parametrize(
    "name", ["the first head's scales for all", *(pytest.param(n, marks=pytest.mark.npu_long) for n in list(IN_STEPS)[1:])]
)
@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.npu_long)])
def test_a_fault_in_a_step_of_attention_is_far_beyond_the_bound(kind, name, model):
    honest, faulty = IN_STEPS[name]
    # A maximum that grows in the second step takes one as long as the first.
    case = TWO_STEPS[kind] if name == NOT_SHRUNK else CASES[kind]
    error = error_of(MAKE[kind], case, "tq4", model, partial(PlantedSteps.of, honest=honest, faulty=faulty))
    print(f"{name}: {error:.1e}")
    assert error > CLEAR * NPU_LAYER_ADDED


BEHIND = {name: (PlantedSteps, *fault) for name, fault in IN_STEPS.items()} | {
    name: (Planted, *fault) for name, fault in FAULTS.items() if "sequence" not in name
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == NOT_SHRUNK else pytest.mark.npu_long) for n in BEHIND])
def test_a_bring_up_finds_it_in_a_decode_over_two_steps(name, monkeypatch):
    """With `tiny` and its steps of 2,048 keys."""
    plant, honest, faulty = BEHIND[name]
    call = SimRunner.call

    def spoiled(self, program, tensors):
        wrong = plant.of(program, honest, faulty) if isinstance(program, LayerProgram) else program
        call(self, wrong, tensors)

    monkeypatch.setattr(SimRunner, "call", spoiled)
    found = long_decode(Workbench(Request("npu", "sim", "tiny"), lambda _: None))
    assert (found.passed, found.where) == (False, "tq4, layer 0, attention"), found.said
