"""Every kernel function of a program left out, one after the other: each must be missed. What only declares does not count."""

import torch
from executed_leaves import functions, without, wrong_stores
from npu_layers import layer_call
from small_models import SMALL, resized, small_model

from haarkv.models.qwen3_14b.npu import programs
from lab.npu.aicore.emission import emit


def test_every_function_of_the_store_is_missed(stored):
    emission, machine, goldens = stored
    found = functions(emission)
    assert len(found) >= 6
    assert machine.executed().keys() >= found.keys()
    for symbol, leaves in found.items():
        wrong = wrong_stores(emission, without(machine, leaves), goldens)
        assert any(wrong.values()), f"{symbol} could be left out"


def test_every_function_of_a_decode_layer_is_missed(simulator, toolchain):
    """In the cache, in the hidden state, or in its padding, where nothing but finite numbers is asked for."""
    model = small_model(
        resized(SMALL, hidden_size=128, intermediate_size=128, num_heads=5, num_kv_heads=1), dtype=torch.bfloat16
    )
    program = programs.decode_program(model.config, step_tokens=128)
    arguments, goldens, out, tiling, _ = layer_call(program, [1, 1, 1], [130, 60, 5], model=model)
    emission = emit(simulator, program, arguments)
    machine = emission.machine(toolchain)
    whole, executed = machine.run()[out], machine.executed()
    assert whole.isfinite().all()
    found = {symbol: leaves for symbol, leaves in functions(emission).items() if executed[symbol]}
    assert len(found) >= 35
    for symbol, leaves in found.items():
        after = without(machine, leaves)
        stored = all(torch.equal(after[index], golden) for index, golden in goldens.items())
        same = torch.equal(after[out][tiling.row], whole[tiling.row]) and bool(after[out].isfinite().all())
        assert not (stored and same), f"{symbol} of {leaves[0].scope} could be left out"
