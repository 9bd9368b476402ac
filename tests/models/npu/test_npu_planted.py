"""Faults planted in a layer's attention, in the interpreter: each moves what the layer adds far beyond its bound."""

from functools import partial

import pytest
import torch
from npu_layers import LAYER, layer_call, worst_token
from npu_learned import learned_spec
from npu_programs import needs_pypto
from planted_programs import FAULTS, STALE, Planted
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


def short_steps(config, *sides):
    return programs.decode_program(config, *sides, step_tokens=256)


MAKE = {"decode": short_steps, "prefill": programs.prefill_program}


def error_of(make, case, kv, model, plant=lambda program: program, blocks=12):
    spec = learned_spec(CONFIG, kv) if "lr" in kv else KVSpec(kv)
    program = make(CONFIG, *sides_of(spec.plan(CONFIG.num_layers), LAYER))
    arguments, _, out, tiling, expected = layer_call(program, *case, blocks, model, spec)
    with Simulator() as simulator:
        simulator.run(plant(program), arguments, Mode.NUMBERS)
    return worst_token(arguments[out][tiling.row], expected)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("kv", ["tq4", *(pytest.param(kv, marks=pytest.mark.npu_long) for kv in ("bf16", "k=lr4,v=tq4"))])
def test_a_fault_in_attention_is_far_beyond_the_bound(kind, kv, model):
    assert error_of(MAKE[kind], CASES[kind], kv, model) < NPU_LAYER_ADDED
    for name, (honest, faulty) in FAULTS.items():
        plant = partial(Planted.of, honest=honest, faulty=faulty)
        error = error_of(MAKE[kind], CASES[kind], kv, model, plant)
        print(f"{name}: {error:.1e}")
        assert error > CLEAR * NPU_LAYER_ADDED, name


@pytest.mark.parametrize("kv", ["tq4", "k=lr4,v=tq4", pytest.param("bf16", marks=pytest.mark.npu_long)])
def test_decode_goes_on_beyond_its_2048_tokens(kv, model):
    """With the steps that an executor takes: 2,048 keys and 54 more, beside a sequence of one step."""
    case = [1, 1], [2101, 17]
    assert error_of(programs.decode_program, case, kv, model, blocks=20) < NPU_LAYER_ADDED
    stale = partial(Planted.of, **dict(zip(("honest", "faulty"), FAULTS[STALE], strict=True)))
    assert error_of(programs.decode_program, case, kv, model, stale, blocks=20) > 5 * NPU_LAYER_ADDED
