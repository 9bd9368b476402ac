"""Learned keys by stretches on the NPU programs: what the host hands over, what is stored, and planted faults."""

from dataclasses import replace

import pytest
import torch
from npu_layers import CONFIG as SHORT
from npu_layers import fill_cache, learned_spec
from npu_programs import with_pypto
from small_models import cache_tensors, resize_config

from haarkv.executors.npu import NpuExecutor
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.compile import plan_programs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.device import open_runner
from haarkv.tq_ops.npu.sides import layer_sides, turn_table, turns_of_tokens
from haarkv.tq_ops.npu.store import StoreByProgram

CONFIG = resize_config(SHORT, max_position_embeddings=4096)
SMALLER = resize_config(CONFIG, num_heads=4)


def make_spec(kv="k=lr4,v=tq4", config=SMALLER, **window_options):
    return replace(learned_spec(config, kv, turning=True), **window_options)


# -- What the host hands over ----------------------------------------------------------------------------------------------
def test_keys_of_tokens_are_turned_by_where_their_stretch_begins():
    key_turns = synthetic.calibration().format(4).turns(0)
    positions = torch.tensor([0, 1023, 1024, 2047, 2048, 70_000])
    cos, sin = turns_of_tokens(key_turns, positions).split(64, 1)
    x = torch.randn(6, 128)
    turned_keys = torch.cat([x[:, :64] * cos + x[:, 64:] * sin, x[:, 64:] * cos - x[:, :64] * sin], 1)
    assert torch.equal(turned_keys, key_turns.undo(x, positions))
    assert torch.equal(turned_keys[:2], x[:2])
    assert not torch.equal(turned_keys[2], x[2])


def test_a_turning_format_has_a_program_of_its_own_and_rows_are_made_once():
    plan, still = make_spec().plan(2), learned_spec(SMALLER).plan(2)
    assert layer_sides(plan, 0)[0] == replace(layer_sides(still, 0)[0], turning=True)
    _, paging, sequences = fill_cache(SMALLER, make_spec(), [1023], seed=1)
    batch = paging.batch(sequences, [2])
    program = programs.prefill_program(SMALLER, *layer_sides(plan, 0))
    tiling = inputs.tile(batch, program, (torch.zeros(2, 64), torch.zeros(2, 64)))
    rows = inputs.back_argument(tiling, plan, 0)["back"]
    assert rows is inputs.back_argument(tiling, plan, 1)["back"]
    assert torch.equal(rows[:2], turn_table(plan.k(0).turns(0), rows.device)[:2])
    assert inputs.back_argument(tiling, still, 0) == {}


def test_keys_that_turn_in_part_are_refused_by_name():
    calibration = synthetic.calibration()
    bases = tuple(replace(basis, inv_freq=basis.inv_freq[:32]) for basis in calibration.k)
    part = KVSpec("k=lr4,v=tq4", calibration=replace(calibration, k=bases)).plan(2)
    assert NpuExecutor.supports(SMALLER, make_spec().plan(2)) is None
    message = "its programs turn all 128 numbers of a key, and lr4 turns 64 of them"
    assert NpuExecutor.supports(SMALLER, part) == message
    with pytest.raises(InputError, match=message):
        plan_programs(SMALLER, ["decode"], part)


# -- In the interpreter ------------------------------------------------------------------------------------------------------
@with_pypto
@pytest.mark.parametrize("turning", [True, pytest.param(False, marks=pytest.mark.npu_long)])
@pytest.mark.parametrize("bits", [4, *(pytest.param(bits, marks=pytest.mark.npu_long) for bits in (2, 3, 5))])
def test_the_store_alone_turns_keys_as_the_reference_does(bits, turning):
    """What `tq dev bringup` runs before a whole layer. Tokens around two borders: every byte."""
    generator = torch.Generator().manual_seed(0)
    spec = learned_spec(CONFIG, f"k=lr{bits},v=tq4", turning=turning)
    k, v = (torch.randn(25, 2, 128, generator=generator) for _ in "kv")
    cache_contents = []
    for store in (StoreByProgram(open_runner("sim")), lambda k, v, cache, layer, batch: cache.write(layer, k, v, batch)):
        cache, paging, sequences = fill_cache(CONFIG, spec, [2040, 1019], seed=1)
        store(k, v, cache, 1, paging.batch(sequences, [15, 10]))
        cache_contents.append([tensor for *_, tensor in cache_tensors(cache)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*cache_contents, strict=True))
