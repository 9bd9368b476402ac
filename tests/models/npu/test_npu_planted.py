"""Faults planted in a layer's attention, in the interpreter: each moves what the layer adds far beyond its bound."""

import pytest
import torch
from npu_layers import LAYER, layer_call, worst_token
from npu_learned import learned_spec
from npu_programs import needs_pypto
from planted_programs import FAULTS, Planted
from small_models import SMALL, resized, small_model

from haarkv.models.qwen3_14b.npu import programs
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.sides import sides_of
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from haarkv.validation.bounds import NPU_LAYER_ADDED

pytestmark = needs_pypto
CONFIG = resized(SMALL, hidden_size=128, intermediate_size=128, num_layers=2)
CLEAR = 10
"""A fault must exceed the bound so many times."""
# In decode a second step of keys and a short sequence; in prefill a second sequence, whose blocks are others.
CASES = {"decode": ([1, 1, 1], [299, 17, 130]), "prefill": ([20, 9], [250, 3])}


@pytest.fixture(scope="module")
def model():
    return small_model(CONFIG, seed=3, dtype=torch.bfloat16)


def error_of(kind, kv, model, plant):
    spec = learned_spec(CONFIG, kv) if "lr" in kv else KVSpec(kv)
    sides = sides_of(spec.plan(CONFIG.num_layers), LAYER)
    if kind == "decode":
        program = programs.decode_program(CONFIG, *sides, step_tokens=256)
    else:
        program = programs.prefill_program(CONFIG, *sides)
    arguments, _, out, tiling, expected = layer_call(program, *CASES[kind], model=model, spec=spec)
    with Simulator() as simulator:
        simulator.run(plant(program), arguments, Mode.NUMBERS)
    return worst_token(arguments[out][tiling.row], expected)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("kv", ["tq4", *(pytest.param(kv, marks=pytest.mark.npu_long) for kv in ("bf16", "k=lr4,v=tq4"))])
def test_a_fault_in_attention_is_far_beyond_the_bound(kind, kv, model):
    assert error_of(kind, kv, model, lambda program: program) < NPU_LAYER_ADDED
    for name, (honest, faulty) in FAULTS.items():
        error = error_of(kind, kv, model, lambda program, texts=(honest, faulty): Planted.of(program, *texts))
        print(f"{name}: {error:.1e}")
        assert error > CLEAR * NPU_LAYER_ADDED, name
