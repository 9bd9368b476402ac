"""A layer executed in many of the orders that PyPTO's tables allow, and without each of its kernel functions.

All orders give the same, but without the barrier not.
"""

import random
from collections import Counter

import pytest
import torch
from executed_leaves import functions, without, wrong_stores
from npu_calls import LAYER, layer_call, without_barrier
from npu_layers import worst_token
from small_models import SMALL, resize_config, small_model

from haarkv.models.qwen3_14b.npu import programs
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.sides import layer_sides, window_shape
from haarkv.validation.bounds import NPU_LAYER_ADDED
from lab.npu.aicore.emission import Recorder, emit

ORDERS = 200
# Seven of ten differ.
FEW = 20


def small():
    """A layer that is quick to run many times."""
    config = resize_config(SMALL, hidden_size=128, intermediate_size=128, num_heads=5, num_kv_heads=1)
    return small_model(config, dtype=torch.bfloat16)


CACHES = {"packed": KVSpec("tq4"), "with a ring and sinks": KVSpec("tq4", tail=8, sink=3)}


@pytest.fixture(scope="module", params=CACHES)
def call(request):
    """Three sequences, one of them with a second step of keys: a small layer and short steps, quick to run many times."""
    spec = CACHES[request.param]
    model = small()
    plan = spec.plan(model.config.num_layers)
    sides, windows_shape = layer_sides(plan, LAYER), window_shape(plan, LAYER)
    program = programs.decode_program(model.config, *sides, windows_shape, step_tokens=128)
    return program, layer_call(program, [1, 1, 1], [130, 60, 5], model=model, spec=spec)


def run_orders(program, case, toolchain, count):
    """Outputs that differ from the reference's cache, or from the first order's output -> in how many orders."""
    arguments, goldens, out, tiling, expected = case
    with Recorder() as simulator:
        machine = emit(simulator, program, arguments).machine(toolchain)
    first = machine.run()[out]
    if not worst_token(first[tiling.row], expected) < NPU_LAYER_ADDED:
        first = torch.full_like(first, float("nan"))
    differing = Counter()
    for seed in range(count):
        after = machine.run(random.Random(seed))
        wrong = [program.arguments[i].name for i, golden in goldens.items() if not torch.equal(after[i], golden)]
        wrong += [] if torch.equal(after[out][tiling.row], first[tiling.row]) else ["out"]
        differing.update(wrong)
    return differing


@pytest.mark.long
def test_every_order_that_the_tables_allow_gives_the_same(call, toolchain):
    program, case = call
    assert not run_orders(program, case, toolchain, ORDERS)


def test_without_the_barrier_orders_differ(call, toolchain):
    """The cache is right in any order, and rows of it are read before they are stored."""
    program, case = call
    differing = run_orders(without_barrier(program), case, toolchain, FEW)
    print(f"\nwithout the barrier, of {FEW} orders: {dict(differing)}")
    assert set(differing) == {"out"}


# -- Left out: each must be missed; what only declares does not count -------------------------------------------------------
def test_every_function_of_the_store_is_missed(store_run):
    emission, machine, goldens = store_run
    leaves_by_symbol = functions(emission)
    assert len(leaves_by_symbol) >= 6
    assert machine.call_counts().keys() >= leaves_by_symbol.keys()
    for symbol, leaves in leaves_by_symbol.items():
        wrong = wrong_stores(emission, without(machine, leaves), goldens)
        assert any(wrong.values()), f"{symbol} could be left out"


def test_every_function_of_a_decode_layer_is_missed(simulator, toolchain):
    """In the cache, in the hidden state, or in its padding, where nothing but finite numbers is asked for."""
    model = small()
    program = programs.decode_program(model.config, step_tokens=128)
    arguments, goldens, out, tiling, _ = layer_call(program, [1, 1, 1], [130, 60, 5], model=model)
    emission = emit(simulator, program, arguments)
    machine = emission.machine(toolchain)
    whole, call_counts = machine.run()[out], machine.call_counts()
    assert whole.isfinite().all()
    leaves_by_symbol = {symbol: leaves for symbol, leaves in functions(emission).items() if call_counts[symbol]}
    assert len(leaves_by_symbol) >= 35
    for symbol, leaves in leaves_by_symbol.items():
        after = without(machine, leaves)
        same_store = all(torch.equal(after[index], golden) for index, golden in goldens.items())
        same = torch.equal(after[out][tiling.row], whole[tiling.row]) and bool(after[out].isfinite().all())
        assert not (same_store and same), f"{symbol} of {leaves[0].scope} could be left out"
